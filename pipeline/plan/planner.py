"""From the configuration of a run to its plan: find the model's config.json, rehearse a step, estimate."""

import pathlib
import shutil
import tempfile

import transformers

from pipeline import distributed, fetch
from pipeline.batching import Batch
from pipeline.config import RunConfig
from pipeline.plan import estimate, text
from pipeline.plan.estimate import Attention
from pipeline.plan.machines import GIB, Machines
from pipeline.plan.rehearsal import Rehearsal, rehearse, share, uniform_batch
from pipeline.storage import StorageError


async def plan(config: RunConfig, machines: Machines, given: str | None, price: float | None) -> tuple[str, bool]:
    """What `miles plan` prints, and whether the job fits. `given` replaces the model's own config.json.

    Raises ValueError for a model that is not to be had or cannot be trained.
    """
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="miles-plan-") as scratch:
        folder = await _model(config, given, pathlib.Path(scratch))
        stated = _stated(config, folder, machines)
        took = _rehearse(stated, machines)
        attention = _attention(folder, config.model.trust_remote_code)
    training = estimate.trainer(machines, took, **share(stated, _longest(config), machines.ranks))
    generates = config.data.replay_from is None
    serving = estimate.rollout(stated, machines, took.parameters, attention) if generates else None
    page = text.render(config, machines, took, training, serving, price)
    return page, training.fits and (serving is None or serving.fits) and estimate.fits_together(
        machines, training, serving
    )


async def _model(config: RunConfig, given: str | None, scratch: pathlib.Path) -> pathlib.Path:
    """A folder that holds config.json: no weights are asked for."""
    if given is not None:
        file = pathlib.Path(given)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(f"--model-config: {file} is not a file; give the model's config.json, or its folder")
        shutil.copyfile(file, scratch / "config.json")
        return scratch
    if (pathlib.Path(config.model.path) / "config.json").is_file():
        return pathlib.Path(config.model.path)
    try:
        await fetch.settings(config.model, config.store, scratch)
    except (ValueError, StorageError) as error:
        raise ValueError(
            f"spec.model.uri: {error}. The model's config.json alone is enough, without weights: --model-config FILE"
        ) from None
    return scratch


def _stated(config: RunConfig, folder: pathlib.Path, machines: Machines) -> RunConfig:
    """With the type that `auto` becomes on that device: the rehearsal itself takes place on a CPU."""
    dtype = config.trainer.dtype
    if dtype == "auto":
        dtype = "float32" if machines.device.name == "cpu" else "bfloat16"
    trainer = config.trainer.model_copy(update={"dtype": dtype, "compile": False})
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"trainer": trainer, "model": model})


def _rehearse(config: RunConfig, machines: Machines) -> Rehearsal:
    """With as much left unsharded as the trainer would leave on that device."""
    usual = distributed.UNSHARDED_BYTES
    if machines.device.name != "cpu":
        distributed.UNSHARDED_BYTES = int(distributed.UNSHARDED_FRACTION * machines.device.memory_gib * GIB)
    try:
        return rehearse(config, machines.ranks)
    finally:
        distributed.UNSHARDED_BYTES = usual


def _longest(config: RunConfig) -> Batch:
    """A step's batch of the longest samples there can be."""
    algorithm = config.algorithm
    completion = min(algorithm.sampling.max_new_tokens, config.rollout.max_model_len - 1)
    prompt = config.rollout.max_model_len - completion
    return uniform_batch(algorithm.prompts_per_step, algorithm.group_size, prompt, completion)


def _attention(folder: pathlib.Path, trust_remote_code: bool) -> Attention:
    settings = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    ).get_text_config()
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    return Attention(settings.num_hidden_layers, heads, size)
