"""`python -m pipeline.prompts < config.json`: opens, as workers will, the prompt sets of a run that need nothing but
this machine: generated ones and files. Prints a line for each that cannot be used; `miles validate` shows them.
"""

import contextlib
import sys

from pipeline.config import PromptSetConfig, RunConfig
from pipeline.prompts.source import open_set


def main() -> None:
    config = RunConfig.model_validate_json(sys.stdin.read())
    for field, sets, held_out in (("data", config.data.sets, False), ("evaluation", config.evaluation.sets, True)):
        for number, entry in enumerate(sets):
            if fault := _fault(entry, config.data.seed, held_out):
                print(f"{field}.sets[{number}]: {fault}", flush=True)


def _fault(entry: PromptSetConfig, seed: int, held_out: bool) -> str | None:
    if entry.uri is not None and not entry.uri.startswith("file://"):
        return None
    with contextlib.suppress(ImportError):  # a generator's package is the workers', and need not be here
        try:
            open_set(entry, seed, held_out=held_out)
        except ValueError as error:
            return str(error)
    return None


if __name__ == "__main__":
    main()
