"""Causal language models: logits against `transformers`, the cache against none, LoRA, and errors."""

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers.choice_shards import choice_shards
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, flags, make_batch
from helpers.vqa_corpora import write_rad_shards
from torch import Tensor

import medvl
from medvl.data.loading.studies import AnswerSource, question_texts, questions_in_split
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.models import CausalLM, CausalLMConfig, save
from medvl.models.checkpoint_folder import load_weights, read_weights
from medvl.models.report_generators.base import text_ids
from medvl.models.report_generators.parts.prefix import ADAPTED, assign_rows
from medvl.models.text_decoding import Decoding, search
from medvl.schema import Batch
from medvl.train import RewardConfig, RewardTask
from medvl.train.tasks.pretraining import DataConfig, open_data

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
    "lora_language": 2,
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


def test_without_images_the_prompt_alone_is_read(folder: Path, tokenizer: Tokenizer) -> None:
    model = generator(folder, tokenizer, views=0, prompt=("findings",)).eval()
    assert model.inputs.prompt is not None
    findings = ({"findings": TEXTS[0]}, {"findings": TEXTS[1]})
    prompts = [model.inputs.prompt(sections, None) for sections in findings]
    batch = make_batch(tokenizer, 2)
    batch.has_image_B = torch.zeros(2, dtype=torch.bool)
    batch.prompt_ids_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in prompts], batch_first=True
    )
    length_B1 = torch.tensor([[len(ids)] for ids in prompts])
    batch.prompt_mask_BT = torch.arange(batch.prompt_ids_BT.shape[1]) < length_B1
    assert model.trained_rows(batch).tolist() == [0, 1]
    loss = model(batch).total
    batch.image_BCHW = 255 - batch.image_BCHW
    assert torch.equal(model(batch).total, loss)
    words = model.language.get_input_embeddings()
    ids_T = torch.tensor([n for n in prompts[0] if n != model.image_token_id])
    torch.testing.assert_close(
        model.read(batch).states_BND[0, -len(ids_T) :], words(ids_T), rtol=0, atol=0
    )
    model.train()(batch).total.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with raises(ConfigError, "conflict", "views"):
        CausalLMConfig(views=0)


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


TRAINED: dict[str, dict[str, Any]] = {
    "projector": {"frozen_language": True, "lora_language": 0},
    "lora": {},
    "all": {"lora_language": 0},
}


@pytest.mark.parametrize("trained", [*TRAINED])
def test_what_is_trained(folder: Path, tokenizer: Tokenizer, trained: str) -> None:
    model = generator(folder, **TRAINED[trained]).train()
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
        assert layers == set(ADAPTED)
    if trained == "all":
        assert any(name.endswith("q_proj.weight") for name in language)
    assert any(name.startswith("projector") for name in changed)


@pytest.mark.parametrize("limit", [1, 150, 10_000])
def test_packed_samples_have_the_same_loss_and_gradient(
    folder: Path, tokenizer: Tokenizer, limit: int
) -> None:
    """Whether each has a row of its own, some share one, or all do."""
    results = []
    for packed in (0, limit):
        model = generator(folder, packed_tokens=packed, lora_language=0)
        loss = model(study(tokenizer, model)).total
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        results.append((loss.detach(), *gradients))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_packed_texts() -> None:
    assert assign_rows([3, 9, 4, 2, 5], 7) == [[1], [4, 3], [2, 0]]
    assert assign_rows([], 7) == []


