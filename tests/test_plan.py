"""pipeline.plan: what it predicts is what the trainer then takes, and what it says of a job is right."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable

import pytest
import torch
import transformers

from pipeline import batching, distributed
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.config import DataConfig, ReplayConfig, RunConfig
from pipeline.devices import DEVICES, Device
from pipeline.learner import Learner
from pipeline.plan import __main__ as command
from pipeline.plan import estimate, planner, text
from pipeline.plan.estimate import Attention
from pipeline.plan.machines import GIB, Machines
from pipeline.plan.rehearsal import MICRO_BATCHES, Rehearsal, full_batch, rehearse
from tests import gloo, policies

CONFIGS = pathlib.Path(__file__).parent / "configs"

SIZES = {
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1000},
    "medium": {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 8000},
    "large": {"hidden_size": 1024, "num_hidden_layers": 6, "vocab_size": 16000},
}
MEASURED = os.environ.get("PLAN_SIZES", "small medium").split()
Case = tuple[str, str, int, str]
CASES: list[Case] = [
    (size, training, ranks, placement)
    for size in MEASURED
    for training in ("full", "lora")
    for ranks, placement in ((1, "gathered"), (2, "gathered"), (2, "sharded"))
]
MIB = 2**20


def make_model(size: str, root: pathlib.Path) -> None:
    shape = SIZES[size]
    settings = transformers.LlamaConfig(
        **shape,
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=shape["hidden_size"] // 128,
        intermediate_size=3 * shape["hidden_size"],
        bos_token_id=None,
        eos_token_id=None,
    )
    policies.save_model(settings, root / size)


def config_of(size: str, training: str, root: pathlib.Path) -> RunConfig:
    config = policies.run_config(
        root / size,
        max_model_len=192,
        lora={"rank": 8, "alpha": 16} if training == "lora" else None,
        dtype="float32",
        max_tokens_per_micro_batch=256,
    )
    sampling = config.algorithm.sampling.model_copy(update={"max_new_tokens": 64})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"sampling": sampling})})


def measured(config: RunConfig, ranks: int) -> int:
    """Bytes at the peak of a step, by the counters of PyTorch's own allocator."""
    learner = Learner(config, torch.device("cpu"))
    batch = full_batch(config, ranks)
    learner.update(batch, 1, stop=lambda: False)
    states = [tensor for state in learner.optimizer.state.values() for tensor in state.values()]
    tensors = [*learner.policy.parameters(), *learner.policy.buffers(), *states]
    own = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    resident = sum({tensor.data_ptr(): tensor.nbytes for tensor in own}.values())
    # A busy machine lets gloo hold buffers of an earlier exchange for longer: the least of two steps.
    steps = (2, 3) if ranks > 1 else (2,)
    return min(
        resident + most_held(lambda step=step: learner.update(batch, step, stop=lambda: False)) for step in steps
    )


