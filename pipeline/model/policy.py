"""Building the policy from a Hugging Face folder, and its forward pass."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.batching import MicroBatch
from pipeline.config import LoraConfig, RunConfig, TrainerConfig
from pipeline.model import attention
from pipeline.model.flops import Cost
from pipeline.model.logprobs import token_logprobs

ACTOR, CRITIC = "default", "critic"
"""Names of the adapters; the first is PEFT's own."""


class Policy(nn.Module):
    """`model` is a transformers causal model, or a PEFT model around one. Always in evaluation mode: no dropout."""

    def __init__(
        self, model: nn.Module, temperature: float, dtype: torch.dtype, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        """Whether entropies are trained; without it they are only reported."""
        self.dtype = dtype
        """What it computes in; parameters that are trained may be kept in float32."""
        self.offloaded = False
        """Whether its parameters lie in the CPU's memory, wherever it computes."""
        self.operations = 0
        """Floating-point operations of all passes so far, see flops."""
        self.value_head: nn.Linear | None = None
        self.initial_value: Tensor  # [1, D], where there is a value head
        self.train(False)

    def add_value_head(self, seed: int, trained: bool) -> None:
        """Values near 0 at first: the same small random weights on every rank and in every attempt, kept as they are
        beside the head that is trained."""
        width = self.base.config.get_text_config().hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.value_head = nn.Linear(width, 1, dtype=torch.float32)
            nn.init.normal_(self.value_head.weight, std=1 / (width + 1))
        nn.init.zeros_(self.value_head.bias)
        self.value_head.requires_grad_(trained)
        self.register_buffer("initial_value", self.value_head.weight.detach().clone())

    @property
    def base(self) -> transformers.PreTrainedModel:
        """The transformers model itself; with LoRA, the adapted one."""
        return self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model  # type: ignore[return-value]

    @functools.cached_property
    def cost(self) -> Cost:
        return Cost.of(self.base, ACTOR)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, in order: the units of sharding, compilation and recomputation."""
        count = self.base.config.get_text_config().num_hidden_layers
        lists = [list(part) for part in self.base.base_model.children() if isinstance(part, nn.ModuleList)]
        return next(layers for layers in lists if len(layers) == count)

    def train(self, mode: bool = True) -> "Policy":
        """Stays in evaluation mode; whether gradients flow is the caller's choice (torch.no_grad)."""
        return super().train(False)

    def forward(self, micro_batch: MicroBatch, value: str | None = None) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies (nats) of the R response tokens at the sampling temperature, float32 [R].

        `value`: instead, the value of the state before each token, by the head that is `trained` or the `initial` one.
        """
        self.operations += self.cost.of_pass(micro_batch, head=not value, backward=torch.is_grad_enabled())
        device = next(self.parameters()).device
        hidden = self.base.base_model(
            input_ids=torch.as_tensor(micro_batch.input_ids, device=device)[None],
            position_ids=torch.as_tensor(micro_batch.position_ids, device=device)[None],
            blocks=attention.Blocks(micro_batch, device),
            use_cache=False,
        ).last_hidden_state[0]
        source = torch.as_tensor(micro_batch.source, device=device)
        if value:
            return (self._values(hidden[source], value),)
        target = torch.as_tensor(micro_batch.target, device=device)
        head = self.base.get_output_embeddings().weight
        return token_logprobs(hidden[source], head, target, self.temperature, entropy_gradient=self.entropy_gradient)

    def _values(self, hidden: Tensor, head: str) -> Tensor:
        assert self.value_head is not None
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if head == "initial":
            return wide @ self.initial_value[0].to(wide.dtype)
        return self.value_head(wide)[:, 0]

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The critic's values [R], with gradient. With LoRA `adapter` must be CRITIC until that has been taken, since
        layers may be computed again in the backward pass."""
        return self(micro_batch, "trained")[0]

    @torch.no_grad()
    def score_values(self, micro_batch: MicroBatch) -> Tensor:
        """The critic's values [R] without a gradient."""
        with self.adapter(CRITIC):
            return self.values(micro_batch)

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities [R] without a gradient: π_old."""
        return self(micro_batch)[0]

    @torch.no_grad()
    def unpacked(self, prompt: Tensor, completion: Tensor) -> Tensor:
        """The same of one completion [C] by itself, by the model's own forward pass, all logits at once."""
        ids = torch.cat([prompt, completion]).to(next(self.parameters()).device)
        logits = self.base(ids[None]).logits[0, len(prompt) - 1 : -1].float() / self.temperature
        return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None]).squeeze(1)

    @torch.no_grad()
    def reference(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities [R] of the frozen base, its adapters disabled; another policy in full fine-tuning."""
        assert not any(each.requires_grad for each in self.base.get_input_embeddings().parameters()), "it is trained"
        with self.adapter(None):
            return self(micro_batch)[0]

    @torch.no_grad()
    def initial_values(self, micro_batch: MicroBatch) -> Tensor:
        """Values [R] of the critic as it began: its adapter was zero, its head is kept."""
        with self.adapter(None):
            return self(micro_batch, "initial")[0]

    @contextlib.contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Compute with the adapter ACTOR (as otherwise), CRITIC, or none; nothing changes without adapters."""
        # Not PEFT's own switches: they set requires_grad of whatever parameters FSDP shows just then.
        adapted = [part for part in self.modules() if isinstance(part, BaseTunerLayer)]
        try:
            for part in adapted:
                part._disable_adapters, part._active_adapter = name is None, [name or ACTOR]
            yield
        finally:
            for part in adapted:
                part._disable_adapters, part._active_adapter = False, [ACTOR]


def build(
    config: RunConfig, device: torch.device, *, frozen: bool = False, critic: bool = False, policy: bool = True
) -> Policy:
    """The policy of `config`, to compute on `device`, still without storage: its parameters are on `meta`.

    To be followed by distributed.shard and model.load. Trained parameters are float32 whatever it computes in, frozen
    ones of the type it computes in. `frozen`: nothing is trained, as in the reference of full fine-tuning. `critic`:
    there is a value head, and with LoRA an adapter of its own on the same base; not `policy`: nothing else, the
    language model's head is left out. Raises ValueError for a model that cannot be trained.
    """
    trainer = config.trainer
    dtype = compute_dtype(trainer, device)
    trains_all = trainer.lora is None and not frozen
    model = _empty(config, torch.float32 if trains_all else dtype)
    model.requires_grad_(trains_all)
    _check_attention(model, config)
    if trainer.lora is not None and not frozen:
        model = _with_adapters(model, trainer.lora, config, [ACTOR, CRITIC] if critic else [ACTOR])
    temperature = config.algorithm.sampling.temperature
    built = Policy(model, temperature, dtype, entropy_gradient=config.algorithm.entropy_coefficient > 0)
    try:
        built.base.set_attn_implementation(attention.NAME)
        layers = built.layers
    except (AttributeError, StopIteration) as error:
        name, reason = type(built.base).__name__, str(error) or "its layers are in no list of their own"
        raise ValueError(f"model.uri: {config.model.uri} ({name}) cannot be trained: {reason}") from None
    built.offloaded = trainer.offload == "all" or (frozen and trainer.offload == "reference")
    if not policy:
        built.base.set_output_embeddings(nn.Identity())
    if critic:
        built.add_value_head(trainer.seed, trained=not frozen)
    for layer in layers:
        _optimise(layer, trainer)
    return built


def _empty(config: RunConfig, dtype: torch.dtype) -> Any:
    """transformers' model without storage, from the folder's config.json."""
    source = {"trust_remote_code": config.model.trust_remote_code}
    path = config.model.path
    try:
        settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **source)
        if getattr(settings, "quantization_config", None):
            raise ValueError("its weights are quantised; save it in bfloat16 first")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=attention.STOCK, **source
            )
    except ValueError as error:
        raise ValueError(f"model.uri: {config.model.uri} cannot be trained: {error}") from None
    if (pathlib.Path(path) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return model.eval()


def compute_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    if trainer.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, trainer.dtype)


