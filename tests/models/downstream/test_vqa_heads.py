"""Every answer head on every fusion-encoder: gradients, answers and checkpoints."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, TINY, make_batch, shaken, tiny_model
from helpers.learning import fit
from helpers.vqa_corpora import write_rad_shards

import medvl
from medvl.data.loading.loader import open_loader
from medvl.data.loading.studies import QuestionSource
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import (
    AnswerEval,
    RunOptions,
    answer_questions,
    normalize_answer,
    read_answer_vocabulary,
    read_results,
    run_evaluation,
)
from medvl.eval.vqa.evaluation import QuestionAnswering
from medvl.models import VQA, create_vqa, save
from medvl.models.downstream.vqa.decoder import HEADS, DecoderConfig, Head, VQAConfig
from medvl.models.downstream.vqa.model import AnswerPredictions, DecoderHead
from medvl.models.fusion_encoders.streams import DualStreamConfig
from medvl.schema import Batch

ANSWERS = ("yes", "no", "left effusion", "right lower lobe")
DECODER = DecoderConfig(layers=2, heads=2, intermediate=64, dropout=0.0, max_tokens=16)
DECODERS: tuple[Head, ...] = ("ranking", "generation")
PAIRS = [
    (name, head)
    for name in sorted(TINY)
    for head in HEADS
    if head != "product" or name == "medvill"
]
EACH_ONCE = [
    *((name, DECODERS[number % 2]) for number, name in enumerate(sorted(TINY))),
    *(("m3ae", "classifier"), ("berthop", "classifier"), ("medvill", "product")),
]
"""Every system and every head: what one does to rows and padding does not depend on the other."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece([*TEXTS, *ANSWERS], vocab_size=200, min_frequency=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rad_shards(tmp_path_factory.mktemp("vqa"))


def vqa_model(
    name: str, head: Head, tokenizer: Tokenizer, answers: tuple[str, ...] = ANSWERS, **settings: Any
) -> VQA:
    return VQA.on(tiny_model(name, tokenizer, **settings), answers, head=head, decoder=DECODER)


def answered_batch(tokenizer: Tokenizer, size: int = 6) -> Batch:
    """Return questions of which number i has answer i modulo four; equal texts have equal
    answers.
    """
    target_BV = torch.eye(len(ANSWERS)).repeat(2, 1)[:size]
    return make_batch(tokenizer, size, labels_BL=target_BV.masked_fill(target_BV == 0, torch.nan))


