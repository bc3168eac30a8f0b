"""pipeline.model.loading: the values that transformers would load, on one rank and on two, never whole on either."""

import json
import pathlib
import threading

import pytest
import torch
import transformers

from pipeline import distributed, model
from pipeline.model import loading
from tests import gloo, policies
from tests.policies import LORA, save_model

CPU = torch.device("cpu")
CASES = {
    f"{kind}-{training}": (kind, training)
    for kind, training in (("qwen2", "full"), ("qwen2", "lora"), ("gpt2", "full"), ("llama", "lora"))
}
DEEP = transformers.LlamaConfig(
    hidden_size=512,
    num_hidden_layers=32,
    num_attention_heads=8,
    intermediate_size=768,
    vocab_size=64,
    bos_token_id=None,
    eos_token_id=None,
)
"""285 MB."""


def loaded(folder: pathlib.Path, training: str) -> model.Policy:
    config = policies.run_config(folder, lora=LORA if training == "lora" else None)
    policy = model.build(config, CPU)
    distributed.shard(policy, policy.layers, CPU, policy.dtype)
    model.load(policy, config, CPU)
    return policy


def values(policy: model.Policy) -> dict[str, torch.Tensor]:
    return dict(distributed.gathered(policy.state_dict()))


class Watch(threading.Thread):
    """Most memory of its own, in bytes, that this process has had at a time since the start, less that at the start;
    pages of files, which processes share, are left out."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended, self.before, self.most = threading.Event(), self.own(), 0

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, self.own() - self.before)

    @staticmethod
    def own() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024


def on_rank(folders: dict[str, pathlib.Path], out: pathlib.Path) -> None:
    distributed.UNSHARDED_BYTES = 0
    results = {case: values(loaded(folders[kind], training)) for case, (kind, training) in CASES.items()}
    config = policies.run_config(folders["deep"])
    deep = model.build(config, CPU)
    distributed.shard(deep, deep.layers, CPU, deep.dtype)
    watch = Watch()
    watch.start()
    loading._read(deep, config)
    watch.ended.set()
    results["peak"] = watch.most
    torch.save(results, out / f"rank{distributed.rank()}.pt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    kinds = {kind: save_model(kind, root / kind) for kind in policies.CONFIGS}
    stock = transformers.AutoModelForCausalLM.from_config(DEEP)
    stock.save_pretrained(root / "deep")
    return {**kinds, "deep": root / "deep"}


def stock(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def original_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model.").removeprefix("base_model.model.").replace(".base_layer", ""): tensor
        for name, tensor in tensors.items()
        if "lora_" not in name
    }


@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize("kind", list(policies.CONFIGS))
def test_one_rank_holds_what_transformers_itself_loads(folders, kind, training):
    actual, expected = original_names(values(loaded(folders[kind], training))), stock(folders[kind])
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_tied_weights_stay_one_parameter(folders):
    base = loaded(folders["qwen2"], "full").base
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight


def test_trained_and_frozen_parameters_are_those_of_the_built_model(folders):
    trained = {
        name for name, parameter in loaded(folders["llama"], "lora").named_parameters() if parameter.requires_grad
    }
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(parameter.requires_grad for parameter in loaded(folders["llama"], "full").parameters())


def test_weights_in_several_files_are_found_by_their_index(folders, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())) > 1
    actual, expected = values(loaded(tmp_path, "full")), values(loaded(folders["llama"], "full"))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_generation_configuration_of_the_model_is_exported_with_it(folders, tmp_path):
    transformers.GenerationConfig(eos_token_id=[5, 6]).save_pretrained(folders["llama"])
    model.full_files(loaded(folders["llama"], "full"), tmp_path)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == [5, 6]


def test_a_quantised_model_is_refused(folders, tmp_path):
    content = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="its weights are quantised; save it in bfloat16 first"):
        loaded(tmp_path, "full")


def test_an_adapter_starts_with_a_product_of_zero_and_as_large_as_pefts(folders):
    state = values(loaded(folders["llama"], "lora"))
    first = torch.cat([value.flatten() for name, value in state.items() if "lora_A" in name and value.shape[1] == 64])
    assert float(first.abs().max()) <= 1 / 8
    assert float(first.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert not any(value.any() for name, value in state.items() if "lora_B" in name)


@pytest.mark.timeout(400)
def test_two_ranks_hold_the_same_in_shares_and_read_without_a_copy_of_the_whole(folders, tmp_path):
    gloo.run(on_rank, folders, tmp_path)
    whole = sum(tensor.nbytes for tensor in stock(folders["deep"]).values())
    for rank in (0, 1):
        results = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for case, (kind, training) in CASES.items():
            expected = values(loaded(folders[kind], training))
            assert results[case].keys() == expected.keys()
            assert all(torch.equal(results[case][name], tensor) for name, tensor in expected.items()), case
        assert results["peak"] < whole / 4  # on a CPU its share stays in the file's pages
