import contextlib
import json
import os
import pathlib
import struct
import tempfile
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import weights
from pipeline.storage import Conflict, MemoryStorage, StorageError
from pipeline.versions import Version
from pipeline.weights import collectable, fetch, merge_adapter, publish

V0, V1 = Version(2, 0), Version(2, 1)
PROJECTION = "model.layers.0.self_attn.q_proj"
DICE = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return DICE.standard_normal(shape, dtype=np.float32)


def base_tensors() -> dict[str, np.ndarray]:
    return {
        "model.embed_tokens.weight": noise(11, 6),
        f"{PROJECTION}.weight": noise(8, 6),
        "model.layers.1.mlp.up_proj.weight": noise(5, 6),
        "model.norm.weight": noise(6),
    }


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(base_tensors(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_adapter(folder: pathlib.Path, targets: dict[str, tuple[int, int]], rank: int = 2, **config) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    lora = {}
    for module, (rows, columns) in targets.items():
        lora[f"base_model.model.{module}.lora_A.weight"] = noise(rank, columns)
        lora[f"base_model.model.{module}.lora_B.weight"] = noise(rows, rank)
    save_file(lora, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", **config})
    )
    return folder


@pytest.fixture
def adapter(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_adapter(tmp_path / "adapter", {PROJECTION: (8, 6)})


@pytest.fixture
def store(clock) -> MemoryStorage:
    return MemoryStorage(clock)


async def test_what_is_published_is_fetched_and_the_manifest_came_last(store, adapter, tmp_path):
    written = []

    class Watch:
        async def before(self, operation, key):
            if operation in ("write", "upload"):
                written.append(key.rpartition("/")[2])

        async def after(self, operation, key):
            pass

    trainer = MemoryStorage(store.clock, Watch(), store.memory)
    sent = await publish(trainer, V1, str(adapter), "adapter")
    assert written == ["adapter_config.json", "adapter_model.safetensors", "MANIFEST.json"]
    assert await fetch(store, V1, str(tmp_path / "got")) == sent
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "got" / name).read_bytes() == (adapter / name).read_bytes()


async def test_the_base_model_is_a_version_without_files(store, tmp_path):
    await publish(store, V0, None, "base")
    got = await fetch(store, V0, str(tmp_path / "got"))
    assert (got.kind, got.files, list((tmp_path / "got").iterdir())) == ("base", {}, [])


async def test_a_version_is_published_once(store, adapter):
    await publish(store, V1, str(adapter), "adapter")
    with pytest.raises(Conflict):
        await publish(store, V1, str(adapter), "adapter")


async def test_a_version_without_its_manifest_is_not_there(store, adapter, tmp_path):
    await publish(store, V1, str(adapter), "adapter")
    await store.delete(weights.key(V1, "MANIFEST.json"))
    with pytest.raises(StorageError, match=r"t000002-s0{19}1 are not published, or were collected"):
        await fetch(store, V1, str(tmp_path / "got"))
    assert await weights.published(store) == set()


async def test_a_fetch_goes_on_where_it_was_broken_off(store, adapter, tmp_path):
    await publish(store, V1, str(adapter), "adapter")
    got = tmp_path / "got"
    await fetch(store, V1, str(got))
    (got / "adapter_config.json").write_text("half")
    reads = []

    class Watch:
        async def before(self, operation, key):
            reads.append((operation, key.rpartition("/")[2]))

        async def after(self, operation, key):
            pass

    await fetch(MemoryStorage(store.clock, Watch(), store.memory), V1, str(got))
    assert ("read_range", "adapter_config.json") in reads
    assert ("read_range", "adapter_model.safetensors") not in reads
    assert (got / "adapter_config.json").read_bytes() == (adapter / "adapter_config.json").read_bytes()


async def test_a_file_that_was_replaced_or_is_missing_is_refused_by_name(store, adapter, tmp_path):
    await publish(store, V1, str(adapter), "adapter")
    await store.put(weights.key(V1, "adapter_model.safetensors"), b"another file, with a checksum of its own")
    with pytest.raises(StorageError, match=r"adapter_model.safetensors is not the file that MANIFEST.json names"):
        await fetch(store, V1, str(tmp_path / "got"))
    assert not (tmp_path / "got" / "adapter_model.safetensors").exists()
    await store.delete(weights.key(V1, "adapter_model.safetensors"))
    with pytest.raises(StorageError, match=r"adapter_model.safetensors does not exist"):
        await fetch(store, V1, str(tmp_path / "got"))


@pytest.mark.parametrize(
    "change",
    [
        {"version": str(V0)},
        {"files": {"../../x": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"a/b": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"a": {"size": 1, "sha256": "short"}}},
        {"kind": "delta"},
    ],
)
async def test_a_hostile_or_damaged_manifest_is_refused(store, adapter, tmp_path, change):
    sent = await publish(store, V1, str(adapter), "adapter")
    for data in (json.dumps(sent.model_dump() | change).encode(), b"", b"[1"):
        await store.put(weights.key(V1, "MANIFEST.json"), data)
        with pytest.raises(StorageError, match=r"MANIFEST.json is damaged") as caught:
            await fetch(store, V1, str(tmp_path / "got"))
        assert "\n" not in str(caught.value)


async def test_a_truncated_file_is_not_published(store, adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        await publish(store, V1, str(adapter), "adapter")
    assert await weights.published(store) == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {f"_orig_mod.{name}": value for name, value in t.items()}, "lacks model.embed_tokens.weight"),
        (
            lambda t: t | {f"{PROJECTION}.weight": t[f"{PROJECTION}.weight"][:4]},
            r"shape \(4, 6\), the base model's has",
        ),
        (lambda t: t | {"model.extra": noise(1)}, "has model.extra, which the base model has not"),
        (lambda t: {name: t[name] for name in t if "norm" not in name}, "lacks model.norm.weight"),
    ],
)
async def test_full_weights_that_are_not_the_whole_model_are_refused(store, base, tmp_path, change, message):
    folder = tmp_path / "export"
    folder.mkdir()
    save_file(change(base_tensors()), folder / "model.safetensors")
    await publish(store, V1, str(folder), "full")
    with pytest.raises(StorageError, match=message):
        await fetch(store, V1, str(tmp_path / "got"), base=str(base))