def of_critic(name: str) -> bool:
    """Whether a parameter of that name is the critic's: in its adapter or head, or below a module called critic."""
    return bool({CRITIC, "value_head"} & set(name.split(".")))


def _with_adapters(model: Any, lora: LoraConfig, config: RunConfig, names: list[str]) -> peft.PeftModel:
    """Without storage, as the base; model.load gives them their first values."""
    _check_targets(model, lora.targets)
    alpha: Any = lora.alpha  # PEFT divides it by the rank; it need not be whole
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=lora.targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        with torch.device("meta"):
            adapted = peft.get_peft_model(model, settings)
            for name in names[1:]:
                adapted.add_adapter(name, dataclasses.replace(settings))
    except ValueError as error:
        raise ValueError(f"trainer.lora.targets: {lora.targets}: {error}") from None
    base: Any = adapted.get_base_model()
    if any(isinstance(part, BaseTunerLayer) for part in (base.get_input_embeddings(), base.get_output_embeddings())):
        raise ValueError(
            f"trainer.lora.targets: {lora.targets} includes the embedding or the head, which cannot carry an adapter; "
            "leave them out"
        )
    settings.target_modules = sorted(settings.target_modules)  # type: ignore[arg-type]
    settings.base_model_name_or_path = config.model.path  # where PEFT looks at it while saving; see output for others
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adapted  # type: ignore[return-value]


