"""pipeline.output: what lies at output.uri at the end, and when it counts as delivered."""

import json
import shutil
import warnings

import peft
import pytest
import torch

from pipeline import output, weights
from pipeline.config import RunConfig
from pipeline.learner import Learner
from pipeline.storage import StorageError, open_storage
from pipeline.versions import Version
from tests import models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.tiny(str(folder), layers=1, hidden=64)
    return folder


@pytest.fixture
def config(tmp_path, tiny):
    return RunConfig.model_validate(
        {
            "name": "sums",
            "run_id": "r1",
            "model": {"uri": "hf://team/tiny", "path": str(tiny)},
            "data": {"sets": [{"name": "gsm8k", "uri": "x"}]},
            "rewards": [],
            "algorithm": {"type": "grpo", "total_steps": 9, "prompts_per_step": 1, "group_size": 2},
            "store": {"uri": f"file://{tmp_path}/store"},
            "output": {"uri": f"file://{tmp_path}/output"},
        }
    )


async def published(config, folder, kind="full"):
    storage = open_storage(config.store.uri)
    await weights.publish(storage, Version(1, 9), str(folder), kind)
    return storage


@pytest.fixture
def full(tmp_path, tiny):
    """What the trainer exports in full fine-tuning."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    (folder / "config.json").write_text((tiny / "config.json").read_text())
    return folder


async def test_a_full_model_is_delivered_with_tokenizer_card_and_manifest_last(config, full, tmp_path, monkeypatch):
    storage, target = await published(config, full), open_storage(config.output.uri)
    written = []
    for name in ("put", "put_file"):
        monkeypatch.setattr(target, name, recording(getattr(target, name), written))
    await output.deliver(storage, target, config, Version(1, 9), {"aime": {"avg@4": 0.25, "per_prompt": [0.25]}})
    assert (written[0], written[-1]) == ("DELIVERY.json", "MANIFEST.json")
    manifest = json.loads((tmp_path / "output" / "MANIFEST.json").read_text())
    assert (manifest["run_id"], manifest["version"]) == ("r1", [1, 9])
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(manifest["files"])
    card = (tmp_path / "output" / "README.md").read_text()
    assert "base_model: team/tiny" in card
    assert "step 9 of 9" in card
    assert "| aime | avg@4 | 0.25 |" in card
    assert "per_prompt" not in card


def recording(call, written):
    async def recorded(key, *arguments):
        written.append(key)
        return await call(key, *arguments)

    return recorded


async def test_a_delivery_that_was_cut_short_is_done_again_and_a_finished_one_left_alone(config, full, tmp_path):
    storage, target = await published(config, full), open_storage(config.output.uri)
    await output.deliver(storage, target, config, Version(1, 9), {})
    manifest = tmp_path / "output" / "MANIFEST.json"
    finished = manifest.stat().st_mtime_ns
    await output.deliver(storage, target, config, Version(1, 9), {})
    assert manifest.stat().st_mtime_ns == finished
    manifest.unlink()
    (tmp_path / "output" / "model.safetensors").write_bytes(b"torn")
    await output.deliver(storage, target, config, Version(1, 9), {})
    assert (tmp_path / "output" / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["README.md", "config.json", "sub/model.safetensors"])
async def test_a_place_that_holds_files_of_others_is_refused_and_left_alone(config, tmp_path, name):
    file = tmp_path / "output" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(
        ValueError, match=rf"output\.uri: file://.*/output is not empty, it holds {name}; name an empty"
    ):
        await output.check(open_storage(config.output.uri), config)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", ["[]", "null", "5", "xx", "{}", ""])
async def test_a_manifest_that_no_run_has_written_is_refused_by_name(config, tmp_path, content):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "MANIFEST.json").write_text(content)
    with pytest.raises(ValueError, match=r"output\.uri: file://.* holds a MANIFEST\.json that no run of Miles"):
        await output.check(open_storage(config.output.uri), config)


async def test_an_empty_place_and_a_delivery_of_this_run_whole_or_begun_are_accepted(config, full, monkeypatch):
    storage, target = await published(config, full), open_storage(config.output.uri)
    await output.check(target, config)

    async def cut_short(key, *arguments):
        raise StorageError(key)

    with monkeypatch.context() as patch:
        patch.setattr(target, "put_file", cut_short)
        with pytest.raises(StorageError):
            await output.deliver(storage, target, config, Version(1, 9), {})
    await target.put("model.safetensors", b"torn")
    await output.check(target, config)
    with pytest.raises(ValueError, match="already holds the model of run r1"):
        await output.check(target, config.model_copy(update={"run_id": "r2"}))
    await output.deliver(storage, target, config, Version(1, 9), {})
    await output.check(target, config)
    assert await target.get("DELIVERY.json") is None


async def test_weights_that_are_gone_are_an_error_not_an_empty_delivery(config, full, tmp_path):
    storage, target = await published(config, full), open_storage(config.output.uri)
    with pytest.raises(StorageError):
        await output.deliver(storage, target, config, Version(1, 8), {})
    assert not (tmp_path / "output" / "MANIFEST.json").exists()


async def test_a_delivered_adapter_of_a_model_in_a_folder_is_loaded_with_its_base(config, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = tmp_path / "a model"
    shutil.copytree(tiny, base)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"uri": f"file://{base}", "path": str(base)}),
            "trainer": config.trainer.model_validate({"lora": {"rank": 2}}),
        }
    )
    learner = Learner(config, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind = learner.export(str(tmp_path / "export"))
    storage, target = await published(config, tmp_path / "export", kind), open_storage(config.output.uri)
    await output.deliver(storage, target, config, Version(1, 9), {})
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "output"))
    assert loaded.peft_config["default"].base_model_name_or_path == str(base)


async def test_an_adapter_names_its_base_as_others_would_load_it(config, tmp_path):
    config = config.model_copy(update={"trainer": config.trainer.model_validate({"lora": {}})})
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/somewhere/else", "r": 16}')
    storage, target = await published(config, folder, "adapter"), open_storage(config.output.uri)
    await output.deliver(storage, target, config, Version(1, 9), {})
    adapter = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "team/tiny"
    assert not (tmp_path / "output" / "config.json").exists()
    assert "library_name: peft" in (tmp_path / "output" / "README.md").read_text()
