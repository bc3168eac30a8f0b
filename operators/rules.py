"""Rules of an RLJob that join several fields or need arithmetic, and what this release does not act on yet. Pure."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.alias_generators import to_camel, to_snake

from operators import schema
from operators.resolve import gpus, set_name
from operators.schema import Path
from operators.spec import RLJob
from operators.spec.fields import OWN_COUNT, amount, is_rate, own_rate
from operators.spec.inputs import PromptSource
from operators.spec.learning import Algorithm, Correction
from operators.spec.pods import GPU, Resources, Template, Toleration
from pipeline import where
from pipeline.algorithms.registry import ALGORITHMS

LARGEST_OBJECT = 131_072  # bytes of JSON; twice that no longer fits the annotation kubectl apply writes
LARGEST_PARAMETERS = 16_384
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_VARIABLE = re.compile(r"(PET_|MASTER_|MILES_).*|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE")
BARE_LAYERS = re.compile("(^|,)(lm_head|embed_out|embed_tokens|wte|wpe)(,|$)")
NO_ADAPTER = "the embedding and the head carry no adapter that vLLM could serve; leave them out"
NO_COPY = "with lora the base itself is the reference; use all, or remove it"
NO_REFERENCE = "with algorithm.kl.coefficient 0 there is no reference; raise that, use all, or remove it"
CORRECTS_NOTHING = "it leaves nothing to correct; remove it, or masked-is, sequenceBand and veto"
TURN_BY_TURN = "an environment's reward comes turn by turn and cannot be rescaled as a whole; remove it"

GENERATES = "with data.replayFrom nothing is generated, and stored samples have their rewards; remove it"

Broken = tuple[Path, str]
"""Path of the field at fault, and the remedy."""


def broken(job: RLJob) -> Iterator[Broken]:
    """Every rule that the job breaks."""
    yield from _size(job)
    yield from _model(job)
    yield from _data(job)
    yield from _prompt_sets(("spec", "data", "sets"), job.spec.data.sets)
    yield from _prompt_sets(("spec", "evaluation", "sets"), job.spec.evaluation.sets)
    yield from _evaluation(job)
    yield from _environment(job)
    yield from _rewards(job)
    yield from _algorithm(job)
    yield from _sampling(job)
    yield from _rollout(job)
    yield from _trainer(job)
    yield from _output(job)
    yield from _resources(("spec", "rollout", "resources"), job.spec.rollout.resources)
    yield from _resources(("spec", "trainer", "resources"), job.spec.trainer.resources)
    for number, reward in enumerate(job.spec.rewards):
        if reward.model is not None:
            yield from _resources(("spec", "rewards", number, "model", "resources"), reward.model.resources)
    for part, found in (
        (("scheduling",), job.spec.scheduling.tolerations),
        (("rollout", "template"), job.spec.rollout.template.tolerations),
        (("trainer", "template"), job.spec.trainer.template.tolerations),
    ):
        yield from _tolerations(("spec", *part, "tolerations"), found)
    yield from _variables(("spec", "rollout", "template", "env"), job.spec.rollout.template)
    yield from _variables(("spec", "trainer", "template", "env"), job.spec.trainer.template)


def _size(job: RLJob) -> Iterator[Broken]:
    size = len(job.model_dump_json(by_alias=True, exclude_defaults=True))
    if size > LARGEST_OBJECT:
        yield ("spec",), f"the job has {size} bytes, at most {LARGEST_OBJECT} are kept; move data into the store"
    for path, value, _ in schema.set_values(job.model_dump(by_alias=True), schema.tree()):
        if path[-1:] == ("parameters",) and len(json.dumps(value)) > LARGEST_PARAMETERS:
            yield path, f"at most {LARGEST_PARAMETERS} bytes of JSON; move data into the store"


def _model(job: RLJob) -> Iterator[Broken]:
    model = job.spec.model
    if model.trust_remote_code and model.uri.startswith("hf://") and model.revision is None:
        yield ("spec", "model", "trustRemoteCode"), "name the commit whose code may run: add model.revision"
    if model.revision is not None and model.uri.startswith("file://"):
        yield ("spec", "model", "revision"), "a folder has no revisions; remove it, or name the folder of that revision"


def _data(job: RLJob) -> Iterator[Broken]:
    spec, here = job.spec, ("spec", "data")
    source = spec.data.replay_from
    if bool(spec.data.sets) == (source is not None):
        yield here, "give exactly one of sets and replayFrom"
    if source is None:
        return
    for path, found in (
        (("spec", "rewards"), spec.rewards),
        (("spec", "environment"), spec.environment),
        (("spec", "evaluation", "sets"), spec.evaluation.sets),
    ):
        if found:
            yield path, GENERATES
    if source.where is not None:
        try:
            where.parse(source.where)
        except ValueError as error:
            yield (*here, "replayFrom", "where"), str(error)


def _prompt_sets(path: Path, sets: Sequence[PromptSource]) -> Iterator[Broken]:
    names = [set_name(entry) for entry in sets]
    for number, entry in enumerate(sets):
        here = (*path, number)
        if (entry.uri is None) == (entry.generator is None):
            yield here, "give exactly one of uri and generator"
        elif entry.uri is not None and not re.search(r"\.(jsonl|ndjson|parquet)$", entry.uri):
            yield (*here, "uri"), "the name must end in .jsonl or .parquet"
        elif names.index(names[number]) < number:
            yield (*here, "name"), f'another set is called "{names[number]}"; give this one a name of its own'
        elif not re.fullmatch("[a-z0-9]([-_a-z0-9]*[a-z0-9])?", names[number]):
            yield here, f'"{names[number]}" cannot be a set\'s name; give it one: name: …'
        if entry.parameters and entry.generator is None:
            yield (*here, "parameters"), "only a generator has parameters; remove them"
        if "seed" in entry.parameters:
            yield (*here, "parameters", "seed"), "use data.seed, which all sets follow"


def _evaluation(job: RLJob) -> Iterator[Broken]:
    for number, entry in enumerate(job.spec.evaluation.sets):
        if entry.generator is not None and entry.limit is None:
            yield ("spec", "evaluation", "sets", number, "limit"), "a generator never runs out; say how many prompts"


def _rewards(job: RLJob) -> Iterator[Broken]:
    spec = job.spec
    generated = all(entry.uri is None or entry.generator is not None for entry in spec.data.sets)
    if not spec.rewards and not generated and spec.environment is None:
        yield ("spec", "rewards"), "prompts from a file need a reward, such as [{name: correct, library: math-verify}]"
    names = [reward.name for reward in spec.rewards]
    for number, reward in enumerate(spec.rewards):
        here: Path = ("spec", "rewards", number)
        sources = (reward.function, reward.endpoint, reward.model, reward.library)
        if sum(source is not None for source in sources) != 1:
            yield here, "give exactly one of function, endpoint, model and library"
        if names.index(reward.name) < number:
            yield (*here, "name"), "another reward has this name; choose a different one"
        if reward.from_ is not None and ".py:" not in (reward.function or ""):
            yield (*here, "from"), "only a function of the form file.py:function is taken from a ConfigMap"
        if reward.library == "generator" and not generated:
            yield (*here, "library"), "a generator scores its own prompts only; use math-verify or a function"
        if reward.library == "environment" and spec.environment is None:
            yield (*here, "library"), "the job has no environment; set spec.environment, or use another scorer"
        if reward.library == "environment" and reward.normalize:
            yield (*here, "normalize"), TURN_BY_TURN
        if reward.library == "environment" and reward.clip is not None:
            yield (*here, "clip"), TURN_BY_TURN


def _environment(job: RLJob) -> Iterator[Broken]:
    environment, here = job.spec.environment, ("spec", "environment")
    if environment is None:
        return
    if (environment.class_ is None) == (environment.library is None):
        yield here, "give exactly one of class and library"
    if environment.from_ is not None and ".py:" not in (environment.class_ or ""):
        yield (*here, "from"), "only a class of the form file.py:Class is taken from a ConfigMap"
    generated = all(entry.generator is not None for entry in job.spec.data.sets)
    if environment.library == "reasoning-gym" and not generated:
        yield (*here, "library"), "it knows its own tasks only; generate all data.sets, or give a class"


def _algorithm(job: RLJob) -> Iterator[Broken]:
    algorithm, here = job.spec.algorithm, ("spec", "algorithm")
    entry = ALGORITHMS.get(algorithm.type)
    if entry is not None and algorithm.group_size < entry.minimum_group_size:
        yield (
            (*here, "groupSize"),
            f"{algorithm.type} compares samples of a prompt: at least {entry.minimum_group_size}",
        )
    if algorithm.prompts_per_step % algorithm.updates_per_step:
        yield (*here, "updatesPerStep"), f"must divide promptsPerStep, which is {algorithm.prompts_per_step}"
    if algorithm.kl.estimator == "k1" and algorithm.kl.placement == "loss":
        yield (*here, "kl", "estimator"), "k1 has no gradient as a loss; use k3, or placement: reward"
    if algorithm.kl.target is not None and float(algorithm.kl.coefficient) == 0:
        yield (*here, "kl", "target"), "needs a coefficient above 0 to start from"
    samples = algorithm.prompts_per_step * algorithm.group_size
    if algorithm.kl.target is not None and algorithm.kl.horizon < samples:
        yield (*here, "kl", "horizon"), f"at least promptsPerStep times groupSize, which is {samples}"
    if algorithm.correction.bypass and _corrects(algorithm.correction):
        yield (*here, "correction", "bypass"), CORRECTS_NOTHING
    if algorithm.warmup_steps > algorithm.total_steps:
        yield (*here, "warmupSteps"), f"at most totalSteps, which is {algorithm.total_steps}"
    if _whole(algorithm.parameters.get("criticWarmupSteps")) >= algorithm.total_steps:
        yield (*here, "parameters", "criticWarmupSteps"), f"below totalSteps, which is {algorithm.total_steps}"
    yield from _own_parameters((*here, "parameters"), algorithm.parameters, entry.parameters if entry else {})


def _corrects(correction: Correction) -> bool:
    return correction.type == "masked-is" or correction.sequence_band is not None or float(correction.veto) > 0


def _whole(value: Any) -> int:
    """What is given as a number of steps; 0 for what is none, which is refused elsewhere."""
    return value if type(value) is int else 0


def _own_parameters(path: Path, given: dict[str, Any], defaults: Mapping[str, object]) -> Iterator[Broken]:
    known = {to_camel(name): default for name, default in defaults.items()}
    for name, value in given.items():
        if name not in known:
            yield (
                (*path, name),
                f"unknown parameter; known are {', '.join(known)}" if known else "this algorithm has none",
            )
        elif remedy := _unfit(to_snake(name), value, type(known[name])):
            yield (*path, name), remedy


def _unfit(name: str, value: Any, kind: type) -> str | None:
    """What to write instead of a value of an own parameter of that kind; None: it fits."""
    if kind is bool:
        return None if isinstance(value, bool) else "write true or false"
    if kind is int:
        return None if type(value) is int and 0 <= value <= OWN_COUNT else f"write a whole number, at most {OWN_COUNT}"
    if not (isinstance(value, str) and is_rate(value)):
        return 'rates are strings; write a decimal number in quotes, such as "0.5"'
    try:
        own_rate(name).check(value)
    except ValueError as error:
        return str(error)
    return None


def _sampling(job: RLJob) -> Iterator[Broken]:
    sampling, longest = job.spec.algorithm.sampling, job.spec.rollout.max_model_len
    if sampling.max_new_tokens >= longest:
        yield (
            ("spec", "algorithm", "sampling", "maxNewTokens"),
            f"must leave room for the prompt in rollout.maxModelLen, which is {longest}",
        )


def _rollout(job: RLJob) -> Iterator[Broken]:
    rollout, here = job.spec.rollout, ("spec", "rollout")
    if rollout.autoscale is not None:
        low, high = rollout.autoscale.min, rollout.autoscale.max
        if low > high:
            yield (*here, "autoscale", "min"), f"at most autoscale.max, which is {high}"
        elif not low <= rollout.replicas <= high:
            yield (*here, "replicas"), f"must lie within autoscale, from {low} to {high}"
    limit = gpus(rollout.resources)
    if limit and rollout.tensor_parallel_size != limit:
        yield (*here, "tensorParallelSize"), f"must equal resources.limits {GPU}, which is {limit}"


def _trainer(job: RLJob) -> Iterator[Broken]:
    trainer, here, longest = job.spec.trainer, ("spec", "trainer"), job.spec.rollout.max_model_len
    limit = gpus(trainer.resources)
    if limit and trainer.processes_per_node not in (None, limit):
        yield (*here, "processesPerNode"), f"must equal resources.limits {GPU}, which is {limit}"
    if trainer.max_tokens_per_micro_batch is not None and trainer.max_tokens_per_micro_batch < longest:
        yield (*here, "maxTokensPerMicroBatch"), f"must hold one sample of rollout.maxModelLen, which is {longest}"
    if trainer.nodes % trainer.model_replicas:
        yield (*here, "modelReplicas"), "must divide trainer.nodes: a copy fills whole nodes"
    if trainer.offload == "reference" and trainer.lora is not None:
        yield (*here, "offload"), NO_COPY
    elif trainer.offload == "reference" and not _has_reference(job.spec.algorithm):
        yield (*here, "offload"), NO_REFERENCE
    if trainer.lora is not None and BARE_LAYERS.search(trainer.lora.targets):
        yield (*here, "lora", "targets"), NO_ADAPTER
    if job.spec.rollout.adapter_loading is not None and trainer.lora is None:
        yield ("spec", "rollout", "adapterLoading"), "there is no adapter to load; set trainer.lora or remove it"


def _has_reference(algorithm: Algorithm) -> bool:
    """A critic has one, too, for valueRegularization."""
    entry = ALGORITHMS.get(algorithm.type)
    return float(algorithm.kl.coefficient) > 0 or (entry is not None and entry.critic)


def _output(job: RLJob) -> Iterator[Broken]:
    output, store, source = job.spec.output, job.spec.store, job.spec.data.replay_from
    uris: dict[Path, str | None] = {
        ("spec", "store", "uri"): store.uri,
        ("spec", "output", "uri"): output.uri if output else None,
        ("spec", "data", "replayFrom", "uri"): source.uri if source else None,
        ("spec", "checkpoint", "resumeFrom"): job.spec.checkpoint.resume_from,
    }
    for path, uri in uris.items():
        if uri is not None and uri.startswith("s3://") and ".." in uri.split("/"):
            yield path, 'write the key without ".."'
    if output is None:
        return
    if output.what == "best" and not job.spec.evaluation.sets:
        yield ("spec", "output", "what"), "the best version is known by evaluation; add evaluation.sets"
    if _within(output.uri, store.uri):
        yield ("spec", "output", "uri"), "must lie outside store.uri, whose folders belong to runs"
    elif _within(store.uri, output.uri):
        yield ("spec", "output", "uri"), "must not hold store.uri; write the model beside it"
    if source is not None and (_within(output.uri, source.uri) or _within(source.uri, output.uri)):
        yield ("spec", "output", "uri"), "must lie apart from data.replayFrom.uri, which is only read"
    if _within(output.uri, job.spec.model.uri) or _within(job.spec.model.uri, output.uri):
        yield ("spec", "output", "uri"), "must lie apart from model.uri, which is only read"


def _within(uri: str, folder: str) -> bool:
    """Whether `uri` is the folder, or lies in it."""
    return f"{uri}/".startswith(folder if folder.endswith("/") else f"{folder}/")


def _resources(path: Path, resources: Resources) -> Iterator[Broken]:
    for kind, quantities in (("requests", resources.requests), ("limits", resources.limits)):
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?m?", str(quantities.get("cpu", 0))):
            yield (*path, kind, "cpu"), "write cores, such as 2 or 500m"
        if not re.fullmatch("0|[1-9][0-9]*", str(quantities.get(GPU, 0))):
            yield (*path, kind, GPU), "write a whole number of GPUs"
    if GPU in resources.requests and GPU not in resources.limits:
        yield (*path, "requests", GPU), "write it under limits; GPUs are never shared"
    for name in resources.requests.keys() & resources.limits.keys():
        asked, most = amount(resources.requests[name]), amount(resources.limits[name])
        if asked is not None and most is not None and asked > most:
            yield (*path, "requests", name), "at most the same resource under limits"


def _tolerations(path: Path, tolerations: Sequence[Toleration]) -> Iterator[Broken]:
    for number, entry in enumerate(tolerations):
        here = (*path, number)
        if entry.key is None and entry.operator != "Exists":
            yield here, "without a key, write operator: Exists"
        if entry.operator == "Exists" and entry.value:
            yield (*here, "value"), "operator Exists takes every value; remove it"
        if entry.toleration_seconds is not None and entry.effect != "NoExecute":
            yield (*here, "tolerationSeconds"), "counts for effect: NoExecute alone; write that, or remove it"


def _variables(path: Path, template: Template) -> Iterator[Broken]:
    names = [entry.name for entry in template.env]
    for number, entry in enumerate(template.env):
        here = (*path, number)
        if MANAGED_VARIABLE.fullmatch(entry.name):
            yield (*here, "name"), "Miles sets this variable itself; remove it"
        if (entry.value is None) == (entry.value_from is None):
            yield here, "give exactly one of value and valueFrom"
        if names.index(entry.name) < number:
            yield (*here, "name"), "the variable is set twice; remove one"


@dataclasses.dataclass(frozen=True)
class Notice:
    """What is accepted and not acted on."""

    path: Path
    why: str
    instead: str
    harmless: bool
    """Whether a run may go on without it."""

    def __str__(self) -> str:
        return f"{schema.dotted(self.path)}: {self.why}: {self.instead}"


def passed_over(job: RLJob, local: bool = False) -> list[Notice]:
    """What the user asked for that this release does not act on, or (`local`) that `miles run` does not. The marks
    are in `operators.spec`."""
    found = []
    if local:
        for path, _, node in schema.set_values(job.model_dump(by_alias=True), schema.tree()):
            if mark := node.get("clusterOnly"):
                found.append(Notice(path, "only in a cluster", mark["instead"], mark["harmless"]))
    if QUEUE_LABEL in job.metadata.labels:
        path = ("metadata", "labels", QUEUE_LABEL)
        found.append(Notice(path, "not built yet", "the job does not wait in a queue", harmless=True))
    return found
