"""Causal language models: logits against `transformers`, the cache against none, LoRA, and errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch
from torch import Tensor

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.errors import ConfigError, WeightsError
from medvl.models import CausalLM, CausalLMConfig, RewardConfig, save
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IMAGE: dict[str, Any] = {
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 1},
    "image_size": 64,
    "lora_rank": 2,
    "lora_dropout": 0.0,
    "max_tokens": 20,
}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_words(TEXTS, min_frequency=1)


def generator(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> CausalLM:
    torch.manual_seed(0)
    arguments = {**IMAGE, "language_weights": str(folder), **settings}
    model = medvl.create_model("causal_lm", tokenizer=tokenizer, **arguments)
    assert isinstance(model, CausalLM)
    return model


def study(tokenizer: Tokenizer, model: CausalLM, size: int = 3) -> Batch:
    """Prompts of unequal length with the marker inside, behind, and alone."""
    marker = model.image_token_id
    rows = [[5, marker, 6, 7], [8, 9, 10, 11, marker], [marker]]
    length = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask_BT = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
    return dataclasses.replace(
        make_batch(tokenizer, size), prompt_ids_BT=ids_BT, prompt_mask_BT=mask_BT
    )


def expected_logits(model: CausalLM, folder: Path, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """Return ids of a report and the scores of each by `transformers` alone, one row at a time."""
    language = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    words = language.get_input_embeddings()
    assert batch.prompt_ids_BT is not None
    assert batch.prompt_mask_BT is not None
    prompt = batch.prompt_ids_BT[row][batch.prompt_mask_BT[row]].tolist()
    place = prompt.index(model.image_token_id)
    patches = model.projector(model.image_encoder(batch.image_BCHW[row : row + 1]).patches_BPD)[0]
    ids = batch.ids_BT[row][batch.mask_BT[row]]
    parts = [words(torch.tensor(prompt[:place], dtype=torch.int64)), patches,
             words(torch.tensor(prompt[place + 1 :], dtype=torch.int64)), words(ids)]  # fmt: skip
    logits = language(inputs_embeds=torch.cat(parts)[None]).logits[0]
    return ids, logits[-len(ids) - 1 : -1]


def test_logits_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    """Row by row without padding, and every token of a report is a target."""
    model = generator(folder).eval()
    batch = study(tokenizer, model)
    scores_BTV = model.score_targets(batch.ids_BT, model.read(batch))
    terms = []
    for row in range(3):
        ids, expected = expected_logits(model, folder, batch, row)
        torch.testing.assert_close(scores_BTV[row, : len(ids)], expected, rtol=1e-4, atol=1e-4)
        terms.append(torch.nn.functional.cross_entropy(expected, ids, reduction="none"))
    torch.testing.assert_close(model(batch).total, torch.cat(terms).mean(), rtol=1e-4, atol=1e-5)
    assert float(model.loss_counts(batch)) == float(batch.mask_BT.sum())


class WithoutCache:
    """The same model as a `NextToken` that computes all words again at every step."""

    def __init__(self, model: CausalLM, batch: Batch) -> None:
        self.model, self.prefix = model, model.read(batch)
        self.ids_RT = torch.zeros(len(batch), 0, dtype=torch.int64)

    def first(self) -> Tensor:
        padded_RT = torch.cat([self.ids_RT, self.ids_RT.new_zeros(len(self.ids_RT), 1)], dim=1)
        return self.model.score_targets(padded_RT, self.prefix)[:, -1]

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self.prefix = self.prefix.rows(parent_R)
        self.ids_RT = torch.cat([self.ids_RT[parent_R], ids_R[:, None]], dim=1)
        return self.first()


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(beams=3), Decoding(samples=2)])
def test_decoding_from_the_cache_writes_the_same(
    folder: Path, tokenizer: Tokenizer, decoding: Decoding
) -> None:
    model = generator(folder).eval()
    batch = study(tokenizer, model)
    decoding = dataclasses.replace(decoding, max_tokens=8)
    settings: Any = {"max_tokens": 8, "end_id": 1, "pad_id": 0, "never": []}  # nothing is forbidden
    with torch.no_grad():
        expected = search(WithoutCache(model, batch), decoding, **settings)
        generated = search(model.writer(model.read(batch), 0), decoding, **settings)
        alone = search(model.writer(model.read(batch.rows([0])), 0), decoding, **settings)
    assert torch.equal(generated.ids_BT, expected.ids_BT)
    torch.testing.assert_close(generated.score_B, expected.score_B, rtol=1e-3, atol=1e-3)
    if not decoding.samples:  # samples depend on the place in the batch
        length = int(alone.mask_BT.sum())
        assert torch.equal(generated.ids_BT[0, :length], alone.ids_BT[0, :length])


@pytest.mark.parametrize("trained", ["projector", "lora", "all"])
def test_what_is_trained(folder: Path, tokenizer: Tokenizer, trained: str) -> None:
    model = generator(folder, trained=trained).train()
    model(study(tokenizer, model)).total.backward()
    changed = {name for name, each in model.named_parameters() if each.grad is not None}
    assert not any(name.startswith("image_encoder") for name in changed)
    language = {name for name in changed if name.startswith("language")}
    if trained == "projector":
        assert language == set()
    if trained == "lora":
        assert language
        assert all(".lora_" in name for name in language)
        layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in language}
        assert layers == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        }
    assert any(name.startswith("projector") for name in changed)


def test_a_checkpoint_needs_no_folder(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = generator(folder, tokenizer, projector="mlp4x", prompt=("indication",)).eval()
    assert len([each for each in model.projector if isinstance(each, torch.nn.Linear)]) == 4
    save(model, tmp_path)
    assert str(folder) not in (tmp_path / "config.json").read_text()
    again = medvl.load(tmp_path)
    batch = study(tokenizer, model)
    torch.testing.assert_close(again(batch).total, model(batch).total)
    plain = make_batch(tokenizer, 2)
    texts = again.write_reports(plain, decoding=Decoding(max_tokens=5))
    assert len(texts.ids_BT) == 2
    prompt = again.inputs.prompt
    assert prompt is not None
    short, long = prompt({}, None), prompt({"indication": "heart"}, None)
    assert short[0] == again.image_token_id
    assert len(long) > len(short)
    assert long[-len(short) + 1 :] == short[1:]  # the instruction is at the end


def test_it_trains_on_rewards(folder: Path, tokenizer: Tokenizer) -> None:
    model = generator(folder, tokenizer, rewards=RewardConfig(weights={"ngrams": 1.0})).train()
    batch = make_batch(tokenizer, 3, has_image_B=flags(1, 0, 1))
    assert float(model.loss_counts(batch)) == 2
    model(batch).total.backward()
    assert any(each.grad is not None for each in model.language.parameters())


def test_errors(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with raises(ConfigError, "missing", "language_weights"):
        medvl.create_model("causal_lm", **IMAGE)
    with raises(ConfigError, "unknown_name", "projector"):
        CausalLMConfig(projector="mlp3x")  # type-checked settings come from files too
    settings = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "gpt2"}))
    with raises(ConfigError, "unsupported", "language_weights"):
        generator(other)
    model = generator(folder)
    batch = study(tokenizer, model)
    for marker in (5, 0):
        wrong = batch.prompt_ids_BT.masked_fill(batch.prompt_ids_BT == model.image_token_id, marker)
        with raises(ConfigError, "mismatch", "prompt_ids_BT"):
            model.read(dataclasses.replace(batch, prompt_ids_BT=wrong))
    (other / "config.json").write_text(json.dumps(settings))
    with raises(WeightsError, "not_found", "language_weights"):
        generator(other)
