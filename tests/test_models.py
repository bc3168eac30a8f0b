"""tests.models: the small models that tests and demonstrations start from."""

import pytest
import safetensors.torch
import torch
import transformers

from tests import models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.ensure("tiny", tmp_path_factory.mktemp("models") / "tiny")


def test_the_tiny_model_is_the_same_wherever_it_is_made(tiny, tmp_path):
    again = models.ensure("tiny", tmp_path / "tiny")
    first, second = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (tiny, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_tenth_of_what_the_tiny_model_says_at_first_is_digits(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    prompts = torch.randint(4, len(tokenizer), (20, 30), generator=torch.Generator().manual_seed(0))
    share = model(prompts).logits[:, -1].softmax(-1)[:, digits].sum(-1).mean()
    assert 0.05 < float(share.detach()) < 0.15


def test_the_tiny_tokenizer_keeps_every_printable_character(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    text = "What is 12 + 30?\n{Answer}: ~42!"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_that_could_not_be_made_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(folder):
        (tmp_path / folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setitem(models.MODELS, "tiny", fail)
    with pytest.raises(KeyboardInterrupt):
        models.ensure("tiny", tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_not_made_again(tiny, monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", None)
    assert models.ensure("tiny", tiny) == tiny


def test_the_reward_model_scores_a_text_by_its_share_of_digits(tmp_path):
    folder = models.ensure("reward", tmp_path / "reward")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    texts = ["ab?!", "1b?!", "a1b2", "12b4", "1234"]
    scores = [float(model(torch.tensor([tokenizer.encode(text)])).logits.detach()) for text in texts]
    assert scores[0] == 0.0 and scores == sorted(set(scores))
    assert scores[-1] == pytest.approx(32 / 33**0.5)
