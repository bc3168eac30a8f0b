"""kill -9 of a run's processes at random moments: it ends at the same step, each prompt group trained exactly once."""

import pathlib
import random
import time

import pytest

from tests import job, models, s3server

STEPS = 30
KINDS = ("worker", "vllm", "rank", "all")
SHAPE = (
    f"spec.algorithm.totalSteps={STEPS}",
    "spec.checkpoint.everySteps=5",
    "spec.trainer.processesPerNode=2",
    "spec.runPolicy.maxRestarts=10",
)


def check_survives(
    folder: pathlib.Path, kills: list[tuple[int, str]], randomness: random.Random, *settings: str
) -> None:
    """`kills`: (step after which, what), in order."""
    models.ensure("tiny", job.ROOT / ".cache/models/tiny")
    with job.running(folder, *SHAPE, *settings) as run:
        for step, part in kills:
            run.until_step(step)
            time.sleep(randomness.uniform(0, 2))
            run.kill(part, randomness.randrange(2))
            if part == "all":
                run.start()
        assert run.wait() == 0, run.screen()
        drops = job.check_exactly_once(run, STEPS)
        workers_lived = all(part in ("rank", "all") for _, part in kills)
        assert set(drops) <= (set() if workers_lived else {"stale"}), drops
        assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
        job.check_learned(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_full_fine_tuning_learns_on_s3_although_worker_rank_and_then_all_processes_are_killed(
    tmp_path: pathlib.Path, s3_server: s3server.S3Server
) -> None:
    """vLLM is killed in test_run.py."""
    kills = [(3, "worker"), (7, "rank"), (13, "all")]
    check_survives(tmp_path, kills, random.Random(0), *job.on_s3(s3_server))


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_survives_two_deaths_at_random_moments(tmp_path: pathlib.Path, seed: int) -> None:
    randomness = random.Random(seed)
    first, second = sorted(randomness.sample(range(1, STEPS), 2))
    kills = [(first, KINDS[seed % len(KINDS)]), (second, randomness.choice(KINDS))]
    check_survives(tmp_path, kills, randomness)