def test_heads_are_listed_and_unknown_ones_rejected() -> None:
    assert get_args(Head) == HEADS
    with raises(ConfigError, "unknown_name", "head"):
        VQAConfig(fusion="m3ae", answers=ANSWERS, head=cast(Any, "guess"))


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_trainable_parameters_get_gradients_and_the_rest_is_frozen(
    name: str, head: Head, tokenizer: Tokenizer
) -> None:
    """The loss starts at its expectation."""
    model = vqa_model(name, head, tokenizer)
    loss = model(answered_batch(tokenizer, 4))
    if head in DECODERS:
        words = sum(int(tokenizer([answer])[1].sum()) - 1 for answer in ANSWERS)
        expected = words / 4 * math.log(tokenizer.vocab_size)
    else:
        expected = len(ANSWERS) * math.log(2)
    assert loss.total.item() == pytest.approx(expected, rel=0.2)
    loss.total.backward()
    still = [
        key
        for key, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert [key for key in still if "position" not in key and "embeddings" not in key] == []
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert not [key for key in frozen if key.startswith("answer_head")]
    poolers = {key for key, _ in model.named_parameters() if "pooler." in key}
    assert poolers <= frozen if head != "classifier" else not poolers & frozen


@pytest.mark.parametrize(("name", "head"), [("m3ae", "classifier"), ("medvill", "product")])
def test_classifiers_are_initialised_as_published(
    name: str, head: Head, tokenizer: Tokenizer
) -> None:
    """M3AE and MedViLL draw new weights from N(0, 0.02)."""
    answers = tuple(f"answer {number}" for number in range(200))
    modules = vqa_model(name, head, tokenizer, answers).answer_head.modules()
    layers = [layer for layer in modules if isinstance(layer, torch.nn.Linear)]
    assert layers
    for layer in layers:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.any()


@pytest.mark.training
@pytest.mark.parametrize(
    ("name", "head"),
    [("m2i2", "ranking"), ("mumc", "ranking"), ("dual_stream", "ranking"), ("medvill", "product")],
)
def test_head_overfits_a_few_questions(name: str, head: Head, tokenizer: Tokenizer) -> None:
    """From weights that already tell the questions apart, without dropout."""
    model, batch = (
        shaken(vqa_model(name, head, tokenizer), 0.1).eval(),
        answered_batch(tokenizer, 4),
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)

    def given() -> list[list[str]]:
        said = [model.predict(batch)]
        if isinstance(model.answer_head, DecoderHead):
            said.append(model.answer_head.write(model.fusion_model.features(batch)))
        return [prediction.answers for prediction in said]

    for _ in range(6):  # most need a third of it
        fit(model, batch, optimizer, 10)
        if all(answers == list(ANSWERS) for answers in given()):
            break
    assert model.answer_logits(batch).argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert all(answers == list(ANSWERS) for answers in given())


@pytest.mark.parametrize(("name", "head"), EACH_ONCE)
def test_padding_and_other_samples_do_not_change_answers(
    name: str, head: Head, tokenizer: Tokenizer
) -> None:
    model = shaken(vqa_model(name, head, tokenizer)).eval()
    batch = make_batch(tokenizer, 4)
    with torch.no_grad():
        expected, scores_BV = model.predict(batch), model.answer_logits(batch)
        reordered = model.predict(_rows(batch, [2, 0, 3, 1]))
        alone = [_rows(batch, [row], int(batch.mask_BT[row].sum())) for row in range(4)]
        single, scores = (
            [model.predict(one) for one in alone],
            torch.cat([model.answer_logits(one) for one in alone]),
        )
    assert reordered.answers == [expected.answers[row] for row in (2, 0, 3, 1)]
    assert [prediction.answers[0] for prediction in single] == expected.answers
    torch.testing.assert_close(scores, scores_BV, rtol=1e-4, atol=2e-3)


def _rows(batch: Batch, rows: list[int], tokens: int | None = None) -> Batch:
    index = torch.tensor(rows)
    return dataclasses.replace(
        batch,
        keys=[batch.keys[row] for row in rows],
        image_BCHW=batch.image_BCHW[index],
        ids_BT=batch.ids_BT[index, :tokens],
        mask_BT=batch.mask_BT[index, :tokens],
        labels_BL=batch.labels_BL[index],
        texts=[batch.texts[row] for row in rows],
    )


@pytest.mark.parametrize("head", HEADS)
def test_loaded_checkpoint_gives_the_same_answers(
    head: Head, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = shaken(vqa_model("medvill", head, tokenizer)).eval()
    save(model, tmp_path)
    loaded = medvl.load(tmp_path)
    assert isinstance(loaded, VQA)
    assert loaded.config == model.config
    batch = make_batch(tokenizer)
    with torch.no_grad():
        predictions, loaded_predictions = model.predict(batch), loaded.predict(batch)
    assert predictions.answers == loaded_predictions.answers
    torch.testing.assert_close(predictions.score_B, loaded_predictions.score_B, rtol=0, atol=0)
    assert loaded.answer(batch.image_BCHW, TEXTS[:2] * 3) == model.answer(
        batch.image_BCHW, TEXTS[:2] * 3
    )
    start = {"fusion": DualStreamConfig(), "decoder": DECODER}
    other = create_vqa(tmp_path, ("a", "b", "c"), head="ranking", **start)  # replaces any head
    assert (other.config.head, len(other.answer_logits(batch)[0])) == ("ranking", 3)


def test_decoder_starts_from_a_dual_encoder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    dual = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=64,
        frozen_text_layers=0, projection_dim=8, tokenizer=tokenizer,
    )  # fmt: skip
    save(dual, tmp_path)
    sizes = DualStreamConfig(
        image_arguments={}, width=192, layers=1, heads=2, intermediate=48, image_positions=True
    )
    model = create_vqa(tmp_path, ANSWERS, fusion=sizes, head="generation", decoder=DECODER)
    table: Any = model.fusion_model.text_encoder.backbone.embeddings.word_embeddings
    decoder: Any = model.answer_head.decoder
    assert torch.equal(decoder.words.weight, table.weight), (
        "the decoder starts from the words that ConVIRT has learnt"
    )


# MedViLL's head


def test_product_uses_the_tokens_around_the_image(tokenizer: Tokenizer) -> None:
    model = shaken(vqa_model("medvill", "product", tokenizer)).eval()
    fusion, batch = model.fusion_model, make_batch(tokenizer, 3)
    inner, _, outer = model.answer_head
    with torch.no_grad():
        logits_BV = model.answer_logits(batch)
        for row in range(3):
            one = _rows(batch, [row])
            image, text = (
                fusion.image_tokens(one.image_BCHW),
                fusion.text_tokens(one.ids_BT, one.mask_BT),
            )
            fused = fusion.fuse(text, image)
            cells = image.states_BND.shape[1]
            sequence_SD = torch.cat([fused.image.states_BND, fused.text.states_BND], dim=1)[
                0
            ]  # CLS cells SEP text SEP
            product_D = sequence_SD[0] * sequence_SD[1 + cells]
            expected = (product_D @ inner.weight.T + inner.bias).clamp(
                min=0
            ) @ outer.weight.T + outer.bias
            torch.testing.assert_close(logits_BV[row], expected, rtol=1e-4, atol=1e-4)
    assert inner.weight.shape == (64, 32)


def test_product_head_can_give_the_first_answer(tokenizer: Tokenizer) -> None:
    """The released code trains answer 0 but never gives it."""
    model = vqa_model("medvill", "product", tokenizer).eval()
    with torch.no_grad():
        last: Any = model.answer_head[-1]
        last.bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    assert model.predict(make_batch(tokenizer)).answers == ["yes"] * 6


def test_product_head_rejects_other_systems(tokenizer: Tokenizer) -> None:
    with raises(ConfigError, "unsupported", "head", names="m3ae"):
        vqa_model("m3ae", "product", tokenizer)


# Evaluation


def loader_of(folder: Path, model: VQA) -> Any:
    source = QuestionSource(ShardSource(folder), "test", model.config.answers, normalize_answer)
    text = WholeText(sections=("question",))
    return open_loader(
        source, batch=4, image=model.transform, text=text, tokenizer=model.tokenizer, train=False
    )


@pytest.mark.parametrize("head", DECODERS)
def test_evaluation_accepts_every_head(
    head: Head, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    answers = read_answer_vocabulary(folder).answers
    assert "no" not in answers, "an answer of the test questions has come into the vocabulary"
    model = vqa_model("dual_stream", head, tokenizer, answers)
    loader = loader_of(folder, model)
    numbers = AnswerEval(loader)(model)
    assert set(numbers) == {"vqa/accuracy", "vqa/closed", "vqa/open"}
    assert model.training
    said = answer_questions(model, loader)
    assert sorted(said) == ["7", "8"]
    if head == "ranking":
        assert {prediction.answer for prediction in said.values()} <= set(answers)
    assert all(0 <= (prediction.score or 0) <= 1 for prediction in said.values())
    save(model, tmp_path)
    shared = RunOptions(out=tmp_path / "out", resamples=10, workers=0, device="cpu")
    run_evaluation(QuestionAnswering(data=folder, checkpoint=tmp_path), shared)
    assert (
        read_results(tmp_path / "out").row("accuracy", "overall").value == numbers["vqa/accuracy"]
    )


def test_written_answer_outside_the_vocabulary_can_be_right(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vqa_model("dual_stream", "generation", tokenizer, ("yes", "2"))
    loader = loader_of(folder, model)
    monkeypatch.setattr(
        model,
        "predict",
        lambda batch: AnswerPredictions(["Right lung"] * len(batch), torch.ones(len(batch))),
    )
    assert AnswerEval(loader)(model)["vqa/open"] == 1.0


@pytest.mark.parametrize("head", ["classifier", *DECODERS])
def test_nan_scores_are_rejected(head: Head, folder: Path, tokenizer: Tokenizer) -> None:
    model = vqa_model("dual_stream", head, tokenizer)
    with torch.no_grad():
        for parameter in model.answer_head.parameters():
            parameter.fill_(torch.nan)
    loader = loader_of(folder, model)
    with pytest.raises(EvaluationError, match="NaN"):
        answer_questions(model, loader)
