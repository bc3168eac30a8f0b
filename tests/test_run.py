"""`miles run` from the YAML file to the trained policy: every part real, the model tiny."""

import pathlib
import signal
from typing import Any

import pytest

from tests import job, models, s3server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FRESH = ("spec.algorithm.totalSteps=20", "spec.algorithm.maxStaleness=0")
LORA = ("spec.trainer.lora.rank=32", "spec.algorithm.learningRate=1e-2")
AGREEMENT = 5e-5
"""Mean |log μ − log π_old| between vLLM and the trainer, float32."""


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    models.ensure("tiny", job.ROOT / ".cache/models/tiny")


def test_lora_learns_on_s3_with_two_trainer_nodes_and_two_servers_which_agree_even_after_one_was_killed(
    tmp_path: pathlib.Path, s3_server: s3server.S3Server
) -> None:
    wide = ("spec.rollout.replicas=2", "spec.trainer.nodes=2")
    with job.running(tmp_path, *FRESH, *LORA, *wide, *job.on_s3(s3_server)) as run:
        run.until_step(10)
        run.kill("vllm")
        assert run.wait() == 0, run.screen()
        check_agreement(run, least=15)
        job.check_learned(run)
        assert not job.check_exactly_once(run, steps=20)
        writers = {group.key.split("/")[2] for plan in run.plans() for group in plan.groups}
        assert len(writers) == 2, "one of the two workers trained nothing"


def test_it_learns_from_a_reward_model_whose_own_scores_the_samples_carry(tmp_path: pathlib.Path) -> None:
    models.ensure("reward", job.ROOT / ".cache/models/reward")
    steps = ("spec.algorithm.totalSteps=8", "spec.algorithm.maxStaleness=0")
    with job.running(tmp_path, *steps, sample=job.ROOT / "manifests/samples/reward-model.yaml") as run:
        assert run.wait() == 0, run.screen()
        rewards = [row["reward/preference/mean"] for row in run.metrics()]
        assert len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2]), rewards
        assert not job.check_exactly_once(run, steps=8)
        rows = run.table(run.plans()[-1].groups[0].key).to_pylist()
        check_scores(rows, job.ROOT / ".cache/models/reward")


def check_scores(rows: list[dict[str, Any]], folder: pathlib.Path) -> None:
    """Each sample's reward is what transformers computes of the conversation, in the reward model's own template."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    for row in rows:
        said = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        text = tokenizer.apply_chat_template(said, tokenize=False)
        with torch.no_grad():
            expected = float(model(torch.tensor([tokenizer.encode(text)])).logits)
        assert row["reward"] == pytest.approx(expected, abs=1e-4)


def check_agreement(run: job.Job, least: int) -> None:
    """At every step that passed a sample, at least so many; one whose groups all lack spread passes none."""
    name = "mismatch/logprob_abs_diff"
    differences = [row[name] for row in run.metrics() if name in row]
    assert len(differences) >= least
    assert max(differences) < AGREEMENT, differences


def test_all_weights_learn_in_a_local_folder_and_sampler_and_trainer_agree_even_after_vllm_was_killed(
    tmp_path: pathlib.Path,
) -> None:
    with job.running(tmp_path, *FRESH) as run:
        run.until_step(10)
        run.kill("vllm")
        assert run.wait() == 0, run.screen()
        check_agreement(run, least=15)
        job.check_learned(run)
        assert not job.check_exactly_once(run, steps=20)


def test_a_paused_run_leaves_no_process_goes_on_where_it_stopped_and_agrees_at_any_staleness(
    tmp_path: pathlib.Path,
) -> None:
    """Without learning: a sample's age then makes no difference to its log-probabilities."""
    with job.running(tmp_path, "spec.algorithm.totalSteps=12", "spec.algorithm.learningRate=1e-12") as run:
        run.until_step(4)
        assert run.process is not None
        below = job.descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 128 + signal.SIGINT, run.screen()
        assert not [pid for pid in below if pathlib.Path(f"/proc/{pid}").exists()]
        run.start()
        assert run.wait() == 0, run.screen()
        terms = [row["term"] for row in run.metrics()]
        assert len(terms) == 12 and terms[0] == 1 and terms[-1] == 2
        assert not job.check_exactly_once(run, steps=12)
        check_agreement(run, least=12)
        assert max(row["async/staleness_max"] for row in run.metrics()) > 0
