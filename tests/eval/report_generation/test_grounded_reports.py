"""Reports with boxes: MAIRA-2's format, PadChest-GR's sentences, and scores without a language
model.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

import medvl
from medvl.cli import main as cli
from medvl.data import ConVIRTAugmentation, EvalTransform, GroundedText
from medvl.data.grounded import (
    GroundedReport,
    GroundedSentence,
    boxes_in_square,
    grounded_text,
    read_grounded,
    write_grounded,
)
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.files import byte_characters
from medvl.data.tokenizer.tokenizer import train_words
from medvl.errors import ConfigError
from medvl.eval import read_results
from medvl.eval.core.metric_rows import measure
from medvl.eval.report_generation.grounded import grounded_metrics
from medvl.models import save
from medvl.schema import Sample
from medvl.train.tasks.pretraining import DataConfig, open_data

BOX = (0.525, 0.605, 0.805, 0.885)
TEXT = (
    "<obj>There is a left effusion.<box><x52><y60><x80><y88></box></obj><obj>No pneumothorax.</obj>"
)


def test_a_report_is_read_and_written() -> None:
    report = read_grounded(TEXT)
    assert [sentence.text for sentence in report.sentences] == [
        "There is a left effusion.",
        "No pneumothorax.",
    ]
    assert report.sentences[0].boxes == (pytest.approx(BOX),)  # the middle of each hundredth
    assert (report.dropped_boxes, report.outside) == (0, 0)
    assert report.text == "There is a left effusion. No pneumothorax."
    assert write_grounded(report.sentences) == TEXT
    two = GroundedSentence("Masses.", (BOX, (0.0, 0.0, 1.0, 1.0)))
    assert "<box><x0><y0><x99><y99></box></obj>" in write_grounded([two])
    with raises(ConfigError, "out_of_range", "boxes"):
        write_grounded([GroundedSentence("x", ((0.5, 0.1, 0.4, 0.9),))])


@pytest.mark.parametrize(
    ("text", "sentences", "boxes", "dropped", "outside"),
    [
        ("Plain text.", 1, 0, 0, 1),
        ("<obj>A.<box><x1><y1><x1><y9></box></obj>", 1, 0, 1, 0),  # empty
        ("<obj>A.<box><x9><y1><x2><y9></box></obj>", 1, 0, 1, 0),  # inverted
        ("<obj>A.<box><x1><y1><x100><y9></box></obj>", 1, 0, 1, 0),
        ("<obj>A.<box><x1><y1></box><box><x1><y1><x2><y2></box></obj>", 1, 1, 1, 0),
        ("<obj>A.<box><x1><y1>", 1, 0, 1, 0),  # cut
        ("<obj>A.</obj> between <obj>B.</obj>", 3, 0, 0, 1),
        ("<obj><box><x1><y1><x2><y2></box></obj>", 0, 0, 1, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_damaged_parts_are_counted(
    text: str, sentences: int, boxes: int, dropped: int, outside: int
) -> None:
    report = read_grounded(text)
    assert len(report.sentences) == sentences
    assert sum(len(sentence.boxes) for sentence in report.sentences) == boxes
    assert (report.dropped_boxes, report.outside) == (dropped, outside)
    assert not any("<" in sentence.text for sentence in report.sentences)


def test_boxes_of_the_picture_become_those_of_its_centre_square() -> None:
    box = (0.25, 0.0, 0.5, 1.0)
    assert boxes_in_square([box], 200, 100) == [pytest.approx((0.0, 0.0, 0.5, 1.0))]
    cut = boxes_in_square([(0.0, 0.2, 0.5, 0.4), (0.0, 0.0, 0.1, 1.0)], 200, 100)
    assert cut == [pytest.approx((0.0, 0.2, 0.5, 0.4))]  # the second one is outside


def test_sentences_of_a_corpus_become_training_text() -> None:
    box = {"label": "effusion", "x": 50.0, "y": 20.0, "width": 100.0, "height": 60.0}
    extra = {
        "sentences": [{"text": "Effusion.", "boxes": [box]}, {"text": "No edema.", "boxes": []}],
        "image_width": 200,
        "image_height": 100,
    }
    sample = Sample(key="a", corpus="c", split="train", patient="p", study="s", extra=extra)
    assert grounded_text(sample) == (
        "<obj>Effusion.<box><x0><y20><x99><y80></box></obj><obj>No edema.</obj>"
    )


def scores(ours: str, theirs: str) -> dict[str, float]:
    groups = grounded_metrics([read_grounded(ours)], [read_grounded(theirs)])
    return {row.metric: row.value for row in measure(groups, 1, resamples=0)}


def test_scores_of_equal_reports_are_one() -> None:
    assert set(scores(TEXT, TEXT).values()) == {1.0}


def test_sides_and_polarity_decide() -> None:
    reference = "<obj>Left pleural effusion.</obj><obj>No pneumothorax.</obj>"
    assert scores("<obj>Right pleural effusion.</obj>", reference)["logical_precision"] == 0
    assert scores("<obj>Pneumothorax.</obj>", reference)["logical_precision"] == 0
    general = scores("<obj>Pleural effusion.</obj>", reference)
    assert general["logical_precision"] == 1  # it follows from the left one, not the other way
    assert general["logical_recall"] == 0
    half = scores("<obj>Left pleural effusion.</obj><obj>Edema.</obj><obj>Hello.</obj>", reference)
    assert (half["logical_precision"], half["logical_recall"]) == (0.5, 0.5)  # "Hello." is left out
    assert half["logical_f1"] == 0.5


def test_boxes_decide_over_the_spatial_scores() -> None:
    inside = "<obj>Left pleural effusion.<box><x52><y60><x60><y70></box></obj>"
    beside = "<obj>Left pleural effusion.<box><x2><y2><x30><y30></box></obj>"
    reference = TEXT.replace("a left effusion", "left pleural effusion")
    found = scores(inside, reference)
    assert found["spatial_precision"] == 1  # all of its pixels are in the reference's box
    assert found["spatial_recall"] == 0  # but few of the reference's are in it
    assert scores(beside, reference)["spatial_precision"] == 0
    assert scores(beside, reference)["logical_precision"] == 1
    wrong = scores(inside.replace("Left", "Right"), reference)
    assert wrong["spatial_precision"] == 0
    assert wrong["grounding_precision"] != wrong["grounding_precision"]  # none is entailed: NaN
    unplaced = GroundedReport((GroundedSentence("Left pleural effusion."),))
    groups = grounded_metrics([read_grounded(inside)], [unplaced])
    rows = {row.metric: row.value for row in measure(groups, 1, resamples=0)}
    assert rows["spatial_precision"] == 0  # evidence without a box


def test_the_command_scores_boxes(tmp_path: Path) -> None:
    lines = [
        {"key": "a", "generated": TEXT, "reference": TEXT},
        {"key": "b", "generated": "<obj>Edema.<box><x9></box></obj>", "reference": TEXT},
    ]
    path = tmp_path / "reports.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    cli.main(["eval", "report-generation", "--predictions", str(path), "--grounded",
              "--resamples", "5", "--out", str(tmp_path / "out")])  # fmt: skip
    results = read_results(tmp_path / "out")
    assert results.row("logical_precision", "report").value == 0.5
    assert results.details["dropped_boxes"] == 1
    assert "<obj>" not in (tmp_path / "out" / "predictions.jsonl").read_text()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("padchest-gr")
    cli.main(["phantom", "padchest-gr", "--out", str(home / "gr"), "--patients", "6",
              "--size", "64"])  # fmt: skip
    cli.main(["shards", "padchest-gr", "--root", str(home / "gr"), "--out", str(home / "shards"),
              "--workers", "1"])  # fmt: skip
    return home / "shards"


def writer(folder: Path, **settings: Any) -> Any:
    """A language model whose tokens are bytes."""
    backend = Backend(
        models.BPE({each: n for n, each in enumerate(byte_characters().values())}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    language = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    return medvl.create_model(
        "causal_lm", tokenizer=folder, language=json.dumps(language), lora_language=0,
        image_encoder="timm:test_vit", image_arguments={"depth": 1}, image_size=64,
        max_tokens=600, **settings,
    )  # fmt: skip


def settings(shards: Path, **changes: Any) -> DataConfig:
    image = EvalTransform(size=64, fit="crop", resize="bicubic")
    return DataConfig(
        **{"train": str(shards / "train"), "valid": None, "workers": 0, "text": GroundedText(),
           "image": image, **changes}
    )  # fmt: skip


def test_sentences_with_boxes_are_trained_on_and_evaluated(shards: Path, tmp_path: Path) -> None:
    model = writer(tmp_path / "words")
    source = ShardSource(shards / "train")
    expected = {each.key: grounded_text(each) for each in map(source.sample, range(len(source)))}
    assert any("<box>" in text for text in expected.values())
    batch = next(iter(open_data(settings(shards), model, 4).train))
    for row, key in enumerate(batch.keys):
        assert batch.texts[row] == expected[key]
        ids_T = batch.ids_BT[row][batch.mask_BT[row]]
        assert model.tokenizer.decode(ids_T) == expected[key]  # all of it, with its boxes
        assert int(ids_T[-1]) == model.tokenizer.sep_id
    assert torch.isfinite(model(batch).total)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save(model, checkpoint)
    out = tmp_path / "out"
    cli.main(["eval", "report-generation", "--checkpoint", str(checkpoint), "--data",
              str(shards / "train"), "--grounded", "--max-tokens", "4", "--workers", "0",
              "--resamples", "3", "--out", str(out)])  # fmt: skip
    results = read_results(out)
    assert results.details["dropped_boxes"] == 0
    lines = [json.loads(line) for line in (out / "predictions.jsonl").open()]
    plain = {key: read_grounded(text).text for key, text in expected.items()}
    assert {line["key"]: line["reference"] for line in lines} == plain


def test_boxes_need_the_centre_square_and_a_tokenizer_that_keeps_them(
    shards: Path, tmp_path: Path
) -> None:
    model = writer(tmp_path / "words")
    with raises(ConfigError, "conflict", "data.image"):
        open_data(settings(shards, image=ConVIRTAugmentation.weak(64)), model, 4)
    with raises(ConfigError, "conflict", "model.fit"):
        open_data(settings(shards), writer(tmp_path / "other", fit="pad"), 4)
    model.tokenizer = train_words(["mass . obj box"], min_frequency=1).for_writing()
    with raises(ConfigError, "unsupported", "data.tokenizer"):
        open_data(settings(shards), model, 4)
