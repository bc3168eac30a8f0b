"""The command `kubectl miles`: reads the cluster with the user's kubectl, prints what the pure modules make of it."""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operators import cli, explain
from operators.kubectl import RLJOB, Kubectl, Refused
from operators.plugin import pods as pod_words
from operators.plugin import reports, status, tables
from operators.plugin.trouble import holds

REFUSED = 2  # exit code for what the user must mend
LOCAL = ("validate", "explain", "render")
"""Commands of `miles` that need no cluster."""
USAGE = """usage: kubectl miles COMMAND …

  list                   the jobs of a namespace (-A: of all), with their troubles
  status NAME            what it is doing, and if it is stuck, why and what to do
  logs NAME [PART|POD]   what trainer (the default), rollout or a reward model says
  events NAME            what happened to it, its children and pods
  suspend NAME           checkpoint, then give its resources back
  resume NAME            go on from the checkpoint
  scale NAME REPLICAS    change the number of rollout workers
  report NAME            a page about the run, read from its store
  top NAME               what its pods use
  validate, explain, render: as `miles`, without a cluster

-n, --context and --kubeconfig as for kubectl, behind the command. `kubectl miles COMMAND --help` says more."""

Options = argparse.Namespace
Job = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command in LOCAL:
        return cli.main(arguments)
    if command.startswith("-"):
        return refuse(f"{command}: options follow the command: kubectl miles status NAME -n NAMESPACE")
    if command not in COMMANDS:
        near = explain.nearest(command, [*COMMANDS, *LOCAL])
        return refuse(f"{command}: unknown command" + (f'; did you mean "{near}"?' if near else ""))
    try:
        return COMMANDS[command](rest)
    except Refused as error:
        return refuse(f"{command}: {error}")
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def refuse(reason: str) -> int:
    print(f"kubectl miles: {reason}", file=sys.stderr)
    return REFUSED


def list_jobs(arguments: list[str]) -> int:
    parser = _parser("list", "The jobs of a namespace, with their troubles.", with_name=False)
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="of every namespace")
    options = parser.parse_args(arguments)
    found = _kubectl(options).get(RLJOB, *(["--all-namespaces"] if options.all_namespaces else []))["items"]
    if not found:
        print("no RLJobs here; kubectl miles list -A looks everywhere", file=sys.stderr)
        return 0
    print(tables.jobs(found, _now(), options.all_namespaces))
    return 0


def show_status(arguments: list[str]) -> int:
    options = _parser("status", "What a job is doing; if it is stuck, why and what to do.").parse_args(arguments)
    job, kubectl = _job(options)
    print(status.screen(job, _pods(kubectl, job), _now()))
    return 0


def logs(arguments: list[str]) -> int:
    parser = _parser("logs", "What one container of a job says; the most telling one if none is named.")
    parser.add_argument("part", nargs="?", default="trainer", help="trainer, rollout, reward, or the name of a pod")
    parser.add_argument("-c", "--container", help="such as vllm or worker")
    parser.add_argument("-f", "--follow", action="store_true", help="until interrupted")
    parser.add_argument("-p", "--previous", action="store_true", help="of the container before its last restart")
    parser.add_argument("--tail", type=int, default=200, metavar="LINES", help="at most so many lines; -1: all")
    options = parser.parse_args(arguments)
    job, kubectl = _job(options)
    pod = _chosen(options, job, _pods(kubectl, job))
    container = options.container or pod_words.speaking(pod)
    said = status.shortened(pod_words.words(pod))
    print(f"== {pod_words.name(pod)}, container {container}: {said}", file=sys.stderr, flush=True)
    switches = [f"--{name}" for name in ("follow", "previous") if getattr(options, name)]
    about = [f"pod/{pod_words.name(pod)}", f"--namespace={job['metadata']['namespace']}"]
    return kubectl.hand_over("logs", *about, f"--container={container}", f"--tail={options.tail}", *switches)


def events(arguments: list[str]) -> int:
    options = _parser("events", "What happened to a job, its children and its pods.").parse_args(arguments)
    job, kubectl = _job(options)
    found = kubectl.get("events", f"--namespace={job['metadata']['namespace']}")["items"]
    about = tables.concerning(job, _pods(kubectl, job) or (), found)
    print(tables.events(about, _now()) if about else "no events; the cluster keeps them for about an hour")
    return 0


def suspend(arguments: list[str]) -> int:
    options = _parser("suspend", "Let a job write a checkpoint and give its resources back.").parse_args(arguments)
    return _set_suspend(options, True)


def resume(arguments: list[str]) -> int:
    options = _parser("resume", "Let a suspended job go on from its checkpoint.").parse_args(arguments)
    return _set_suspend(options, False)


def scale(arguments: list[str]) -> int:
    parser = _parser("scale", "Change the number of rollout workers; training goes on meanwhile.")
    parser.add_argument("replicas", type=_replicas, metavar="REPLICAS")
    options = parser.parse_args(arguments)
    kubectl = _kubectl(options)
    # Not by the scale subresource, whose requests show admission policies no job: a tenant's limit of GPUs holds here.
    change = json.dumps({"spec": {"rollout": {"replicas": options.replicas}}})
    kubectl.run("patch", f"{RLJOB}/{options.name}", "--type=merge", f"--patch={change}")
    print(f"{options.name}: {options.replicas} rollout workers wanted")
    return 0


