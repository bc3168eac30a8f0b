"""Command line of `miles store`."""

import argparse
import asyncio
import contextlib
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

try:
    from pipeline import terminal, where
    from pipeline.report import source
    from pipeline.storage import LocalBucket, ObjectInfo, Storage, StorageError, exists, local_folder, open_storage
    from pipeline.storage.check import FOLDER, examine
    from pipeline.storage.local import HIDDEN
    from pipeline.store import garbage, samples, speed
    from pipeline.where import Condition
except ModuleNotFoundError as missing:
    print(f"miles store: needs {missing.name}, which is not installed: pip install 'miles[rollout]'", file=sys.stderr)
    sys.exit(2)

INCOMPLETE = 1  # exit code for what was done as far as it could be
REFUSED = 2  # exit code for what the user must mend
RUN = "a run's folder (runs/NAME) or its prefix in the store (s3://…, file:///…)"
PLACE = "s3://BUCKET/PREFIX, file:///FOLDER, or a folder; of a run's folder (runs/NAME) its place in the store"
KEY = re.compile(rf"^[A-Z]+ (?=\w+://)|/{FOLDER}/[0-9a-f]{{16}}/[0-9a-z/]+")
"""What tells apart the messages of two checks that fail for one reason."""
LOG = re.compile(r"((?:.+/)?)trainer/log/\d{20}\.json")
PARTS = (
    "parts of uploads that were cut off cannot be seen from here: let the bucket abort incomplete multipart uploads "
    "after a day (a lifecycle rule)"
)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return asyncio.run(options.act(options))
    except BrokenPipeError:
        raise
    except (ValueError, StorageError, OSError) as error:
        print(f"miles store {options.command}: {error}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles store",
        description="Look at an object store, and at what a run has written to it.",
        epilog="S3 is reached as the AWS_* variables of the environment say, AWS_ENDPOINT_URL and AWS_REGION included.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[Any], Awaitable[int]], text: str, place: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.add_argument("uri", metavar="URI", help=place)
        added.set_defaults(act=act)
        return added

    command("check", check, "whether the store keeps what Miles rests on, and how fast it is", PLACE)
    command("ls", ls, "what lies directly below a prefix, with the number of objects and their size", PLACE)
    head = command("head", head_, "the samples that were written last", RUN)
    head.add_argument("-n", type=_positive, default=3, metavar="N", help="how many groups (default 3)")
    stats_ = command("stats", stats, "how much a run has generated, trained and dropped", RUN)
    export = command(
        "export",
        export_,
        "the trained samples in the order of the steps, as one file (exit code 1: some are missing)",
        RUN,
    )
    export.add_argument("file", metavar="FILE", help="a name that ends in .parquet or .jsonl")
    for added in (head, stats_, export):
        added.add_argument(
            "--where", type=_condition, metavar="SQL", help="only samples like that: \"reward > 0.5 and set = 'sums'\""
        )
    gc = command("gc", gc_, "delete what a run that is over needs no more", RUN)
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted, of a live run, too")
    gc.add_argument(
        "--retention", choices=["all", "window"], help="instead of the run's store.retention; window: rollouts, too"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _condition(text: str) -> Condition:
    try:
        return where.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def check(options: Any) -> int:
    place = _existing(options.uri, "; make it first (mkdir -p) if it is to become a store")
    with _as_it_was(place[0]):
        return await _check(open_storage(*place))


async def _check(storage: Storage) -> int:
    findings = await examine(storage)
    faults = list(dict.fromkeys(KEY.sub("", str(finding.fault)) for finding in findings if finding.fault))
    if len(faults) != 1 or not all(finding.fault for finding in findings):  # else it did not come to be tried
        for finding in findings:
            print(f"{'no' if finding.fault else 'yes':4}{finding.title:60}{finding.seconds:7.2f} s")
    for fault in faults:
        print(f"miles store check: {fault}", file=sys.stderr)
    if faults:
        return REFUSED
    for line in await speed.measure(storage):
        print(line)
    return 0


@contextlib.contextmanager
def _as_it_was(place: str) -> Iterator[None]:
    """A folder that was no store is none afterwards, unless somebody has begun to use it as one."""
    folder = local_folder(place)
    made = [folder / name for name in (HIDDEN, FOLDER) if not (folder / name).exists()] if folder else []
    try:
        yield
    finally:
        if folder and not any(path.is_file() for path in (folder / HIDDEN / "metadata").rglob("*")):
            for path in made:
                shutil.rmtree(path, ignore_errors=True)


async def ls(options: Any) -> int:
    storage = open_storage(*_existing(options.uri), read_only=True)
    objects = await storage.list("")
    if not objects:
        raise ValueError(f"{storage.bucket.name}: no object lies below it")
    folders: dict[str, list[ObjectInfo]] = {}
    for info in objects:
        name, slash, _ = info.key.partition("/")
        folders.setdefault(name + slash, []).append(info)
    print(f"{'objects':>9} {'size':>10}  {storage.bucket.name}")
    for name, part in [*sorted(folders.items()), ("all of it", objects)]:
        print(_line(part, samples.shown(name)))
    if isinstance(storage.bucket, LocalBucket) and (count := await _unsealed(storage.bucket, objects)):
        print(
            f"miles store ls: {count:,} objects have no checksum beside them, as after a copy of the folder: damage to"
            " them is not noticed",
            file=sys.stderr,
        )
    return 0


async def _unsealed(bucket: LocalBucket, objects: list[ObjectInfo]) -> int:
    """Of the runs at or below it: each keeps the checksums of its own objects."""
    runs = {found[1] for info in objects if (found := LOG.fullmatch(info.key))}
    return sum([await LocalBucket(os.path.join(bucket.root, run), read_only=True).unsealed() for run in runs])


def _line(objects: Sequence[Any], text: str) -> str:
    return f"{len(objects):9,} {samples.size(sum(item.size for item in objects)):>10}  {text}"


def _existing(place: str, remedy: str = "") -> tuple[str, str | None, str | None]:
    """URI, endpoint and region of a store; of a local run's own folder those of the run's store.

    Raises ValueError for a folder that is not there: it may be mistyped, and is not made.
    """
    if not exists(place):
        raise ValueError(f"{place}: there is no such folder{remedy}")
    if (config := source.of_folder(place)) is not None:
        return source.place(place, config)
    return (place if "://" in place else pathlib.Path(place).absolute().as_uri()), None, None


async def head_(options: Any) -> int:
    storage, config, _ = await source.open_run(options.uri)
    for line in await samples.newest(storage, config, options.n, options.where):
        print(line)
    return 0


async def stats(options: Any) -> int:
    storage, config, _ = await source.open_run(options.uri)
    for name, value in await samples.statistics(storage, config, options.where):
        print(f"{name:24}{value}")
    return 0


async def export_(options: Any) -> int:
    storage, config, _ = await source.open_run(options.uri)
    written = await samples.export(storage, config, options.file, options.where)
    many = samples.counted
    print(f"{options.file}: {many(written.samples, 'sample')} of {many(written.steps, 'step')}")
    for omission in written.omissions:
        print(f"left out: {omission}", file=sys.stderr)
    return INCOMPLETE if written.omissions else 0


async def gc_(options: Any) -> int:
    storage, config, uri = await source.open_run(options.uri, read_only=options.dry_run)
    retention = options.retention or config.store.retention
    removals = await garbage.find(storage, config, retention)
    if options.dry_run:
        removals += await garbage.abandoned(storage)
    if uri.startswith("s3://"):
        print(f"miles store gc: {PARTS}", file=sys.stderr)
    for why, part in garbage.by_reason(removals).items():
        print(_line(part, why))
        if options.dry_run:
            print("".join(f"{'':22}{key}\n" for key in sorted(removal.key for removal in part)), end="")
    if not options.dry_run:
        await garbage.remove(storage, removals)
    print(_line(removals, f"{'would be ' if options.dry_run else ''}deleted from {uri}"))
    return 0


if __name__ == "__main__":
    terminal.run(main)
