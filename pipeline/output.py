"""Delivery: the trained model, as others load it, at `output.uri`.

Full fine-tuning gives a Hugging Face folder, LoRA a PEFT adapter; both with the tokenizer and a model card.
DELIVERY.json comes first and goes last: it says whose files lie there while they are incomplete. MANIFEST.json comes
last, with sizes and checksums: without it the delivery is unfinished and is done again.
"""

import json
import pathlib
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from pipeline import weights
from pipeline.config import RunConfig
from pipeline.storage import Storage, file_sha256
from pipeline.versions import Version

MANIFEST = "MANIFEST.json"
MARKER = "DELIVERY.json"
BASE_FILES = re.compile(r"(.*\.(json|jinja|model|txt))")
NOT_TAKEN = re.compile(r"(.*\.index\.json|README.*|MANIFEST\.json|DELIVERY\.json)")
"""Base-model files that would describe weights or a model that are not these."""
REMEDY = "name an empty folder or another output.uri"


async def check(target: Storage, config: RunConfig) -> None:
    """Raise ValueError if anything but this run's own delivery, whole or begun, lies at the output's place."""
    assert config.output is not None
    uri = config.output.uri
    for name in (MANIFEST, MARKER):
        found = await target.get(name)
        if found is None:
            continue
        owner = _content(found.data).get("run_id")
        if owner is None:
            raise ValueError(f"output.uri: {uri} holds a {name} that no run of Miles has written; {REMEDY}")
        if owner != config.run_id:
            raise ValueError(f"output.uri: {uri} already holds the model of run {owner}; {REMEDY}")
        return
    others = sorted(info.key for info in await target.list(""))
    if others:
        raise ValueError(f"output.uri: {uri} is not empty, it holds {others[0]}; {REMEDY}")


async def deliver(
    storage: Storage, target: Storage, config: RunConfig, version: Version, evaluation: Mapping[str, Any]
) -> None:
    """Copy the weights `version` with tokenizer and model card to `target`; a delivery already there is left alone.

    evaluation: set → metric → value of that very version, for the card.
    """
    delivered = await target.get(MANIFEST)
    if delivered is not None and _content(delivered.data).get("version") == list(version):
        return
    await target.put(MARKER, json.dumps({"run_id": config.run_id}).encode())
    await target.delete(MANIFEST)
    with tempfile.TemporaryDirectory(prefix="miles-output-") as local:
        folder = pathlib.Path(local)
        await weights.fetch(storage, version, local)
        (folder / weights.MANIFEST).unlink(missing_ok=True)
        _complete(folder, config)
        (folder / "README.md").write_text(model_card(config, version, evaluation))
        files = {}
        for path in sorted(folder.iterdir()):
            await target.put_file(path.name, str(path))
            files[path.name] = {"size": path.stat().st_size, "sha256": file_sha256(str(path))}
        manifest = {"run_id": config.run_id, "name": config.name, "version": list(version), "files": files}
        await target.put(MANIFEST, json.dumps(manifest, indent=1).encode())
    await target.delete(MARKER)


def _content(data: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        content = json.loads(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _complete(folder: pathlib.Path, config: RunConfig) -> None:
    """Add the base model's tokenizer (and, for a full model, its configuration); name the base in an adapter."""
    adapter = folder / "adapter_config.json"
    for source in sorted(pathlib.Path(config.model.path).iterdir()):
        taken = BASE_FILES.fullmatch(source.name) or (config.model.trust_remote_code and source.suffix == ".py")
        if not source.is_file() or not taken or NOT_TAKEN.fullmatch(source.name) or (folder / source.name).exists():
            continue
        if not (adapter.exists() and source.name in ("config.json", "generation_config.json")):
            shutil.copyfile(source, folder / source.name)
    if adapter.exists():
        content = json.loads(adapter.read_text())
        content |= {"base_model_name_or_path": base_name(config), "revision": config.model.revision}
        adapter.write_text(json.dumps(content, indent=2, sort_keys=True))


def base_name(config: RunConfig) -> str:
    """The base model as others would load it: a hub name, the path of a folder; else its URI, which they must fetch."""
    return config.model.uri.removeprefix("hf://").removeprefix("file://")


def model_card(config: RunConfig, version: Version, evaluation: Mapping[str, Any]) -> str:
    """README.md of the delivered model, with the hub's metadata header."""
    lora = config.trainer.lora
    header = ["---", f"library_name: {'peft' if lora else 'transformers'}"]
    if config.model.uri.startswith("hf://"):
        header.append(f"base_model: {base_name(config)}")
    header += ["tags:", "- reinforcement-learning", f"- {config.algorithm.type}", "- miles", "---"]
    kind = f"LoRA adapter (rank {lora.rank}, alpha {lora.alpha:g})" if lora else "Fine-tuned model"
    sets = ", ".join(data.name for data in config.data.sets)
    summary = (
        f"{kind} of `{base_name(config)}`, trained with {config.algorithm.type} by Miles: step {version.step} of "
        f"{config.algorithm.total_steps}, {config.algorithm.prompts_per_step} prompts × {config.algorithm.group_size} "
        f"samples a step, learning rate {config.algorithm.learning_rate:g}, on {sets}."
    )
    lines = [f"# {config.name}", "", summary]
    rows = [f"| {name} | {metric} | {value:.4g} |" for name, metric, value in _numbers(evaluation)]
    if rows:
        lines += ["", "| evaluation | metric | value |", "|---|---|---|", *rows]
    lines += ["", f"Run `{config.namespace}/{config.name}`, id `{config.run_id}`."]
    return "\n".join([*header, "", *lines, ""])


def _numbers(evaluation: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    return [
        (name, metric, float(value))
        for name, metrics in sorted(evaluation.items())
        if isinstance(metrics, Mapping)
        for metric, value in sorted(metrics.items())
        if isinstance(value, int | float)
    ]