def perturbed(model: CausalLM) -> CausalLM:
    """Give low-rank updates values as after a training."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name or name.startswith("projector"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_a_checkpoint_of_updates_needs_its_folder(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    base = tmp_path / "language"
    shutil.copytree(folder, base)
    for name in ("updates", "whole"):
        (tmp_path / name).mkdir()
    model = perturbed(generator(base, tokenizer, store_language=False)).eval()
    batch = study(tokenizer, model)
    expected = model(batch).total
    save(model, tmp_path / "updates")
    stored = safetensors.torch.load_file(tmp_path / "updates" / "model.safetensors")
    language = [name for name in stored if name.startswith("language.")]
    assert language
    assert all(".lora_" in name for name in language)
    again = medvl.load(tmp_path / "updates")
    torch.testing.assert_close(again(batch).total, expected, rtol=1e-4, atol=1e-5)
    save(again, tmp_path / "whole")  # merged and complete, so it needs no folder
    resumed = generator(base, tokenizer, store_language=False).eval()
    load_weights(resumed, tmp_path / "updates")
    torch.testing.assert_close(resumed(batch).total, expected)
    start = tmp_path / "updates"
    further = generator(base, tokenizer, store_language=False, init_from=start).eval()
    torch.testing.assert_close(further(batch).total, expected)
    assert any(each.requires_grad for each in further.language.parameters())
    with raises(CheckpointError, "mismatch", "language_weights"):
        generator(base, tokenizer, init_from=start)
    stage = generator(base, tokenizer, frozen_language=True, lora_language=0, store_language=False)
    (tmp_path / "stage").mkdir()
    save(stage, tmp_path / "stage")  # the projector alone: the next stage adds updates
    second = generator(base, tokenizer, store_language=False, init_from=tmp_path / "stage").eval()
    torch.testing.assert_close(second(batch).total, stage.eval()(batch).total)
    with raises(CheckpointError, "mismatch"):  # updates have nothing to be merged with
        read_weights(start)
    weights = safetensors.torch.load_file(base / "model.safetensors")
    weights["lm_head.weight"] += 1
    safetensors.torch.save_file(weights, base / "model.safetensors", {"format": "pt"})
    with raises(CheckpointError, "mismatch"):
        medvl.load(tmp_path / "updates")
    shutil.rmtree(base)
    with raises(CheckpointError, "not_found"):
        medvl.load(tmp_path / "updates")
    whole = medvl.load(tmp_path / "whole")
    torch.testing.assert_close(whole(batch).total, expected, rtol=1e-4, atol=1e-5)


def test_a_model_with_one_table_of_words_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True}
    settings.pop("vocab_size")  # that of the tokenizer
    torch.manual_seed(0)
    model = medvl.create_model(
        "causal_lm", tokenizer=tokenizer, language=json.dumps(settings), **IMAGE
    )
    model.eval()
    save(model, tmp_path)
    batch = make_batch(tokenizer, 2)
    torch.testing.assert_close(medvl.load(tmp_path)(batch).total, model(batch).total)
    assert isinstance(model, CausalLM)
    assert model.language.config.vocab_size == tokenizer.vocab_size


def test_images_of_a_study_stand_in_place_of_the_marker(folder: Path, tokenizer: Tokenizer) -> None:
    """The prior, the image and its other views; a row without them is as without the setting."""
    model = generator(folder, views=3, prior=True).eval()
    alone = generator(folder).eval()
    batch = study(tokenizer, model)
    pixels = batch.image_BCHW
    other, prior, third = pixels.roll(1, 0), pixels.roll(2, 0), pixels.flip(3)
    whole = dataclasses.replace(
        batch,
        # one more view than the model reads
        other_views_BVCHW=torch.stack([other, third, third], dim=1),
        has_other_view_BV=flags(1, 0, 0, 0, 0, 0, 1, 1, 1).view(3, 3),
        prior_BCHW=prior,
        has_prior_B=flags(0, 0, 1),
    )
    prefix = model.read(whole)
    counts = prefix.real_BN().sum(dim=1) - alone.read(batch).real_BN().sum(dim=1)
    assert counts.tolist() == [16, 0, 48]
    tokens = [
        alone.read(dataclasses.replace(batch, image_BCHW=each))
        for each in (prior, pixels, other, third)
    ]
    rows = [each.states_BND[2][each.real_BN()[2]] for each in tokens]  # the marker alone
    torch.testing.assert_close(prefix.states_BND[2][prefix.real_BN()[2]], torch.cat(rows))


def test_questions_and_options(folder: Path, tokenizer: Tokenizer) -> None:
    model = generator(folder, tokenizer).eval().requires_grad_(False)
    images = make_batch(tokenizer, 2).image_BCHW
    questions = ["left effusion", "heart"]
    options = [["no effusion", "heart", "small left effusion"], ["heart"]]
    sums = model.score_options(images, questions, options, length="sum")
    means = model.score_options(images, questions, options)
    assert [len(each) for each in sums] == [3, 1]
    prompt = model.inputs.prompt
    assert prompt is not None
    for row, question in enumerate(questions):
        ids = torch.tensor([prompt({"question": question}, None)])
        batch = dataclasses.replace(
            make_batch(tokenizer, 2).rows([row]), prompt_ids_BT=ids, prompt_mask_BT=ids > -1
        )
        for place, option in enumerate(options[row]):
            batch.ids_BT, batch.mask_BT = model.tokenize([option])
            count = int(batch.mask_BT.sum())
            expected = -float(model(batch).total) * count
            assert float(sums[row][place]) == pytest.approx(expected, rel=1e-4)
            assert float(means[row][place]) == pytest.approx(expected / count, rel=1e-4)
    written = model.answer(images, questions, decoding=Decoding(max_tokens=4))
    alone = model.answer(images[1:], questions[1:], decoding=Decoding(max_tokens=4))
    assert written[1:] == alone
    assert model.score_options(images, questions, [[], []])[1].shape == (0,)
    with raises(ConfigError, "mismatch", "options"):
        model.score_options(images, questions, [["heart"]])
    with raises(ConfigError, "mismatch", "questions"):
        model.answer(images, ["heart"])


def test_questions_of_shards_are_samples_with_their_answers(tmp_path: Path) -> None:
    """A row's prompt has its question, its text is the answer, and images are shared."""
    folder = write_rad_shards(tmp_path)
    source = AnswerSource(ShardSource(folder), "train")
    texts = [" ".join(source.sample(place).sections.values()) for place in range(len(source))]
    language = json.dumps({**SIZES, "model_type": "llama", "vocab_size": 200})
    model = medvl.create_model(
        "causal_lm", tokenizer=train_words(texts, min_frequency=1), language=language, **IMAGE
    )
    assert isinstance(model, CausalLM)
    data = DataConfig(
        train=str(folder), valid=None, workers=0, questions=True,
        image=model.transform, text=WholeText(sections=("answer",)),
    )  # fmt: skip
    batch = next(iter(open_data(data, model, 2).train))
    assert model.tokenizer is not None
    prompt = model.inputs.prompt
    assert prompt is not None
    answers = {source.key(place): source.sample(place).sections for place in range(len(source))}
    for row, key in enumerate(batch.keys):
        sections = answers[key]
        assert batch.texts[row] == sections["answer"]
        ids = batch.prompt_ids_BT[row][batch.prompt_mask_BT[row]].tolist()
        assert ids == list(prompt({"question": sections["question"]}, None))
    alone = model(batch.rows([0])).total
    assert torch.isfinite(alone)
    shared = dataclasses.replace(batch.rows([0, 0]), image_of_B=torch.tensor([0, 0]))
    shared = dataclasses.replace(shared, image_BCHW=shared.image_BCHW[:1])
    torch.testing.assert_close(model.eval()(shared).total, model(batch.rows([0])).total)
    for wrong in ({"paired_fraction": 0.5}, {"train": "tars-{000..001}.tar"}):
        with raises(ConfigError, "conflict", "questions"):
            dataclasses.replace(data, **wrong)