async def test_full_weights_of_a_tied_model_may_spell_out_or_leave_out_the_head(store, base, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    save_file(base_tensors() | {"lm_head.weight": noise(11, 6)}, folder / "model.safetensors")
    await publish(store, V1, str(folder), "full")
    assert (await fetch(store, V1, str(tmp_path / "got"), base=str(base))).kind == "full"


# Merging.


@pytest.mark.parametrize(("config", "scale"), [({}, 4.0), ({"use_rslora": True}, 8 / 2**0.5), ({"lora_alpha": 1}, 0.5)])
def test_a_merge_adds_the_scaled_product_to_the_targets_and_nothing_else(base, tmp_path, config, scale):
    adapter = make_adapter(tmp_path / "adapter", {PROJECTION: (8, 6)}, **config)
    merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{PROJECTION}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    expected = before[f"{PROJECTION}.weight"] + scale * (b @ a)
    np.testing.assert_allclose(after[f"{PROJECTION}.weight"], expected, atol=1e-6)
    assert before.keys() == after.keys()
    for name in before.keys() - {f"{PROJECTION}.weight"}:
        assert np.array_equal(before[name], after[name])
    assert (tmp_path / "out" / "config.json").read_text() == (base / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_pattern_gives_modules_an_alpha_of_their_own(base, tmp_path):
    targets = {PROJECTION: (8, 6), "model.layers.1.mlp.up_proj": (5, 6)}
    adapter = make_adapter(tmp_path / "adapter", targets, alpha_pattern={"up_proj": 2})
    scales = {name: made.scale for name, made in weights._adapters(adapter).items()}
    assert scales == {f"{PROJECTION}.weight": 4.0, "model.layers.1.mlp.up_proj.weight": 1.0}


def test_a_hundred_merges_leave_the_base_as_it_was_and_the_last_is_as_good_as_the_first(base, adapter, tmp_path):
    before = (base / "model.safetensors").read_bytes()
    results = set()
    for _ in range(100):
        merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
        results.add((tmp_path / "out" / "model.safetensors").read_bytes())
    assert (base / "model.safetensors").read_bytes() == before
    assert len(results) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_an_adapter_too_small_for_bfloat16_is_not_rounded_away(base, tmp_path):
    original = base_tensors()
    bits = (original[f"{PROJECTION}.weight"].view(np.uint32) >> 16).astype(np.uint16)
    _save_bfloat16(base / "model.safetensors", {f"{PROJECTION}.weight": bits})
    adapter = make_adapter(tmp_path / "adapter", {PROJECTION: (8, 6)}, lora_alpha=1e-4)
    merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{PROJECTION}.weight"]
    stored = (bits.astype(np.uint32) << 16).view(np.float32)
    lora = load_file(adapter / "adapter_model.safetensors")
    product = (
        lora[f"base_model.model.{PROJECTION}.lora_B.weight"] @ lora[f"base_model.model.{PROJECTION}.lora_A.weight"]
    )
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged - stored, 5e-5 * product, atol=3e-7)
    assert np.abs(merged - stored).max() > 1e-5


def _save_bfloat16(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    entries, data = {}, b""
    for name, bits in tensors.items():
        entries[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_float16_base_is_merged_in_float32(base, adapter, tmp_path):
    halves = {name: value.astype(np.float16) for name, value in base_tensors().items()}
    save_file(halves, base / "model.safetensors")
    merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: str(value.dtype) for name, value in after.items()} == {
        name: "float32" if name == f"{PROJECTION}.weight" else "float16" for name in halves
    }
    assert np.array_equal(after["model.norm.weight"], halves["model.norm.weight"])


def test_a_base_in_several_files_is_merged_file_by_file(base, adapter, tmp_path):
    whole = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(whole)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: whole[name] for name in part}, base / f"model-0000{number + 1}-of-00002.safetensors")
    (base / "model.safetensors.index.json").write_text("{}")
    merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    untouched = next(path for path in base.glob("*.safetensors") if f"{PROJECTION}.weight" not in load_file(path))
    assert (tmp_path / "out" / untouched.name).read_bytes() == untouched.read_bytes()
    assert weights.tensors(str(tmp_path / "out")).keys() == whole.keys()
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("targets", "config", "message"),
    [
        ({"lm_head": (11, 6)}, {}, "changes lm_head.weight, .* tied to the embedding: leave it out of the targets"),
        ({"model.layers.7.mlp.up_proj": (5, 6)}, {}, "changes model.layers.7.mlp.up_proj.weight, which the base"),
        ({PROJECTION: (8, 5)}, {}, r"has shape \(8, 5\), the base \(8, 6\)"),
        ({PROJECTION: (8, 6)}, {"use_dora": True}, "not plain LoRA .use_dora"),
        ({PROJECTION: (8, 6)}, {"bias": "all"}, "not plain LoRA .bias"),
        ({PROJECTION: (8, 6)}, {"modules_to_save": ["lm_head"]}, "not plain LoRA .modules_to_save"),
        ({PROJECTION: (8, 6)}, {"peft_type": "IA3"}, "not plain LoRA .IA3"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_one_clear_error_and_leaves_nothing(
    base, tmp_path, targets, config, message
):
    adapter = make_adapter(tmp_path / "adapter", targets, **config)
    with pytest.raises(ValueError, match=message):
        merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_half_an_adapter_is_refused(base, adapter, tmp_path):
    lora = load_file(adapter / "adapter_model.safetensors")
    lora.pop(f"base_model.model.{PROJECTION}.lora_B.weight")
    save_file(lora, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"no complete LoRA of {PROJECTION}"):
        merge_adapter(str(base), str(adapter), str(tmp_path / "out"))


@pytest.mark.slow
def test_tensors_are_merged_exactly_as_peft_merges_them(tmp_path):
    import peft
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(vocab_size=100, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    model = transformers.Qwen2ForCausalLM(config).float()
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.requires_grad)
    wrapped.save_pretrained(tmp_path / "adapter")
    merge_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out"))
    merged = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "out")
    expected = wrapped.merge_and_unload().state_dict()
    assert expected.keys() == merged.state_dict().keys()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_model_of_135_million_parameters_is_merged_in_a_second(tmp_path):
    folder = pathlib.Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    shapes = {"self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576)}
    shapes |= {"self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576)}
    shapes |= {"mlp.down_proj": (576, 1536)}
    modules = {f"model.layers.{layer}.{name}": shape for layer in range(30) for name, shape in shapes.items()}
    with _temporary(folder) as place:
        (place / "base").mkdir()
        large = {f"{module}.weight": np.ones(shape, np.float32) for module, shape in modules.items()}
        large["model.embed_tokens.weight"] = np.ones((49152, 576), np.float32)
        save_file(large, place / "base" / "model.safetensors")
        make_adapter(place / "adapter", modules, rank=16)
        started = time.process_time()
        merge_adapter(str(place / "base"), str(place / "adapter"), str(place / "out"))
        # Time of this process alone: on two cores it shares with others the wall clock says little.
        assert time.process_time() - started < 1.5


@contextlib.contextmanager
def _temporary(folder: pathlib.Path):
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield pathlib.Path(name)


# Collecting.


def test_collectable_versions_lie_below_the_newest_and_are_not_kept():
    versions = [Version(1, step) for step in range(6)] + [Version(2, 3), Version(2, 4)]
    keep = {Version(1, 2), Version(2, 3)}
    assert collectable(versions, Version(2, 3), keep) == [Version(1, step) for step in (0, 1, 3, 4, 5)]


async def test_a_trainer_that_was_only_asleep_deletes_nothing_of_its_successor_whichever_version_is_the_best(
    store, adapter
):
    for term, steps in ((1, range(4)), (2, range(3, 7))):
        for step in steps:
            await publish(store, Version(term, step), str(adapter), "adapter")
    best, own = Version(2, 6), {Version(1, 2), Version(1, 3)}
    assert await weights.collect(store, Version(1, 3), own | {best}) == [Version(1, 0), Version(1, 1)]
    assert await weights.published(store) == own | {Version(2, step) for step in range(3, 7)}


async def test_collecting_deletes_whole_versions_and_leaves_the_kept_ones_and_half_published_newer_ones(store, adapter):
    for step in range(4):
        await publish(store, Version(1, step), str(adapter), "adapter")
    await store.put(weights.key(Version(1, 9), "adapter_model.safetensors"), b"still uploading")
    assert await weights.collect(store, Version(1, 3), {Version(1, 1), Version(1, 3)}) == [
        Version(1, 0),
        Version(1, 2),
    ]
    assert await weights.published(store) == {Version(1, 1), Version(1, 3)}
    left = {info.key.split("/")[1] for info in await store.list("weights")}
    assert left == {str(Version(1, step)) for step in (1, 3, 9)}
