"""A cluster in memory and in virtual time, by seed: API server, controllers, kubelets, trainer, and people who meddle.

The operator in it is the real reconcile and act. Requests fail before or after they took effect, the operator is
killed between any two of them, and what it sees lags behind. What must never happen is an assertion here; what must
come about in the end is one in `World.settle`. Objects are never changed in place, so a snapshot costs nothing.
"""

import asyncio
import collections
import copy
import dataclasses
import datetime
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import yaml

from operators.act import carry_out
from operators.causes import is_true, moment
from operators.conditions import timestamp
from operators.observe import needs_the_truth
from operators.observed import Event, Key, Object, Observed, Plan
from operators.reconcile import reconcile
from operators.resolve import Platform
from operators.situation import controller
from tests.test_spec import MINIMAL

NAME = "arithmetic"
TOTAL_STEPS = 6
LOST_FOR_S = 400.0
JOB_UID = "batch.kubernetes.io/controller-uid"
"""Label of a Job's pods in a real cluster, which they keep when they are orphaned."""
PLATFORM = Platform()
CHILD_KINDS = ("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")

Place = tuple[str, str]  # kind, name
Dict = dict[str, Any]


class Fault(Exception):
    """A request failed; whether it took effect, nobody knows."""


class Killed(Exception):
    """The operator is gone."""


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.version = 0
        self.objects: dict[Place, Dict] = {}
        self.history: list[tuple[int, dict[Place, Dict]]] = []  # (version, all objects), oldest first
        self.saved: dict[str, int] = {}  # uid of an RLJob → step of its checkpoint
        self.steps: dict[str, int] = {}  # uid of a trainer's Job → its step
        self.asked: set[str] = set()  # uids of Jobs whose trainer was asked to stop
        self.deaf: set[str] = set()  # of Jobs whose trainer does not listen
        self.made: dict[str, set[int]] = collections.defaultdict(set)  # uid of a Job → indices that had a pod
        self.lost: dict[str, datetime.datetime] = {}  # uid of a pod → when its node was lost
        self.makers: dict[str, str] = {}  # uid of a trainer's pod → its first controller; it may be orphaned since
        self.troubled: set[str] = set()  # uids of Jobs that something has happened to
        self.blameless: set[str] = set()  # uids of Jobs that others ended
        self.crashed: dict[str, str] = {}  # uid of a Job that failed by itself → name of the pod to blame
        self.counted: collections.Counter[str] = collections.Counter()  # the same → how often that was counted
        self.restarts: collections.Counter[str] = collections.Counter()  # uid of an RLJob → failures counted
        self.writes = 0
        self.events: list[Event] = []
        self.errors = 0.03  # probability that a request fails
        self.deaths = 0.02  # that the operator dies before or after it
        self.create_job(self.random.choice([1, 2]), self.random.choice([0, 1, 3]))

    # The API server

    def put(self, found: Dict) -> Dict:
        self.version += 1
        metadata = found["metadata"] | {"resourceVersion": str(self.version), "namespace": "default"}
        metadata.setdefault("uid", f"{found['kind']}-{self.version}".lower())
        self.objects[found["kind"], metadata["name"]] = found = found | {"metadata": metadata}
        return found

    def all(self, *kinds: str) -> list[Dict]:
        return [found for (kind, _), found in self.objects.items() if kind in kinds]

    @property
    def job(self) -> Dict | None:
        return self.objects.get(("RLJob", NAME))

    def delete(self, found: Dict) -> None:
        """A pod has its grace; all else is gone at once, and what it owned follows by and by."""
        if found["kind"] != "Pod":
            del self.objects[found["kind"], found["metadata"]["name"]]
        elif "deletionTimestamp" not in found["metadata"]:
            until = timestamp(self.now + datetime.timedelta(seconds=30))
            self.put(found | {"metadata": found["metadata"] | {"deletionTimestamp": until}})

    def set_status(self, found: Dict, **changes: Any) -> Dict:
        return self.put(found | {"status": found.get("status", {}) | changes})

    def set_spec(self, found: Dict, **changes: Any) -> None:
        generation = found["metadata"].get("generation", 1) + 1
        metadata = found["metadata"] | {"generation": generation}
        self.put(found | {"spec": found["spec"] | changes, "metadata": metadata})

    # Controllers

    def tick(self, seconds: float) -> None:
        self.now += datetime.timedelta(seconds=seconds)
        for act in (self.collect_garbage, self.run_jobs, self.run_deployments, self.run_pods, self.train):
            act()
        self.version += 1
        self.history.append((self.version, dict(self.objects)))
        del self.history[:-12]
        self.check()

    def collect_garbage(self) -> None:
        uids = {found["metadata"]["uid"] for found in self.objects.values()}
        for found in list(self.objects.values()):
            owners = found["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.delete(found)

    def pods_of(self, owner: Dict) -> list[Dict]:
        return [pod for pod in self.all("Pod") if controller(pod) == owner["metadata"]["uid"]]

    def run_jobs(self) -> None:
        for job in self.all("Job"):
            if not _over(job):
                self.run_job(job)

    def run_job(self, job: Dict) -> None:
        uid, pods = job["metadata"]["uid"], self.pods_of(job)
        busy = [pod for pod in pods if not _ended(pod)]
        if job["spec"]["suspend"]:
            for pod in busy:
                self.delete(pod)
            return
        indices = {int(pod["metadata"]["labels"]["index"]) for pod in pods}
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        if failed or self.made[uid] - indices:
            for pod in busy:
                self.delete(pod)
            if not busy:
                policy = any(_condition(pod, "DisruptionTarget") for pod in failed)
                self.conclude(job, "Failed", "PodFailurePolicy" if policy else "BackoffLimitExceeded")
        elif len([pod for pod in pods if _ended(pod)]) == job["spec"]["completions"]:
            self.conclude(job, "Complete", "CompletionsReached")
        else:
            for index in range(job["spec"]["parallelism"]):
                if index not in self.made[uid]:
                    self.made[uid].add(index)
                    self.create_pod(job, f"-{index}", {"index": str(index)})

    def conclude(self, job: Dict, kind: str, reason: str) -> None:
        self.set_status(job, conditions=[{"type": kind, "status": "True", "reason": reason}])

    def create_pod(self, owner: Dict, suffix: str, more: Mapping[str, str]) -> None:
        labels = owner["spec"]["template"]["metadata"]["labels"] | more
        reference = {"uid": owner["metadata"]["uid"], "controller": True, "kind": owner["kind"]}
        metadata = {"name": f"{owner['metadata']['name']}{suffix}", "labels": labels, "ownerReferences": [reference]}
        if ("Pod", metadata["name"]) in self.objects:  # of an earlier owner of the same name
            metadata["name"] += f"-{self.version}"
        self.put({"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}, "status": {"phase": "Pending"}})

    def run_deployments(self) -> None:
        for found in self.all("Deployment"):
            pods = self.pods_of(found)
            for pod in pods:
                if _ended(pod):
                    del self.objects["Pod", pod["metadata"]["name"]]
            pods = [pod for pod in pods if not _ended(pod) and "deletionTimestamp" not in pod["metadata"]]
            wanted = found["spec"]["replicas"]
            for pod in pods[wanted:]:
                self.delete(pod)
            for _ in range(wanted - len(pods)):
                self.create_pod(found, f"-{self.version}", {})
            ready = sum(is_true(_condition(pod, "Ready")) for pod in pods[:wanted])
            generation = found["metadata"].get("generation", 1)
            status = {"observedGeneration": generation, "replicas": len(pods), "updatedReplicas": len(pods)}
            if found.get("status") != status | {"readyReplicas": ready}:
                self.set_status(found, **status, readyReplicas=ready)

    def run_pods(self) -> None:
        for pod in self.all("Pod"):
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            if uid in self.lost:
                self.lose(pod)
            elif "deletionTimestamp" in pod["metadata"]:
                overdue = moment(pod["metadata"]["deletionTimestamp"]) < self.now
                if overdue or self.random.random() < 0.3:
                    del self.objects["Pod", name]
            elif pod["status"]["phase"] == "Pending" and self.random.random() < 0.6:
                self.set_status(pod, phase="Running", conditions=[{"type": "Ready", "status": "True"}])

    def lose(self, pod: Dict) -> None:
        """A pod on a lost node: told to go, marked, and forced out of the API server much later."""
        since = (self.now - self.lost[pod["metadata"]["uid"]]).total_seconds()
        if since > LOST_FOR_S:
            del self.objects["Pod", pod["metadata"]["name"]]
        elif since > 40 and not _ended(pod):
            self.delete(pod)

    # The trainer

    def train(self) -> None:
        for job in self.all("Job"):
            pods = self.pods_of(job)
            ready = [
                pod for pod in pods if is_true(_condition(pod, "Ready")) and pod["metadata"]["uid"] not in self.lost
            ]
            going = any("deletionTimestamp" in pod["metadata"] or _ended(pod) for pod in pods)
            if not _over(job) and len(ready) == job["spec"]["completions"] and not going:
                self.train_on(job, pods)

    def train_on(self, job: Dict, pods: list[Dict]) -> None:
        uid, owner = job["metadata"]["uid"], controller(job)
        assert owner is not None
        if uid not in self.steps and self.random.random() < 0.2:
            self.deaf.add(uid)
        step = self.steps.setdefault(uid, self.saved.get(owner, 0))
        if uid in self.asked - self.deaf:
            self.saved[owner] = step
            self.end_pods(pods, 4, "[rank 0] stopped on request: checkpoint is written")
        elif step >= TOTAL_STEPS:
            for pod in pods:
                self.set_status(pod, phase="Succeeded", conditions=[])
        elif self.random.random() < 0.4:
            self.steps[uid] = step + 1
            if step % 2:
                self.saved[owner] = step + 1

    def end_pods(self, pods: list[Dict], code: int, message: str, reason: str = "Error") -> None:
        end = {"exitCode": code, "reason": reason, "message": message, "finishedAt": timestamp(self.now)}
        state = [{"name": "trainer", "state": {"terminated": end}}]
        for pod in pods:
            self.set_status(pod, phase="Failed", conditions=[], containerStatuses=state)

    def report(self, pods: list[Object]) -> Dict | None:
        for pod in pods:
            job = controller(pod)
            live = self.objects.get(("Pod", pod["metadata"]["name"]))
            if live is not None and live["status"]["phase"] == "Running" and job in self.steps:
                step = self.steps[job]
                return {"phase": "training", "step": step, "version": [1, step], "checkpoint_step": step // 2 * 2}
        return None

    # People, and accidents

    def create_job(self, nodes: int, max_restarts: int) -> None:
        job = yaml.safe_load(MINIMAL)
        job["metadata"] = {"name": NAME, "namespace": "default", "generation": 1}
        job["spec"]["algorithm"]["totalSteps"] = TOTAL_STEPS
        job["spec"] |= {"trainer": {"nodes": nodes}, "runPolicy": {"maxRestarts": max_restarts}}
        self.put(job)

    def disturb(self) -> None:
        accidents: list[tuple[int, Callable[[], None]]] = [
            (4, lambda: self.hit_trainer(self.crash)),
            (1, lambda: self.hit_trainer(self.refuse)),
            (3, lambda: self.hit_trainer(self.evict)),
            (2, lambda: self.hit_trainer(self.remove)),
            (2, lambda: self.hit_trainer(self.cut_off)),
            (2, self.remove_worker),
            (4, self.meddle),
            (3, self.delete_trainer),
            (3, self.toggle),
            (3, self.edit),
            (1, self.occupy),
            (1, self.delete_job),
        ]
        weights = [weight for weight, _ in accidents]
        self.random.choices([act for _, act in accidents], weights)[0]()

    def hit_trainer(self, hit: Callable[[Dict, Dict], None]) -> None:
        jobs = [job for job in self.all("Job") if not _over(job) and job["metadata"]["uid"] not in self.troubled]
        pods = [(job, pod) for job in jobs for pod in self.pods_of(job) if pod["status"]["phase"] == "Running"]
        if pods:
            job, pod = self.random.choice(pods)
            self.troubled.add(job["metadata"]["uid"])
            if hit in (self.evict, self.remove, self.cut_off):
                self.blameless.add(job["metadata"]["uid"])
            hit(job, pod)

    def crash(self, job: Dict, pod: Dict) -> None:
        self.crashed[job["metadata"]["uid"]] = pod["metadata"]["name"]
        if self.random.random() < 0.3:
            self.end_pods([pod], 137, "", "OOMKilled")
        else:
            self.end_pods([pod], 1, "[rank 0] RuntimeError: broken")

    def refuse(self, job: Dict, pod: Dict) -> None:
        if self.random.random() < 0.5:
            self.end_pods([pod], 3, "model.uri: there is no such model")

    def evict(self, job: Dict, pod: Dict) -> None:
        self.end_pods([pod], 143, "")
        live = self.objects["Pod", pod["metadata"]["name"]]
        self.set_status(live, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "Eviction"}])

    def remove(self, job: Dict, pod: Dict) -> None:
        self.delete(pod)

    def cut_off(self, job: Dict, pod: Dict) -> None:
        self.lost[pod["metadata"]["uid"]] = self.now

    def remove_worker(self) -> None:
        for found in self.all("Deployment"):
            for pod in self.pods_of(found)[:1]:
                self.delete(pod)

    def meddle(self) -> None:
        """Somebody edits or deletes a child."""
        children = self.all(*CHILD_KINDS)
        if not children:
            return
        child = self.random.choice(children)
        if child["kind"] == "Job":
            self.troubled.add(child["metadata"]["uid"])
        if self.random.random() < 0.5:
            self.delete_child(child)
        elif child["kind"] == "Job" and not _over(child):
            self.set_spec(child, suspend=True)
        elif child["kind"] == "Deployment":
            self.set_spec(child, replicas=child["spec"]["replicas"] + 2)
        elif child["kind"] == "ConfigMap":
            self.put(child | {"data": {"run.json": "{}"}})

    def delete_trainer(self) -> None:
        for job in self.all("Job")[:1]:
            self.troubled.add(job["metadata"]["uid"])
            self.delete_child(job)

    def delete_child(self, child: Dict) -> None:
        self.forget(child)
        if child["kind"] == "Job" and self.random.random() < 0.4:  # orphans its pods
            for pod in self.pods_of(child):
                self.put(pod | {"metadata": pod["metadata"] | {"ownerReferences": []}})
        self.delete(child)

    def forget(self, child: Dict) -> None:
        """Nobody will know how it ended."""
        if child["kind"] == "Job":
            self.crashed.pop(child["metadata"]["uid"], None)

    def toggle(self) -> None:
        if self.job is not None:
            self.set_spec(self.job, suspend=not self.job["spec"].get("suspend", False))

    def edit(self) -> None:
        if self.job is not None:
            rate = {"learningRate": self.random.choice(["1e-6", "2e-6", "3e-6"])}
            rollout = {"replicas": self.random.choice([1, 2, 3])}
            change = self.random.choice([{"algorithm": self.job["spec"]["algorithm"] | rate}, {"rollout": rollout}])
            self.set_spec(self.job, **change)

    def occupy(self) -> None:
        """A stranger takes the name of a child that is not there just now."""
        service = self.objects.pop(("Service", f"{NAME}-trainer"), None)
        if service is not None:
            self.put({"kind": "Service", "metadata": {"name": f"{NAME}-trainer", "labels": {}}, "spec": {}})

    def delete_job(self) -> None:
        """And, mostly, apply it again at once."""
        if self.job is not None:
            nodes = self.job["spec"]["trainer"]["nodes"]
            self.delete(self.job)
            if self.random.random() < 0.8:
                self.create_job(nodes, self.random.choice([0, 1, 3]))

    def calm(self) -> None:
        """Nobody meddles any longer, and the user wants the job to run."""
        self.errors = self.deaths = 0.0
        for found in self.all("Service"):
            if controller(found) is None:
                self.delete(found)
        if self.job is not None and self.job["spec"].get("suspend"):
            self.set_spec(self.job, suspend=False)

    # What must hold

    def check(self) -> None:
        """At every moment no more than one trainer Job of a run has pods that may be at work."""
        at_work: dict[str, set[str | None]] = collections.defaultdict(set)
        for pod in self.all("Pod"):
            labels = pod["metadata"]["labels"]
            if (
                labels["miles.dev/component"] == "trainer"
                and not _ended(pod)
                and pod["metadata"]["uid"] not in self.lost
            ):
                job = controller(pod) or labels.get(JOB_UID, "unknown")  # orphaned before it was first seen
                maker = self.makers.setdefault(pod["metadata"]["uid"], job)
                at_work[labels["miles.dev/job-uid"]].add(maker)
        for owners in at_work.values():
            assert len(owners) <= 1, f"two attempts at once: {owners}"

    def check_status(self, before: Object, after: Object, observed: Observed) -> None:
        uid = observed.job["metadata"]["uid"]
        for kind in ("Complete", "Failed"):
            if holds(before, kind):
                assert holds(after, kind), f"{kind} was taken back"
                assert after["attempt"]["number"] == before["attempt"]["number"]
        old, new = before.get("attempt", {}).get("number", 0), after["attempt"]["number"]
        assert old <= new <= old + 1, f"attempt {old} became {new}"
        grown = after["restarts"] - before.get("restarts", 0)
        assert grown == (new > old and after["attempt"]["cause"] == "Failure"), "restarts and attempts disagree"
        self.restarts[uid] += grown
        ended = [
            child for child in observed.children if child["kind"] == "Job" and is_true(_condition(child, "Failed"))
        ]
        for job in ended:
            if int(job["metadata"]["labels"]["miles.dev/attempt"]) == old:
                self.check_counted(job["metadata"]["uid"], before, after)

    def check_counted(self, job: str, before: Object, after: Object) -> None:
        """The job has failed, and was seen to."""
        assert not (job in self.blameless and after["attempt"]["cause"] == "Failure"), "a disruption was counted"
        if job not in self.crashed or holds(before, "Failed") or holds(before, "Complete"):
            return
        pod = self.crashed[job]
        if holds(after, "Failed"):
            told = next(entry for entry in after["conditions"] if entry["type"] == "Failed")
            assert told["reason"] == "MaxRestartsExceeded" and pod in told["message"], told
        else:
            assert after["attempt"]["cause"] == "Failure" and pod in after["attempt"]["message"], after["attempt"]
        self.counted[job] += 1
        assert self.counted[job] == 1, "a failure was counted twice"

    def check_deletion(self, live: Dict, observed: Observed) -> None:
        """A failure that the operator has seen is counted before its Job is deleted."""
        uid, attempt = live["metadata"]["uid"], observed.job.get("status", {}).get("attempt", {})
        if live["kind"] != "Job" or uid not in self.crashed or self.counted[uid]:
            return
        seen = next((child for child in observed.children if child["metadata"]["uid"] == uid), {})
        current = live["metadata"]["labels"]["miles.dev/attempt"] == str(attempt.get("number", 0))
        assert not (current and is_true(_condition(seen, "Failed"))), "a failure was forgotten"

    def settle(self) -> None:
        """All that must have come about once nothing disturbs any longer."""
        operator, job = Operator(self), None
        for _ in range(400):
            self.tick(5)
            operator.look()
            job = self.job
            if job is None or _status_over(job):
                break
        else:
            raise AssertionError(f"not over: {yaml.safe_dump((job or {}).get('status'))}")
        for _ in range(20):
            self.tick(20)
            operator.look()
        self.writes = 0
        operator.look()
        assert self.writes == 0, "an idle job is written to"
        self.check_end()

    def check_end(self) -> None:
        pods = [pod for pod in self.all("Pod") if controller(pod) is not None]  # somebody has orphaned the others
        if self.job is None:
            assert not pods and not self.all(*CHILD_KINDS), f"left over: {list(self.objects)}"
            return
        uid, status = self.job["metadata"]["uid"], self.job["status"]
        for child in self.all(*CHILD_KINDS):
            assert controller(child) == uid, f"a stranger's child: {child['kind']} {child['metadata']['name']}"
        assert [found["spec"]["replicas"] for found in self.all("Deployment")] in ([0], [])
        assert all(_ended(pod) for pod in self.all("Pod") if _is_pod_of(pod, uid)), "pods run on"
        assert all(_ended(pod) for pod in pods), "pods of another job run on"
        assert len(self.all("Job")) <= 1
        assert status["restarts"] == self.restarts[uid]
        if holds(status, "Complete"):
            assert status["training"]["step"] == TOTAL_STEPS


class Operator:
    """One incarnation: watches that lag, and requests that fail."""

    def __init__(self, world: World) -> None:
        self.world = world
        start = world.version, dict(world.objects)
        self.seen = {"Pod": start, "others": start}
        self.answered: dict[Place, Dict] = {}

    def look(self) -> None:
        """One pass. Raises Fault and Killed."""
        observed = self.observe()
        if observed is not None:
            plan = reconcile(observed, self.world.now, PLATFORM)
            self._check_stands(observed, plan)
            _run(carry_out(plan, observed, Requests(self, observed)))

    def _check_stands(self, observed: Observed, plan: Plan) -> None:
        """While a plan stands, nothing is to be done, whatever else the report tells."""
        told = observed.report and {
            **observed.report,
            "queue_groups": 7.0,
            "waiting_for": "3 of 8 groups",
            "eta_s": 5.0,
        }
        then = self.world.now + plan.stands * self.world.random.random()
        if plan.stands:
            later = reconcile(dataclasses.replace(observed, report=told), then, PLATFORM)
            assert not later.acts and later.status is None and not later.events, f"{plan} does not stand: {later}"

    def observe(self) -> Observed | None:
        world = self.world
        job = world.job
        if job is None:
            return None
        uid = job["metadata"]["uid"]
        view = self.cached()
        children = [found for found in view.values() if found["kind"] in CHILD_KINDS and controller(found) == uid]
        pods = [found for found in view.values() if _is_pod_of(found, uid)]
        if needs_the_truth(job, children):
            jobs = [found for found in world.all("Job") if controller(found) == uid]
            children = [child for child in children if child["kind"] != "Job"] + jobs
            pods = [found for found in world.all("Pod") if _is_pod_of(found, uid)]
        strange = [found for found in world.all(*CHILD_KINDS) if controller(found) != uid]
        foreign = frozenset(Key(found["kind"], found["metadata"]["name"]) for found in strange)
        return Observed(job, children, pods, foreign, report=world.report(pods))

    def cached(self) -> dict[Place, Dict]:
        """What the watches have told so far, never going back, with the answers to our own writes put over it. The
        watch of the pods lags on its own."""
        world = self.world
        if world.errors == 0.0:
            return world.objects
        for watch, (version, _) in self.seen.items():
            later = [past for past in world.history if past[0] > version]
            if later and world.random.random() < 0.7:
                self.seen[watch] = world.random.choice(later)
        pods, others = self.seen["Pod"][1], self.seen["others"][1]
        view = {place: found for place, found in pods.items() if place[0] == "Pod"}
        view |= {place: found for place, found in others.items() if place[0] != "Pod"}
        heard = self.seen["others"][0]
        own = self.answered.items()
        return view | {place: found for place, found in own if int(found["metadata"]["resourceVersion"]) > heard}


class Requests:
    """What `operators.act` asks of a cluster; each request may fail, and may be the operator's last."""

    def __init__(self, operator: Operator, observed: Observed) -> None:
        self.operator, self.world, self.observed = operator, operator.world, observed
        self.dead = False

    async def _send(self, effect: Callable[[], None]) -> None:
        """Requests that go out together arrive in any order; none does after the operator's death."""
        world, dice = self.world, self.world.random
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        if self.dead:
            raise Killed
        if dice.random() < 0.2:
            world.tick(dice.uniform(0.1, 1))
        if dice.random() < world.deaths:
            self.dead = True
            raise Killed
        if dice.random() < world.errors:
            raise Fault("409, 429, 500 or no answer")
        world.writes += 1
        effect()
        world.check()
        if dice.random() < world.errors:
            raise Fault("no answer in time")
        if dice.random() < world.deaths:
            self.dead = True
            raise Killed

    async def pause(self, job: Object, pods: list[Object]) -> None:
        jobs = {controller(pod) for pod in pods if pod["status"]["phase"] == "Running"}
        await self._send(lambda: self.world.asked.update(uid for uid in jobs if uid is not None))

    async def ensure_token(self, job: Object) -> None:
        await self._send(lambda: None)

    async def apply(self, desired: Mapping[str, Any]) -> None:
        await self._send(lambda: self._apply(copy.copy(dict(desired))))

    def _apply(self, desired: Dict) -> None:
        world, place = self.world, (desired["kind"], desired["metadata"]["name"])
        live, status = world.objects.get(place), self.observed.job.get("status", {})
        wanted_uid = desired["metadata"].get("uid")
        if wanted_uid is not None and (live is None or live["metadata"]["uid"] != wanted_uid):
            raise Fault("409: there is no object of that uid")
        if holds(status, "Complete") or holds(status, "Failed"):
            assert live is not None, "a job that is over gets a new child"
            assert desired["kind"] == "Deployment" and desired["spec"]["replicas"] == 0
        if live is None:
            self.operator.answered[place] = world.put(desired)
            return
        if controller(live) != controller(desired):
            raise Fault("422: it has another controller")
        if desired["kind"] == "Job" and live["spec"]["template"] != desired["spec"]["template"]:
            raise Fault("422: the template is immutable")
        generation = live["metadata"].get("generation", 1) + (live.get("spec") != desired.get("spec"))
        metadata = live["metadata"] | desired["metadata"] | {"generation": generation}
        if live["kind"] != "Job":
            self.operator.answered[place] = world.put(live | desired | {"metadata": metadata})

    async def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        await self._send(lambda: self._delete(kind, name, uid))

    def _delete(self, kind: str, name: str, uid: str) -> None:
        live = self.world.objects.get((kind, name))
        if live is not None and live["metadata"]["uid"] == uid:
            self.world.check_deletion(live, self.observed)
            self.world.delete(live)

    async def delete_job(self, job: Object) -> None:
        raise AssertionError("there is no time to live")

    async def write_status(self, job: Object, status: Mapping[str, Any]) -> None:
        await self._send(lambda: self._write_status(job, status))

    def _write_status(self, job: Object, status: Mapping[str, Any]) -> None:
        live = self.world.job
        if live is None or live["metadata"]["resourceVersion"] != job["metadata"]["resourceVersion"]:
            raise Fault("409: it has changed")
        self.world.check_status(live.get("status", {}), status, self.observed)
        self.world.put(live | {"status": dict(status)})

    async def post_event(self, job: Object, event: Event) -> None:
        await self._send(lambda: self.world.events.append(event))


def play(seed: int, rounds: int = 60) -> World:
    """Disturb a job for a while, then see it come to its end. Raises AssertionError."""
    world = World(seed)
    _disturbed(world, rounds)
    world.calm()
    world.settle()
    return world


def _disturbed(world: World, rounds: int) -> None:
    operator: Operator | None = None
    for _ in range(rounds):
        world.tick(world.random.choice([0.5, 2, 5, 20]))
        if world.random.random() < 0.3:
            world.disturb()
        if operator is None:
            operator = Operator(world) if world.random.random() < 0.6 else None
        for _ in range(world.random.choice([0, 1, 1, 2])):  # events are lost, or come twice
            try:
                if operator is not None:
                    operator.look()
            except Fault:
                pass
            except Killed:
                operator = None


LOOP = asyncio.new_event_loop()


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    LOOP.run_until_complete(coroutine)


def holds(status: Mapping[str, Any], kind: str) -> bool:
    return any(entry["type"] == kind and entry["status"] == "True" for entry in status.get("conditions", []))


def _status_over(job: Dict) -> bool:
    return holds(job.get("status", {}), "Complete") or holds(job.get("status", {}), "Failed")


def _conditions(found: Object) -> Iterator[Dict]:
    yield from found.get("status", {}).get("conditions", [])


def _condition(found: Object, kind: str) -> Dict | None:
    return next((entry for entry in _conditions(found) if entry["type"] == kind), None)


def _over(job: Dict) -> bool:
    return any(entry["type"] in ("Complete", "Failed") for entry in _conditions(job))


def _ended(pod: Object) -> bool:
    return bool(pod["status"]["phase"] in ("Succeeded", "Failed"))


def _is_pod_of(found: Object, uid: str) -> bool:
    return bool(found["kind"] == "Pod" and found["metadata"]["labels"].get("miles.dev/job-uid") == uid)
