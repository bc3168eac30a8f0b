"""`make bench-trainer`: the trainer's update, as a ratio to a bare forward and backward pass and step.

The same SmolLM2-135M and the same packed micro-batches, in turns in one process. Bare: the decoder, all logits of the
response tokens at once, cross-entropy, backward, AdamW; nothing is measured, clipped or agreed upon. The batch is like
the demo's: 8 prompts × 8 samples, of up to 48 and 16 tokens. Tokens are prompts and completions of all samples.
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import transformers

from pipeline import batching
from pipeline.batching import MicroBatch
from pipeline.learner import Learner
from pipeline.model import attention
from tests import policies
from tests.batches import random_batch

MODEL = pathlib.Path(__file__).parent.parent / ".cache" / "models" / "smollm2-135m-instruct"
LIMIT = 512
CPU = torch.device("cpu")


def main(rounds: int) -> None:
    transformers.utils.logging.disable_progress_bar()
    print(f"{'training':10}{'bare':>10}{'trainer':>10} tokens/s  ratio")
    for training, lora in (("lora", {"rank": 16, "alpha": 32}), ("full", None)):
        bare, own = _measure(lora, rounds)
        print(f"{training:10}{bare:10.1f}{own:10.1f}          {own / bare:6.2f}", flush=True)


def _measure(lora: dict[str, int] | None, rounds: int) -> tuple[float, float]:
    """Tokens/s of the bare loop and of the trainer."""
    learner = Learner(policies.run_config(MODEL, lora=lora, max_tokens_per_micro_batch=LIMIT), CPU)
    batch = random_batch(8, 8, prompt=(32, 48), completion=(8, 16), vocabulary=49152)
    (share,) = batching.pack(batch, batch.valid, 1, LIMIT)
    tokens = len(batch.prompts.values) + len(batch.completions.values)
    bare, own = [], []
    for _ in range(rounds + 1):
        bare.append(_seconds(lambda: _bare(learner, share)))
        own.append(_seconds(lambda: learner.update(batch, 1, stop=lambda: False)))
    return tokens / statistics.median(bare[1:]), tokens / statistics.median(own[1:])  # the first ones warm up


def _bare(learner: Learner, share: list[MicroBatch]) -> None:
    base = learner.policy.base
    count = sum(len(part.target) for part in share)
    for part in share:
        hidden = base.base_model(
            input_ids=torch.as_tensor(part.input_ids)[None],
            position_ids=torch.as_tensor(part.position_ids)[None],
            blocks=attention.Blocks(part, CPU),
            use_cache=False,
        ).last_hidden_state[0]
        logits = base.get_output_embeddings()(hidden[torch.as_tensor(part.source)])
        loss = torch.nn.functional.cross_entropy(logits, torch.as_tensor(part.target), reduction="sum") / count
        loss.backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