def test_letters_are_answers_in_every_order_of_the_options() -> None:
    """Every letter is right once for each question, and the prompt is that of the evaluation."""
    source = ShardSource(choice_shards() / "train")
    asked = AnswerSource(source, "train", letters=True)
    texts = [*question_texts(source)]
    assert len(asked) == 4 * len(AnswerSource(source, "train")) - 4  # one has no options
    assert len({asked.key(place) for place in range(len(asked))}) == len(asked.image_keys)
    whole = {question.id: question for _, question in questions_in_split(source, "train")}
    letters = Counter[tuple[str, str]]()
    for place, (image, question) in enumerate(asked.questions):
        sections = asked.sample(place).sections
        published = whole[question.id.split("/")[0]]
        assert sections["question"] == question.with_letters()
        assert f" {sections['answer']}. {published.answer}" in sections["question"]
        assert asked.image_keys[place] == source.key(image)
        letters[published.id, sections["answer"]] += 1
    assert {*letters.values()} == {1}
    assert {letter for _, letter in letters} == {*"ABCD"}
    assert published.with_letters() in texts
    assert published.answer in texts
    with raises(ConfigError, "conflict", "letters"):
        DataConfig(
            train="a", valid=None, image=EvalTransform(size=32), text=WholeText(), letters=True
        )


def test_the_closing_token_is_learned_and_no_first_one(folder: Path, tokenizer: Tokenizer) -> None:
    """The words' first and last token are one id, which would end each text at its start."""
    model = generator(folder, tokenizer)
    assert model.tokenizer is not None
    ids_BT, _ = model.tokenizer(["heart"])
    assert ids_BT.tolist() == [[*text_ids(tokenizer, "heart"), tokenizer.sep_id]]
    forbidden = model.never_written()
    assert set(range(tokenizer.vocab_size, SIZES["vocab_size"])) <= set(forbidden)
    assert tokenizer.sep_id not in forbidden


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
    asked = prompt({"question": "heart", "indication": "heart"}, None)
    assert asked[: len(long) - len(short) + 1] == long[: -len(short) + 1]
    assert asked[-len(short) + 1 :] != short[1:]  # the question stands in its place


def test_it_trains_on_rewards(folder: Path, tokenizer: Tokenizer) -> None:
    model = generator(folder, tokenizer).train()
    task = RewardTask(RewardConfig(weights={"ngrams": 1.0}), model)
    batch, counts_K = task.sample(make_batch(tokenizer, 3, has_image_B=flags(1, 0, 1)), 0)
    assert counts_K[0] == 2
    model(batch, task.losses).total.backward()
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
    for wrong in (
        {"frozen_language": True},
        {"store_language": False, "lora_language": 0, "language_weights": "folder"},
    ):
        with raises(ConfigError, "conflict"):
            CausalLMConfig(**wrong)
    with raises(ConfigError, "missing", "language_weights"):
        CausalLMConfig(store_language=False)
    with raises(ConfigError, "unsupported", "language"):
        medvl.create_model("causal_lm", language='{"model_type": "gpt2"}', **IMAGE)
    model = generator(folder)
    batch = study(tokenizer, model)
    for marker in (5, 0):
        ids_BT = batch.prompt_ids_BT.masked_fill(
            batch.prompt_ids_BT == model.image_token_id, marker
        )
        with raises(ConfigError, "mismatch", "prompt_ids_BT"):
            model.read(dataclasses.replace(batch, prompt_ids_BT=ids_BT))
    (other / "config.json").write_text(json.dumps(settings))
    with raises(WeightsError, "not_found", "language_weights"):
        generator(other)