def report(arguments: list[str]) -> int:
    parser = _parser("report", "One self-contained page about a run, read from its store with your credentials.")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: NAME.html)")
    parser.add_argument("--endpoint", metavar="URL", help="where the store answers you, if not at spec.store.endpoint")
    options = parser.parse_args(arguments)
    job, kubectl = _job(options)
    environment = reports.environment(job, kubectl, os.environ, options.endpoint)
    reports.reach(environment, job["metadata"]["namespace"])
    output = options.output or f"{options.name}.html"
    command = [sys.executable, "-m", "pipeline.report", status.store_uri(job), "--output", output]
    return subprocess.run(command, env=environment, check=False).returncode


def top(arguments: list[str]) -> int:
    options = _parser("top", "What the pods of a job use.").parse_args(arguments)
    job, kubectl = _job(options)
    pods = _pods(kubectl, job)
    if pods is None:
        raise Refused("you may not list pods in this namespace")
    if not pods:
        print(f"{options.name} has no pods now ({status.phase(job)})")
        return 0
    namespace = f"--namespace={job['metadata']['namespace']}"
    try:
        used = tables.usage(kubectl.run("top", "pods", _selector(job), namespace, "--no-headers"))
    except Refused as error:
        print(f"kubectl miles top: CPU and memory are unknown: {error}", file=sys.stderr)
        used = {}
    print(tables.top(job, pods, used))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "list": list_jobs,
    "status": show_status,
    "logs": logs,
    "events": events,
    "suspend": suspend,
    "resume": resume,
    "scale": scale,
    "report": report,
    "top": top,
}


def _parser(command: str, description: str, with_name: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"kubectl miles {command}", description=description, allow_abbrev=False)
    if with_name:
        parser.add_argument("name", type=_name, metavar="NAME", help="the RLJob")
    parser.add_argument("-n", "--namespace", help="its namespace")
    parser.add_argument("--context", help="of the kubeconfig")
    parser.add_argument("--kubeconfig", metavar="FILE")
    return parser


def _name(text: str) -> str:
    name = text.removeprefix("rljob/").removeprefix(f"{RLJOB}/")
    if not re.fullmatch("[a-z0-9][-a-z0-9.]{0,252}", name):
        raise argparse.ArgumentTypeError(f'"{text}" cannot be the name of an RLJob')
    return name


def _replicas(text: str) -> int:
    if not text.isdigit() or int(text) > 1024:
        raise argparse.ArgumentTypeError(f'"{text}": write a whole number from 0 to 1024')
    return int(text)


def _kubectl(options: Options) -> Kubectl:
    given = {name: getattr(options, name) for name in ("namespace", "context", "kubeconfig")}
    return Kubectl(tuple(f"--{name}={value}" for name, value in given.items() if value))


def _job(options: Options) -> tuple[Job, Kubectl]:
    kubectl = _kubectl(options)
    return kubectl.get(f"{RLJOB}/{options.name}"), kubectl


def _selector(job: Job) -> str:
    return f"--selector=miles.dev/job-uid={job['metadata']['uid']}"


def _pods(kubectl: Kubectl, job: Job) -> list[dict[str, Any]] | None:
    return kubectl.items("pods", f"--namespace={job['metadata']['namespace']}", _selector(job))


def _chosen(options: Options, job: Job, pods: list[dict[str, Any]] | None) -> Mapping[str, Any]:
    if pods is None:
        raise Refused("you may not list pods in this namespace")
    named = [pod for pod in pods if pod_words.name(pod) == options.part] or pod_words.of(pods, options.part)
    if not named:
        others = sorted({pod_words.component(pod) for pod in pods})
        has = f"it has {', '.join(others)}" if others else f"it has no pods now ({status.phase(job)})"
        raise Refused(f'{options.name} has no pod or part "{options.part}"; {has}')
    return max(named, key=pod_words.loudness)


def _set_suspend(options: Options, wanted: bool) -> int:
    job, kubectl = _job(options)
    for kind in ("Complete", "Failed"):
        if holds(job, kind):
            raise Refused(f"{options.name} is over ({kind}); there is nothing to {'suspend' if wanted else 'resume'}")
    if bool(job["spec"].get("suspend")) == wanted:
        print(f"{options.name}: {'is suspended already' if wanted else 'is not suspended'}")
        return 0
    patch = f'{{"spec":{{"suspend":{str(wanted).lower()}}}}}'
    kubectl.run("patch", f"{RLJOB}/{options.name}", "--type=merge", f"--patch={patch}")
    print(f"{options.name}: {'writes a checkpoint, then stops' if wanted else 'goes on from its checkpoint'}")
    return 0


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


if __name__ == "__main__":
    sys.exit(main())
