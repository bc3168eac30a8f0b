"""`make learning`: every algorithm learns the tiny job, with real vLLM, at several seeds; one table.

`python -m tests.learning [NAME …] [--seeds N] [--steps N]`. A job has learnt if its mean reward goes from below 0.2 in
the first step to above 0.8 over the last five. Exit code 1 if one has not.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

from pipeline.algorithms.registry import ALGORITHMS
from tests import job, models

FIRST, LAST = 0.2, 0.8
LIMIT_S = 900
OWN = {
    "dapo": ["spec.algorithm.parameters.overlongBuffer=0"],  # here every good answer is as long as the limit allows
    "ppo": ["spec.algorithm.parameters.criticLearningRateScale=1"],  # the tiny job's own rate is high already
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.learning")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALGORITHMS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    models.ensure("tiny", job.ROOT / ".cache/models/tiny")
    print(f"{'algorithm':22}{'seed':>5}{'first':>7}{'last 5':>8}{'at .8':>7}{'seconds':>9}", flush=True)
    learnt = [
        learns(name, seed, options.steps) for name in options.names or ALGORITHMS for seed in range(options.seeds)
    ]
    print(f"{sum(learnt)} of {len(learnt)} jobs have learnt")
    return 0 if all(learnt) else 1


def learns(name: str, seed: int, steps: int) -> bool:
    """Run one job and print its row."""
    settings = {"type": name, "totalSteps": steps}
    arguments = [f"spec.algorithm.{field}={value}" for field, value in settings.items()]
    arguments += [f"spec.data.seed={seed}", f"spec.trainer.seed={seed}", *OWN.get(name, [])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="miles-learning-") as folder:
        with job.running(pathlib.Path(folder), *arguments) as run:
            code = run.wait(LIMIT_S)
            rewards = [row["reward/mean"] for row in run.metrics()]
        if code != 0:
            print(run.screen(), file=sys.stderr)
    first, last = (rewards[0], statistics.fmean(rewards[-5:])) if rewards else (0.0, 0.0)
    reached = next((str(step) for step, reward in enumerate(rewards, 1) if reward > LAST), "-")
    seconds = time.monotonic() - started
    print(f"{name:22}{seed:5}{first:7.2f}{last:8.2f}{reached:>7}{seconds:9.0f}", flush=True)
    return code == 0 and first < FIRST and last > LAST


if __name__ == "__main__":
    sys.exit(main())
