"""The command `miles` (and `kubectl miles`): validate, explain and render here, the others where their work is done."""

import os
import sys

try:
    import argparse
    import io
    import re
    import subprocess
    from collections.abc import Sequence
    from typing import Any

    import pydantic
    import yaml

    from operators import containers, explain, manifest, rules
    from operators.children import children
    from operators.machine import gpu_ids
    from operators.missing import missing
    from operators.names import RUN_ID
    from operators.resolve import Platform, processes, run_config
    from operators.spec import RLJob
    from operators.spec.fields import Image
    from pipeline.config import RunConfig
except KeyboardInterrupt:  # this takes a second, in which Ctrl-C may come
    sys.exit(130)

INTERRUPTED = 130
REFUSED = 2  # exit code for what the user must mend
PIPELINE = ("report", "replay", "store")
"""Commands that are the data plane's alone: `python -m pipeline.<command>`."""
USAGE = """usage: miles COMMAND …

  validate FILE…     check RLJobs: each fault on one line
  explain [PATH]     what a field means: type, default, limits
  render FILE        the Kubernetes objects of a job, as YAML
  plan FILE          memory, time and cost of a job, before it runs
  run FILE           run a job as processes on this machine
  report RUN         a page about a run
  replay RUN --step N  trains a step again from the store, and compares
  store COMMAND URI  check an object store; ls, head, stats, export and gc of what a run has written

`miles COMMAND --help` says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the terminal's encoding lacks a letter
    code = 0
    try:
        code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _discard_output()
    except OSError as error:
        _discard_output()
        print(f"miles: cannot write the output: {error.strerror or error}", file=sys.stderr)
        return code or 1
    return code


def _open_closed_streams() -> None:
    """`>&-`: what is opened next would take the stream's place, and have written into it what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _discard_output() -> None:
    """What is still to be written would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "run":
        return run(rest)
    if command in PIPELINE:
        os.execv(sys.executable, [sys.executable, "-m", f"pipeline.{command}", *rest])
    if command not in COMMANDS:
        near = explain.nearest(command, [*COMMANDS, "run", *PIPELINE])
        print(f"miles: {command}: unknown command" + (f'; did you mean "{near}"?' if near else ""), file=sys.stderr)
        return REFUSED
    return COMMANDS[command](rest)


def run(arguments: list[str]) -> int:
    try:
        from operators import local  # needs packages of the extra `local`
    except ModuleNotFoundError as error:
        print(f"miles run: no package {error.name}; pip install 'miles[local,rollout,trainer]'", file=sys.stderr)
        return REFUSED
    return local.main(arguments)


def validate(arguments: list[str]) -> int:
    parser = _parser(
        "validate",
        "Check the RLJobs in YAML files, by the rules kubectl reads YAML by. Warns of prompts and code that "
        "this machine lacks, which change no exit code.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    code = 0
    for file in parser.parse_args(arguments).files:
        try:
            jobs = manifest.load(file)
        except manifest.Invalid as error:
            print(error, file=sys.stderr)
            code = REFUSED
            continue
        for job in jobs:
            print(f"{file}: RLJob {job.metadata.name} is valid", flush=True)
            for line in [*map(str, rules.passed_over(job)), *missing(job, os.path.dirname(os.path.abspath(file)))]:
                print(f"{file}: warning: {line}", file=sys.stderr)
    return code


def explain_field(arguments: list[str]) -> int:
    parser = _parser("explain", "Describe a field of the RLJob and what lies below it.")
    parser.add_argument("path", nargs="?", default="", metavar="PATH", help="such as spec.trainer.lora")
    try:
        print(explain.explain(parser.parse_args(arguments).path))
    except ValueError as error:
        print(f"miles explain: {error}", file=sys.stderr)
        return REFUSED
    return 0


def render(arguments: list[str]) -> int:
    parser = _parser("render", "Print the Kubernetes objects that a job consists of, for kubectl apply -f -.")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a field")
    parser.add_argument("--run-id", default="manual", type=_run_id, help="last part of the run's prefix in the store")
    parser.add_argument("--image", default=Platform.image, type=_image, help="image of containers without GPUs")
    parser.add_argument("--gpu-image", default=Platform.gpu_image, type=_image, help="image of containers with GPUs")
    options = parser.parse_args(arguments)
    # Applied with the user's own rights, which say what accounts pods may have.
    platform = Platform(image=options.image, gpu_image=options.gpu_image, service_accounts=None)
    try:
        job = manifest.load_one(options.file, options.set)
        objects = children(job, run_id=options.run_id, platform=platform)
    except ValueError as error:
        print(error if isinstance(error, manifest.Invalid) else f"{options.file}: {error}", file=sys.stderr)
        return REFUSED
    for notice in rules.passed_over(job):
        print(f"{options.file}: warning: {notice}", file=sys.stderr)
    print(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120), end="")
    return 0


def _run_id(text: str) -> str:
    if not re.fullmatch(RUN_ID, text):
        raise argparse.ArgumentTypeError(f"got {text[:60]!r}: write at most 63 letters, digits and hyphens")
    return text


def _image(text: str) -> str:
    try:
        image: str = pydantic.TypeAdapter(Image).validate_python(text)
    except pydantic.ValidationError:
        remedy = "write an image reference, such as registry/name:tag"
        raise argparse.ArgumentTypeError(f"got {text[:60]!r}: {remedy}") from None
    return image


def plan(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pipeline.plan"]
    if {"-h", "--help"} & {*arguments}:
        return subprocess.run([*command, "--help"]).returncode
    parser = _parser("plan", "Say what memory, time and money a job takes.")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a field")
    options, rest = parser.parse_known_args(arguments)
    try:
        job = manifest.load_one(options.file, options.set)
        platform, config = _resolved(job, options.file)
    except ValueError as error:
        print(error if isinstance(error, manifest.Invalid) else f"{options.file}: {error}", file=sys.stderr)
        return REFUSED
    trainer, rollout = job.spec.trainer, job.spec.rollout
    sizes = {
        "nodes": trainer.nodes,
        "processes-per-node": processes(job, platform),
        "servers": job.spec.workers,
        "devices-per-server": platform.rollout_gpus(rollout) or 1,
    }
    command += ["/dev/stdin", *(f"--{name}={value}" for name, value in sizes.items())]
    if not platform.trainer_gpus(trainer):
        command += ["--device=cpu", f"--cpu-cache={containers.cpu_cache(job)}"]
        command += ["--one-machine"] if platform.local else []
    return subprocess.run([*command, *rest], input=config.model_dump_json(), text=True).returncode


def _resolved(job: RLJob, file: str) -> tuple[Platform, RunConfig]:
    """As in a cluster; a job whose folders are on one machine as on this one."""
    platform = Platform()
    if any(uri.startswith("file://") for uri in (job.spec.model.uri, job.spec.store.uri)):
        folder = os.path.dirname(os.path.abspath(file))
        platform = Platform(local=True, gpus=len(gpu_ids(os.environ)), folder=folder)
    return platform, run_config(job, "plan", platform)


COMMANDS = {"validate": validate, "explain": explain_field, "render": render, "plan": plan}


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"miles {command}", description=description)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they stand, and nothing as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)

if __name__ == "__main__":
    sys.exit(main())
