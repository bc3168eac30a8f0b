"""`make bench`: how fast `miles run` trains, as a ratio to TRL's GRPOTrainer on the same work in the same minutes.

The same model, prompts, reward, group size, response limit and LoRA adapter, both in fp32 on all cores of this
machine. TRL is measured with its defaults: it generates with transformers in the training process, since no vLLM
serves it on a CPU. Speeds are samples a second over whole steps, the first ones of each left out.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).parent.parent
DEMO = ROOT / "manifests" / "samples" / "demo.yaml"
MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
STEPS = {"miles": 12, "trl": 4}
LIMIT_S = 1200


def main() -> None:
    if sys.argv[1:] == ["trl"]:
        print(json.dumps(trl()))
        return
    print("==> TRL: 4 steps of the demo's work", flush=True)
    reference = _measure_trl()
    print("==> miles run: 12 steps of the demo", flush=True)
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        own = _measure_miles(pathlib.Path(folder))
    print(f"\n{'':8}samples/s  ratio")
    for name, speed in (("TRL", reference), ("Miles", own)):
        print(f"{name:8}{speed:9.2f}  {speed / reference:5.2f}")


def _measure_trl() -> float:
    command = [sys.executable, "-m", "tests.bench", "trl"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def _measure_miles(folder: pathlib.Path) -> float:
    settings = {
        "spec.algorithm.totalSteps": STEPS["miles"],
        "spec.evaluation.sets": "[]",
        "spec.store.uri": f"file://{folder}/store",
        "spec.output.uri": f"file://{folder}/model",
    }
    command = [sys.executable, "-m", "operators.cli", "run", str(DEMO), "--run-dir", str(folder / "run")]
    for path, value in settings.items():
        command += ["--set", f"{path}={value}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)
    return float(json.loads((folder / "run" / "summary.json").read_text())["samples_per_s"])


def trl() -> dict[str, float]:
    """GRPOTrainer on the demo's job; samples/s of all steps but the first."""
    import peft
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    job = yaml.safe_load(DEMO.read_text())["spec"]
    algorithm = job["algorithm"]
    samples = algorithm["promptsPerStep"] * algorithm["groupSize"]
    ended: list[float] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            ended.append(time.perf_counter())
            print(f"step {len(ended)} of {STEPS['trl']}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=STEPS["trl"],
            per_device_train_batch_size=samples,
            num_generations=algorithm["groupSize"],
            max_completion_length=algorithm["sampling"]["maxNewTokens"],
            learning_rate=float(algorithm["learningRate"]),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        lora = peft.LoraConfig(r=job["trainer"]["lora"]["rank"], target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = GRPOTrainer(
            str(MODEL),
            reward_funcs=_reward,
            args=config,
            train_dataset=_prompts(job["data"]["sets"][0], algorithm["promptsPerStep"] * STEPS["trl"]),
            peft_config=lora,
            callbacks=[Watch()],
        )
        trainer.train()
    return {"samples_per_s": samples * (len(ended) - 1) / (ended[-1] - ended[0])}


def _prompts(entry: dict[str, Any], count: int) -> Any:
    import datasets
    import reasoning_gym

    items = reasoning_gym.create_dataset(entry["generator"].split("/")[1], size=count, seed=0, **entry["parameters"])
    rows = [{"prompt": [{"role": "user", "content": i["question"]}], "answer": i["answer"]} for i in items]
    return datasets.Dataset.from_list(rows)


def _reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    from manifests.samples.rewards import last_number

    return [last_number(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