def _check_targets(model: nn.Module, targets: str | list[str]) -> None:
    """Raises ValueError for a name that the model does not have: PEFT is content if one of them all fits."""
    named = targets if isinstance(targets, list) else []
    paths = [f".{path}" for path, _ in model.named_modules()]
    if missing := [name for name in named if not any(path.endswith(f".{name}") for path in paths)]:
        raise ValueError(
            f"trainer.lora.targets: the model has no layers called {', '.join(missing)}; write all-linear, or names of "
            "layers that it has"
        )


def _optimise(layer: nn.Module, trainer: TrainerConfig) -> None:
    # Both replace `forward` of the layer itself, so that no parameter changes its name.
    if trainer.compile:
        layer.forward = torch.compile(layer.forward, dynamic=True)  # one code for all lengths
    if trainer.activation_checkpointing:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ROPES_BY_LENGTH = ("dynamic", "longrope")


def _check_attention(model: transformers.PreTrainedModel, config: RunConfig) -> None:
    """Raises ValueError for what two short samples would not show (see loading), or too faintly."""
    text = model.config.get_text_config()
    _check_window(text, config)
    for cap in CAPS:
        if getattr(text, cap, None):
            raise ValueError(
                f"model.uri: {config.model.uri} cannot be trained: it caps its scores ({cap} in its config.json), "
                "which is not supported; choose a model that does not"
            )
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        kind, longest = rope.get("rope_type"), config.rollout.max_model_len
        if kind not in ROPES_BY_LENGTH:
            continue
        known = text.max_position_embeddings
        original = min(known, rope.get("original_max_position_embeddings") or known)
        if longest > original:
            raise ValueError(
                f"model.uri: {config.model.uri} turns positions otherwise beyond {original} tokens (rope_type {kind}), "
                "so that a sample's probabilities would depend on what it is packed with, which is not supported; set "
                f"rollout.maxModelLen (now {longest}) to at most {original}"
            )


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One for all layers, or one for each kind of them."""
    return [parameters] if "rope_type" in parameters else [each for each in parameters.values() if each]


def _check_window(text: transformers.PreTrainedConfig, config: RunConfig) -> None:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    if window and slides and window < config.rollout.max_model_len:
        raise ValueError(
            f"model.uri: {config.model.uri} attends to the last {window} tokens only, which is not supported; set "
            f"rollout.maxModelLen (now {config.rollout.max_model_len}) to at most {window}"
        )
