"""VQA: the question source, the model on any fusion-encoder, and accuracy during training."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, TINY, make_batch, tiny_model, tiny_tokenizer
from helpers.shard_plans import OPTIONS, make_plan
from helpers.vqa_corpora import write_rad_shards

import medvl
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import open_loader
from medvl.data.loading.studies import QuestionSource
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, CorpusError, EvaluationError
from medvl.eval import (
    AnswerEval,
    answer_questions,
    evaluate_answers,
    normalize_answer,
    read_answer_vocabulary,
)
from medvl.eval.vqa.predictions import question_data
from medvl.models import VQA, create_vqa, save
from medvl.models.downstream.vqa.decoder import VQAConfig
from medvl.models.fusion_encoders.streams import DualStreamConfig
from medvl.train.tasks.supervised import VQADataConfig, open_vqa

ANSWERS = ("yes", "no", "2", "right lung")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rad_shards(tmp_path_factory.mktemp("vqa"))


def tiny_vqa(answers: tuple[str, ...] = ANSWERS) -> VQA:
    fusion = tiny_model("dual_stream", tiny_tokenizer())
    return VQA.on(fusion, answers)


def source_of(folder: Path, split: str, answers: tuple[str, ...] = ANSWERS) -> QuestionSource:
    return QuestionSource(ShardSource(folder), split, answers, normalize_answer)


def loader_of(source: QuestionSource, model: VQA, **changes: Any) -> Any:
    settings = {
        "batch": 4,
        "image": model.transform,
        "text": WholeText(sections=("question",)),
        "train": False,
    }
    return open_loader(source, tokenizer=model.tokenizer, **{**settings, **changes})


def test_source_yields_one_sample_per_question(folder: Path) -> None:
    train, test = source_of(folder, "train"), source_of(folder, "test")
    assert (len(train), len(test)) == (6, 2)
    samples = [test.sample(place) for place in range(2)]
    assert [sample.sections for sample in samples] == [
        {"question": "Is there fluid?"},
        {"question": "Where is the mass?"},
    ]
    assert [dict(sample.labels) for sample in samples] == [{"no": 1}, {"right lung": 1}]
    assert len({sample.key for sample in samples}) == 2
    assert len({sample.patient for sample in samples}) == 1
    np.testing.assert_array_equal(test.pixels(0), test.source.pixels(test.questions[0].image))
    assert train.fingerprint != test.fingerprint


def test_question_with_an_unknown_answer_stays_without_a_label(folder: Path) -> None:
    source = source_of(folder, "test", ("yes", "2"))
    assert [dict(source.sample(place).labels) for place in range(len(source))] == [{}, {}]


def test_split_without_questions_is_rejected(folder: Path) -> None:
    with pytest.raises(
        CorpusError, match="no question has the split 'validate'; found test, train"
    ):
        source_of(folder, "validate")


def test_shared_images_do_not_change_answers(folder: Path) -> None:
    model, source = tiny_vqa().eval(), source_of(folder, "train")
    (batch,) = loader_of(source, model, batch=8)
    images = len(set(source.image_keys))
    assert images < len(source)
    assert batch.image_of_B is not None
    assert len(batch.image_BCHW) == images
    alone = list(loader_of(source, model, batch=1))
    assert all(one.image_of_B is None for one in alone)
    for row, one in enumerate(alone):
        torch.testing.assert_close(batch.image_BCHW[batch.image_of_B[row]], one.image_BCHW[0])
    with torch.no_grad():
        together_BV = model.answer_logits(batch)
        alone_BV = torch.cat([model.answer_logits(one) for one in alone])
    torch.testing.assert_close(together_BV, alone_BV, rtol=1e-4, atol=1e-5)


def test_image_is_read_once_for_consecutive_questions(folder: Path, monkeypatch: Any) -> None:
    source, read = source_of(folder, "train"), []
    stored = source.image_bytes
    monkeypatch.setattr(source, "image_bytes", lambda *place: read.append(place) or stored(*place))
    list(loader_of(source, tiny_vqa(), batch=8))
    assert len(read) == len(set(source.image_keys))


@pytest.mark.parametrize("together", [2, 3])
def test_training_keeps_all_questions_of_an_image_together(folder: Path, together: int) -> None:
    source = source_of(folder, "train")
    image_of = {source.key(place): source.image_keys[place] for place in range(len(source))}
    crop = ConVIRTAugmentation.weak(32)
    loader = loader_of(source, tiny_vqa(), batch=1, train=True, image=crop, together=together)
    epochs = [[batch.keys[0] for batch in loader] for _ in range(4)]
    for keys in epochs:
        assert sorted(keys) == sorted(image_of)
        runs = [image_of[key] for key in keys]
        for image in set(runs):
            places = [place for place, name in enumerate(runs) if name == image]
            for start in range(0, len(places), together):
                group = places[start : start + together]
                assert group == list(range(group[0], group[0] + len(group)))
    assert len({tuple(keys) for keys in epochs}) > 1
    (batch,) = loader_of(source, tiny_vqa(), batch=6, train=True, image=crop, together=together)
    assert len(batch.image_BCHW) < 6
    (apart,) = loader_of(source, tiny_vqa(), batch=6, train=True, image=crop)
    assert apart.image_of_B is None


def test_loader_state_with_another_together_is_rejected(folder: Path) -> None:
    source = source_of(folder, "train")
    loader = loader_of(source, tiny_vqa(), batch=2, train=True, together=2)
    with pytest.raises(ConfigError, match="another together"):
        loader_of(source, tiny_vqa(), batch=2, train=True).load_state_dict(loader.state_dict())


def test_together_needs_a_source_with_shared_images(folder: Path) -> None:
    with pytest.raises(ConfigError, match="got 2"):
        loader_of(ShardSource(folder), tiny_vqa(), batch=2, train=True, together=2)


def test_loader_yields_questions_and_answers(folder: Path) -> None:
    model = tiny_vqa()
    (batch,) = loader_of(source_of(folder, "train"), model, batch=8, workers=1)
    row = batch.texts.index("Is the heart enlarged?")
    assert batch.labels_BL.shape == (6, len(ANSWERS))
    assert batch.labels_BL[row, 0] == 1
    assert batch.labels_BL[row, 1:].isnan().all()


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_fusion_encoder_answers_and_gets_gradients(name: str) -> None:
    tokenizer = tiny_tokenizer()
    model = VQA.on(tiny_model(name, tokenizer), ANSWERS)
    batch = make_batch(
        tokenizer, labels_BL=torch.eye(6, len(ANSWERS)).masked_fill(torch.eye(6, 4) == 0, torch.nan)
    )
    loss = model(batch)
    assert loss.total.item() == pytest.approx(len(ANSWERS) * np.log(2), rel=0.5)
    loss.total.backward()
    still = [
        key
        for key, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert [key for key in still if "position" not in key and "embeddings" not in key] == []
    frozen = [key for key, p in model.named_parameters() if not p.requires_grad]
    unread = {"medvill": "", "lxmert": "cross_layers.1.image_", "ptunifier": "_prompts."}.get(
        name, ".momentum."
    )
    assert all("head" in key or unread in key for key in frozen)


def test_padding_and_row_order_do_not_change_answers() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_vqa().eval()
    batch = make_batch(tokenizer)
    with torch.no_grad():
        logits_BV = model.answer_logits(batch)
        reordered = model.answer_logits(make_batch(tokenizer, texts=TEXTS))
        alone = [model.answer_logits(_row(batch, row)) for row in range(len(batch))]
    torch.testing.assert_close(reordered, logits_BV)
    torch.testing.assert_close(torch.cat(alone), logits_BV, rtol=1e-4, atol=1e-5)


def _row(batch: Any, row: int) -> Any:
    length = int(batch.mask_BT[row].sum())
    return type(batch)(
        keys=[batch.keys[row]],
        image_BCHW=batch.image_BCHW[row : row + 1],
        ids_BT=batch.ids_BT[row : row + 1, :length],
        mask_BT=batch.mask_BT[row : row + 1, :length],
        labels_BL=batch.labels_BL[row : row + 1],
        texts=[batch.texts[row]],
    )


def test_loaded_checkpoint_gives_the_same_answers(tmp_path: Path) -> None:
    model = tiny_vqa().eval()
    save(model, tmp_path)
    loaded = medvl.load(tmp_path)
    assert isinstance(loaded, VQA)
    assert loaded.config == model.config
    image_BCHW = make_batch(tiny_tokenizer()).image_BCHW[:2]
    questions = ["Is there fluid?", "Where is the mass?"]
    assert loaded.answer(image_BCHW, questions) == model.answer(image_BCHW, questions)
    assert set(loaded.answer(image_BCHW, questions)) <= set(ANSWERS)
    with raises(ConfigError, "mismatch", "questions"):
        loaded.answer(image_BCHW, questions[:1])


def test_create_vqa_starts_from_every_kind_of_checkpoint(tmp_path: Path) -> None:
    """The towers of a dual-encoder, a whole fusion-encoder, and a VQA model whose head is
    replaced.
    """
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    dual = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=64,
        frozen_text_layers=0, projection_dim=8, tokenizer=tokenizer,
    )  # fmt: skip
    sizes = DualStreamConfig(
        image_arguments={}, width=24, layers=2, heads=2, intermediate=48, image_positions=True
    )
    starts = {
        "dual": dual,
        "fusion": tiny_model("single_stream", tokenizer),
        "answers": tiny_vqa(("a", "b")),
    }
    for name, model in starts.items():
        (tmp_path / name).mkdir()
        save(model, tmp_path / name)
    models = {name: create_vqa(tmp_path / name, ANSWERS, fusion=sizes) for name in starts}
    image_BCHW = make_batch(tokenizer).image_BCHW
    with torch.no_grad():
        expected = dual.eval().image_encoder(image_BCHW).pooled_BD
        pooled = models["dual"].eval().fusion_model.image_encoder(image_BCHW).pooled_BD
    torch.testing.assert_close(pooled, expected)
    assert models["fusion"].fusion_model.name == "single_stream"
    assert models["answers"].config.answers == ANSWERS


def test_accuracy_is_measured_during_training(folder: Path) -> None:
    vocabulary = read_answer_vocabulary(folder)
    assert set(vocabulary.answers) == {"yes", "2", "right lung", "none"}
    model = tiny_vqa(vocabulary.answers)
    with torch.no_grad():  # always answers "right lung"
        model.answer_head[-1].weight.zero_()
        model.answer_head[-1].bias.copy_(
            torch.tensor([float(a == "right lung") for a in vocabulary.answers])
        )
    loader = loader_of(source_of(folder, "test", vocabulary.answers), model)
    assert AnswerEval(loader)(model) == {"vqa/accuracy": 0.5, "vqa/closed": 0.0, "vqa/open": 1.0}
    assert model.training
    said = answer_questions(model, loader)
    assert {prediction.answer for prediction in said.values()} == {"right lung"}
    result = evaluate_answers(question_data([ShardSource(folder)]), said, resamples=10)
    assert result.results.row("accuracy", "overall").value == 0.5


ANSWERS_OF = {"train": ("yes", "no"), "validate": ("2", "left"), "test": ("left", "right lung")}


def write_splits(home: Path, *splits: str) -> Path:
    """Write shards with a folder for each split; return their parent."""
    plan = make_plan(home / "images", 2 * len(splits))
    for number, record in enumerate(plan.records):
        split = splits[number // 2]
        answer = ANSWERS_OF[split][number % 2]
        question = {
            "id": f"q{number}",
            "question": "what?",
            "answer": answer,
            "answer_type": "open",
            "split": split,
        }
        sample = dataclasses.replace(record.sample, split=split, extra={"questions": [question]})
        plan.records[number] = dataclasses.replace(record, sample=sample)
    write_shards(plan, Deidentifier(bytes(32)), ShardRun(out=home / "shards", workers=1), OPTIONS)
    return home / "shards"


def test_vocabulary_has_the_answers_of_all_splits_of_its_protocol(
    folder: Path, tmp_path: Path
) -> None:
    shards = write_splits(tmp_path, "train", "validate", "test")
    assert read_answer_vocabulary(shards / "train").splits == ("train",)
    vocabulary = read_answer_vocabulary(shards / "train", "m3ae")
    assert vocabulary.answers == ("left", "2", "no", "right lung", "yes")
    assert vocabulary.splits == ("train", "validate", "test")
    rad = read_answer_vocabulary(folder, "m3ae")  # one folder, without a validate split
    assert rad.splits == ("train", "test")


def test_protocols_that_no_vocabulary_can_be_read_for_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    shards = write_splits(tmp_path, "train", "test")
    with raises(EvaluationError, "missing", "protocol", names="validate"):
        read_answer_vocabulary(shards / "train", "m3ae")
    with raises(EvaluationError, "unsupported", "protocol", names="llava_med"):
        read_answer_vocabulary(folder, "llava_med")
    loader = loader_of(source_of(folder, "test"), tiny_vqa())
    with raises(EvaluationError, "unsupported", "protocol", names="pubmedclip"):
        AnswerEval(loader, "pubmedclip")


def test_parameter_groups_have_three_learning_rates() -> None:
    model = tiny_vqa()
    rates = {
        group["name"].split(":")[0]: group["lr"] for group in model.parameter_groups(1e-5, 0.01)
    }
    assert rates["image_encoder"] == pytest.approx(1e-5)
    assert rates["fusion"] == pytest.approx(5e-5)
    assert rates["answer_head"] == pytest.approx(5e-4)


def test_training_data_is_opened_and_validated(folder: Path) -> None:
    model = tiny_vqa()
    image = EvalTransform(size=64)
    config = VQADataConfig(train=folder, valid=folder, valid_split="test", image=image, workers=0)
    opened = open_vqa(config, model, ANSWERS, normalize_answer, 3)
    assert opened.train.steps_per_epoch == 2
    assert opened.valid_images is not None
    assert sum(len(batch) for batch in opened.valid_images) == 2
    with raises(ConfigError, "not_found", "data.valid", names="nowhere\nmake it"):
        VQADataConfig(train=folder, valid=Path("nowhere"), image=image).check("make it")
    with raises(ConfigError, "conflict", "image.flip"):
        VQADataConfig(train=folder, valid=None, image=ConVIRTAugmentation(size=64))


@pytest.mark.parametrize("answers", [(), ("yes",), ("yes", "yes")])
def test_vocabulary_needs_two_different_answers(answers: tuple[str, ...]) -> None:
    with raises(ConfigError, "out_of_range", "answers"):
        VQAConfig(fusion="m3ae", answers=answers)


@pytest.mark.parametrize(
    ("head", "rate"),
    [("classifier", 50.0), ("product", 1.0), ("ranking", 1.0), ("generation", 1.0)],
)
def test_default_head_lr_mult_is_the_published_one(head: Any, rate: float) -> None:
    assert VQAConfig(fusion="medvill", answers=ANSWERS, head=head).effective_head_lr_mult == rate
    assert (
        VQAConfig(
            fusion="medvill", answers=ANSWERS, head=head, head_lr_mult=4.0
        ).effective_head_lr_mult
        == 4.0
    )
    with raises(ConfigError, "out_of_range", "head_lr_mult"):
        VQAConfig(fusion="medvill", answers=ANSWERS, head=head, head_lr_mult=0.0)


@pytest.mark.parametrize("name", ["dual_stream", "albef", "medvill", "vilt", "lxmert", "ptunifier"])
def test_earlier_images_are_further_tokens_with_a_time(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = VQA.on(tiny_model(name, tokenizer), ANSWERS, earlier_image=True).eval()
    assert model.inputs.prior_image
    times = model.fusion_model.image_times
    assert times is not None
    batch = make_batch(tokenizer, 4, labels_BL=torch.eye(4))
    prior_BCHW = batch.image_BCHW.roll(1, 0)
    there_B = torch.tensor([True, True, True, False])
    batch = dataclasses.replace(batch, prior_BCHW=prior_BCHW, has_prior_B=there_B)
    alone = model.fusion_model.image_tokens(batch.image_BCHW)
    tokens = model.fusion_model.images_of_rows(batch)
    count = alone.states_BND.shape[1]
    torch.testing.assert_close(
        tokens.states_BND[:, :count], alone.states_BND + times.vectors.weight[0]
    )
    earlier = model.fusion_model.image_tokens(prior_BCHW).states_BND
    torch.testing.assert_close(tokens.states_BND[:3, count:], earlier[:3] + times.vectors.weight[1])
    # logits depend on the earlier image, where there is one
    logits_BV = model.answer_logits(batch)
    other = model.answer_logits(dataclasses.replace(batch, prior_BCHW=255 - prior_BCHW))
    assert ((logits_BV - other).abs().amax(dim=1) > 1e-6).tolist() == there_B.tolist()
    model(batch).total.backward()
    assert times.vectors.weight.grad is not None
    assert times.vectors.weight.grad.any(dim=1).all()
    save(model, tmp_path)
    torch.testing.assert_close(medvl.load(tmp_path).answer_logits(batch), logits_BV)
    again = create_vqa(tmp_path, ANSWERS, fusion=DualStreamConfig())
    assert again.fusion_model.image_times is None
    with raises(ConfigError, "missing", "prior_BCHW"):
        model(dataclasses.replace(batch, prior_BCHW=None))