def most_held(work: Callable[[], object]) -> int:
    """Bytes at the peak of `work` beyond those at its start."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    held, peak = 0, 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def placed(placement: str) -> None:
    distributed.UNSHARDED_BYTES = 2**31 if placement == "gathered" else 0


def on_rank(root: pathlib.Path, cases: list[Case]) -> None:
    peaks = {}
    for size, training, ranks, placement in cases:
        placed(placement)
        peaks[size, training, ranks, placement] = measured(config_of(size, training, root), 2)
    torch.save(peaks, root / f"rank{distributed.rank()}.pt")


def machines(device: Device = DEVICES["H100"], **changes: float) -> Machines:
    settings = {"nodes": 1, "processes_per_node": 4, "servers": 2, "devices_per_server": 2, "network_gbs": 100.0}
    known = {"efficiency": 0.5, "memory_from": "of a test", "cpu_cache_gib": 1.0, "together": False}
    return Machines(**{"device": device, **known, **settings, **changes})


def took(**parts: float) -> Rehearsal:
    """In GiB by part; 2 micro-batches of 1,000 tokens, 4·10¹² operations and 6·10⁹ bytes for both."""
    memory = {name.replace("_", " "): int(size * GIB) for name, size in parts.items()}
    return Rehearsal(10**9, memory, offloaded=0, operations=4 * 10**12, traffic=6 * 10**9, micro_batches=2, tokens=2000)


@functools.cache
def _rehearsed(config: str, ranks: int, unsharded_bytes: int) -> Rehearsal:
    return rehearse(RunConfig.model_validate_json(config), ranks)


def rehearsed(config: RunConfig, ranks: int) -> Rehearsal:
    """`rehearse`; what several tests ask for is played once."""
    return _rehearsed(config.model_dump_json(), ranks, distributed.UNSHARDED_BYTES)


@pytest.fixture(autouse=True)
def played_once(monkeypatch):
    monkeypatch.setattr(planner, "rehearse", rehearsed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_model("small", folder)
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return config_of("small", "full", folder)


@pytest.fixture(scope="module")
def plain(config):
    """The rehearsal of one rank that trains all weights."""
    return rehearsed(config, 1)


def test_a_rehearsal_fills_its_micro_batches_and_gives_every_rank_two_of_each_update(config):
    shares = batching.pack(full_batch(config, 3), full_batch(config, 3).valid, 3, 256)
    assert [len(share) for share in shares] == [MICRO_BATCHES] * 3
    assert {len(part.input_ids) for share in shares for part in share} == {256}


def test_parts_of_a_rehearsal_are_what_they_are_called(config, plain):
    memory = plain.memory
    weights = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(config.model.path)
    ).num_parameters()
    assert memory["weights"] == pytest.approx(4 * weights, rel=0.01)
    assert memory["gradients"] == pytest.approx(4 * weights, rel=0.01)
    assert memory["optimizer"] == pytest.approx(8 * weights, rel=0.01)
    assert memory["activations"] > 0


def test_the_reference_of_full_fine_tuning_is_a_second_model(config, plain):
    algorithm = config.algorithm.model_copy(update={"kl_coefficient": 0.1})
    with_reference = rehearsed(config.model_copy(update={"algorithm": algorithm}), 1)
    assert with_reference.memory["weights"] == pytest.approx(2 * plain.memory["weights"], rel=0.01)
    assert with_reference.memory["optimizer"] == plain.memory["optimizer"]


def offloading(config: RunConfig, what: str) -> RunConfig:
    algorithm = config.algorithm.model_copy(update={"kl_coefficient": 0.1})
    trainer = config.trainer.model_copy(update={"offload": what})
    return config.model_copy(update={"trainer": trainer, "algorithm": algorithm})


def test_what_is_offloaded_is_counted_apart_from_the_device(config):
    none, reference, whole = (rehearsed(offloading(config, what), 2) for what in ("none", "reference", "all"))
    assert none.offloaded == 0
    model = none.memory["weights"] / 1.5  # the policy is shared by the two ranks, each has the reference whole
    assert reference.offloaded == pytest.approx(model / 2, rel=0.02)
    assert reference.memory["weights"] == pytest.approx(model / 2, rel=0.02)
    assert whole.memory["weights"] < 0.01 * model, "more than buffers"
    assert whole.memory.keys().isdisjoint({"optimizer", "gradients"})
    # Half of each, by rank: policy, reference, gradients, and AdamW's two moments.
    assert whole.offloaded == pytest.approx(5 * model / 2, rel=0.02)


async def test_a_plan_says_what_the_nodes_own_memory_must_hold(config):
    page, _ = await planner.plan(offloading(config, "all"), machines(), None, None)
    assert "of the node's own memory, for all its processes" in page


@pytest.mark.parametrize("training", ["full", "lora"])
def test_a_critic_is_rehearsed_too(folder, training):
    config = config_of("small", training, folder)
    parameters = ALGORITHMS["ppo"].parameters
    algorithm = config.algorithm.model_copy(update={"type": "ppo", "parameters": parameters, "total_steps": 100})
    plain, with_critic = rehearsed(config, 1), rehearsed(config.model_copy(update={"algorithm": algorithm}), 1)
    more = with_critic.memory["optimizer"] / plain.memory["optimizer"]
    assert 1.7 < more < 2.1
    assert with_critic.memory["weights"] / plain.memory["weights"] < (1.9 if training == "full" else 1.1)


def test_ranks_share_weights_gradients_and_optimizer_and_pay_with_traffic(config, monkeypatch):
    monkeypatch.setattr(distributed, "UNSHARDED_BYTES", 0)
    alone, many = rehearsed(config, 1), rehearsed(config, 16)
    for part in ("weights", "gradients", "optimizer"):
        assert many.memory[part] == pytest.approx(alone.memory[part] / 16, rel=0.05), part
    assert alone.traffic == 0 < many.traffic
    assert many.operations == alone.operations


def test_copies_of_the_model_are_shared_by_fewer_ranks_each(config, monkeypatch):
    monkeypatch.setattr(distributed, "UNSHARDED_BYTES", 0)
    trainer = config.trainer.model_copy(update={"model_replicas": 4})
    one, four = rehearsed(config, 16), rehearsed(config.model_copy(update={"trainer": trainer}), 16)
    for part in ("weights", "gradients", "optimizer"):
        assert four.memory[part] == pytest.approx(4 * one.memory[part], rel=0.05), part


def test_recomputing_activations_saves_their_memory_and_costs_operations(config, plain):
    trainer = config.trainer.model_copy(update={"activation_checkpointing": True})
    frugal = rehearsed(config.model_copy(update={"trainer": trainer}), 1)
    assert frugal.memory["activations"] < 0.8 * plain.memory["activations"]
    assert 1.1 < frugal.operations / plain.operations < 1.4


def test_training_time_is_that_of_operations_or_of_traffic():
    training = estimate.trainer(machines(), took(weights=1), micro_batches=10, tokens=20_000)
    assert training.compute_s == pytest.approx(10 * 4e12 / (989e12 * 0.5))
    assert training.network_s == pytest.approx(5 * 6e9 / 100e9)
    assert training.step_s == training.network_s
    assert estimate.trainer(machines(processes_per_node=1), took(), 10, 20_000).network_s == 0


def test_a_device_keeps_some_memory_for_itself():
    training = estimate.trainer(machines(), took(weights=40, activations=34), 1, 1)
    assert training.peak_gib == pytest.approx(74 * 1.05 + 2)
    assert training.fits
    assert not estimate.trainer(machines(), took(weights=40, activations=35), 1, 1).fits


def test_the_cache_of_a_server_holds_what_its_weights_leave(config):
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"dtype": "bfloat16"})})
    attention = Attention(layers=32, heads=8, head_size=128)  # 128 KiB a token
    serving = estimate.rollout(config, machines(), 8 * 2**30, attention)  # 16 GiB on two devices
    assert serving.weights_gib == 8
    assert serving.cache_gib == pytest.approx(0.9 * 80 - 8)
    assert serving.sequences == int(64 * GIB / (64 * 1024) / 192)
    assert not estimate.rollout(config, machines(devices_per_server=1), 40 * 2**30, attention).fits


ADVICE = [
    ("activations that can be recomputed", {"weights": 30, "activations": 60}, ["activationCheckpointing: true"]),
    (
        "micro-batches that may be shorter",
        {"weights": 30, "activations": 60},
        ["maxTokensPerMicroBatch: 192 (now 256)"],
    ),
    ("states that more processes share", {"weights": 30, "optimizer": 60}, ["spec.trainer.nodes: 2", "lora: {}"]),
]


@pytest.mark.parametrize(("parts", "expected"), [case[1:] for case in ADVICE], ids=[case[0] for case in ADVICE])
def test_what_does_not_fit_is_given_a_remedy(config, parts, expected):
    serving = estimate.rollout(config, machines(), 10**9, Attention(2, 2, 64))
    found = "\n".join(estimate.advice(config, machines(), estimate.trainer(machines(), took(**parts), 1, 1), serving))
    assert all(text in found for text in expected), found


def test_copies_of_the_model_that_do_not_fit_are_advised_against_and_counted_among_the_processes(config):
    trainer = config.trainer.model_copy(update={"model_replicas": 2})
    serving = estimate.rollout(config, machines(), 10**9, Attention(2, 2, 64))
    training = estimate.trainer(machines(), took(weights=60, optimizer=60), 1, 1)
    found = estimate.advice(config.model_copy(update={"trainer": trainer}), machines(), training, serving)
    assert any(line.startswith("spec.trainer.modelReplicas: 1 (now 2)") for line in found)
    assert any("more training processes: 8 (now 4)" in line for line in found)


def test_what_fits_is_given_no_advice(config):
    serving = estimate.rollout(config, machines(), 10**9, Attention(2, 2, 64))
    assert estimate.advice(config, machines(), estimate.trainer(machines(), took(weights=1), 1, 1), serving) == []


async def test_a_plan_needs_the_models_configuration_and_nothing_else(config):
    page, fits = await planner.plan(config, machines(), None, 2.0)
    assert fits
    assert "all weights of a model of 650 thousand parameters, 1 × 4 training processes, 2 servers × 2, H100" in page
    assert "of 80 (of a test): fits" in page
    assert "at 2 a device and hour" in page
    assert "of an idle worker in an hour        400         800           0  $0.00232" in page


async def test_on_a_cpu_the_cache_is_that_of_the_run_and_one_machine_holds_it_all(config):
    cpu = dataclasses.replace(DEVICES["cpu"], memory_gib=16)
    given = machines(cpu, processes_per_node=2, servers=1, devices_per_server=1, cpu_cache_gib=3.0, together=True)
    page, fits = await planner.plan(config, given, None, None)
    assert fits
    gib = dict(re.findall(r"  (\S.*?) +([0-9]+[.][0-9]+)(?:  |$)", page, re.MULTILINE))
    assert float(gib["cache of keys and values"]) == 3
    assert float(gib["total"]) == pytest.approx(
        float(gib["training processes: 2"]) + float(gib["servers and workers: 1"])
    )
    assert float(gib["training processes: 2"]) > 2  # with the processes' own code
    page, fits = await planner.plan(
        config, dataclasses.replace(given, device=dataclasses.replace(cpu, memory_gib=8)), None, None
    )
    assert not fits
    assert "a machine with more memory, or fewer processes" in page


async def test_of_a_cpu_no_time_is_claimed_that_nobody_stated(config):
    cpu = machines(dataclasses.replace(DEVICES["cpu"], memory_gib=16), servers=1, devices_per_server=1)
    page, _ = await planner.plan(config, cpu, None, None)
    assert "no estimate of the time" in page
    assert "nan" not in page
    stated = dataclasses.replace(cpu, device=dataclasses.replace(cpu.device, tflops=0.2, bandwidth_gbs=20.0))
    page, _ = await planner.plan(config, stated, None, None)
    assert re.search(r"\d steps of the longer one: [0-9.]+ (seconds|minutes), [-e0-9.]+ device hours", page), page


@pytest.mark.parametrize(
    ("number", "shown"), [(7.62e9, "7.62 billion"), (134.5e6, "134 million"), (51_400, "51.4 thousand"), (640, "640")]
)
def test_a_model_of_any_size_is_counted_in_a_fitting_unit(number, shown):
    assert text._count(number) == shown


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--device=cpu"], (8, "assumed; --memory replaces it")),
        (["--device=cpu", "--memory=3"], (3, "--memory")),
        (
            ["--one-machine", "--device=cpu"],
            (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, "this machine"),
        ),
        (["--one-machine", "--device=cpu", "--device=H100"], (80, "H100's data sheet")),
    ],
)
def test_a_plan_says_where_the_memory_is_known_from(flags, expected):
    found = command.machines(command.parse(["job.yaml", *flags]))
    assert (found.device.memory_gib, found.memory_from) == expected
    assert found.together == (expected[1] == "this machine")


async def test_a_job_that_trains_stored_samples_is_planned_without_servers(config):
    stored = config.model_copy(update={"data": DataConfig(sets=[], replay_from=ReplayConfig(uri="s3://a/b"))})
    page, fits = await planner.plan(stored, dataclasses.replace(machines(), servers=0), None, 2.0)
    assert fits
    assert "1 × 4 training processes, stored samples, H100" in page
    assert not {"generation", "vLLM", "requests"} & set(page.replace("\n", " ").split())


async def test_without_a_configuration_within_reach_the_remedy_is_named(config, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    away = config.model_copy(
        update={"model": config.model.model_copy(update={"uri": "hf://nobody/nothing", "path": "/nowhere"})}
    )
    with pytest.raises(ValueError, match=r"spec\.model\.uri: hf://nobody/nothing .*--model-config FILE"):
        await planner.plan(away, machines(), None, None)
    page, _ = await planner.plan(away, machines(), config.model.path, None)
    assert "fits" in page


async def test_a_configuration_that_is_not_there_is_named(config):
    with pytest.raises(ValueError, match="--model-config: /nowhere is not a file"):
        await planner.plan(config, machines(), "/nowhere", None)


@pytest.mark.parametrize(("device", "dtype"), [("H100", "bfloat16"), ("cpu", "float32")])
def test_an_automatic_type_is_that_of_the_device_planned_for(config, device, dtype):
    automatic = config.model_copy(update={"trainer": config.trainer.model_copy(update={"dtype": "auto"})})
    stated = planner._stated(automatic, pathlib.Path("folder"), machines(DEVICES[device]))
    assert (stated.trainer.dtype, stated.model.path) == (dtype, "folder")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_predicted_peak_memory_is_within_a_tenth_of_the_measured_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "UNSHARDED_BYTES", distributed.UNSHARDED_BYTES)
    for size in MEASURED:
        make_model(size, tmp_path)
    configs = {case: config_of(case[0], case[1], tmp_path) for case in CASES}
    predicted = {}
    for case in CASES:
        placed(case[3])
        predicted[case] = sum(rehearse(configs[case], ranks=case[2]).memory.values())
    actual = {case: measured(configs[case], 1) for case in CASES if case[2] == 1}
    gloo.run(on_rank, tmp_path, [case for case in CASES if case[2] == 2])
    actual |= torch.load(tmp_path / "rank0.pt", weights_only=False)
    with capsys.disabled():
        print(f"\n{'model':8}{'training':10}{'ranks':>5}  {'placement':10}{'predicted':>10}{'measured':>10} MiB  error")
        for case in CASES:
            size, training, ranks, placement = case
            ratio = predicted[case] / actual[case] - 1
            print(
                f"{size:8}{training:10}{ranks:5}  {placement:10}{predicted[case] / MIB:10.1f}{actual[case] / MIB:10.1f}"
                f"      {ratio:+.1%}"
            )
    for case in CASES:
        assert predicted[case] == pytest.approx(actual[case], rel=0.1), case
