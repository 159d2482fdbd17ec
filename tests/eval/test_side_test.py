"""`scripts/side_test.py`: true texts against their mirrors, by any system that scores pairs, and questions of sides."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import tiny_model
from helpers.script_modules import load_script
from helpers.vqa_corpora import write_rad_shards

import medvl
from medvl.data import ShardSource, train_wordpiece
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import question_data
from medvl.models import System
from medvl.schema import Batch

TEXTS = ("Left effusion.", "No finding.", "Right lower lobe nodule.", "Clear lungs.")


@pytest.fixture(scope="module")
def side_test() -> Any:
    return load_script("side_test")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_wordpiece([*TEXTS, "right left effusion"], vocab_size=120, min_frequency=1)


@pytest.mark.parametrize("name", ["m3ae", "albef", "convirt"])
def test_scores_are_those_of_each_pair(name: str, side_test: Any, tokenizer: Any) -> None:
    """A mirror is scored with the image of its text, as any text would be."""
    torch.manual_seed(0)
    model: Any
    if name == "convirt":
        model = medvl.create_model(
            "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=64, frozen_text_layers=0, projection_dim=8,
            tokenizer=tokenizer,
        ).eval()  # fmt: skip
    else:
        model = tiny_model(name, tokenizer).eval()
    ids_BT, mask_BT = tokenizer([*TEXTS, *TEXTS[::-1]])
    batch = Batch(
        keys=list("abcd"), image_BCHW=torch.randint(0, 256, (4, 1, 64, 64), dtype=torch.uint8), ids_BT=ids_BT[:4],
        mask_BT=mask_BT[:4], labels_BL=torch.zeros(4, 0), texts=list(TEXTS), mirrored_ids_BT=ids_BT[4:],
        mirrored_mask_BT=mask_BT[4:],
    )  # fmt: skip
    with torch.no_grad():
        true_B, other_B = side_test.score_pairs(model, batch)
        swapped = torch.stack(side_test.score_pairs(model, Batch(**{
            **{field: getattr(batch, field) for field in ("keys", "image_BCHW", "labels_BL", "texts")},
            "ids_BT": ids_BT[4:], "mask_BT": mask_BT[4:], "mirrored_ids_BT": ids_BT[:4], "mirrored_mask_BT": mask_BT[:4],
        })))  # fmt: skip
    torch.testing.assert_close(torch.stack([other_B, true_B]), swapped)
    assert not torch.allclose(true_B, other_B)


def test_only_texts_with_a_side_are_compared(
    side_test: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_rad_shards(tmp_path)
    source = ShardSource(folder)
    model = tiny_model("dual_stream", tokenizer).eval()
    texts = {source.key(place): TEXTS[2 * place] for place in range(len(source))}
    with raises(EvaluationError, "empty"):
        side_test.compare(model, source, ())
    sample = source.sample
    monkeypatch.setattr(
        source,
        "sample",
        lambda place: dataclasses.replace(sample(place), sections={"impression": texts[source.key(place)]}),
    )
    monkeypatch.setattr(side_test, "score_pairs", lambda _, batch: (torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0])))
    above, patients = side_test.compare(model, source, ("impression",))
    assert above == [1.0, 0.5]
    assert len(patients) == 2
    assert side_test.interval(above, ["p", "p"]).startswith("0.750")


def test_questions_of_sides_are_separated(side_test: Any, tmp_path: Path) -> None:
    folder = write_rad_shards(tmp_path)
    questions = question_data([ShardSource(folder)]).questions
    path = tmp_path / "predictions.jsonl"
    rows = [{"id": question.id, "model_credit": float("right" in question.answer)} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = side_test.answers(folder, path)
    assert set(found["questions of sides"][0]) == {1.0}  # "right lung"
    assert set(found["other questions"][0]) == {0.0}
    path.write_text("")
    with raises(EvaluationError, "mismatch", "questions"):
        side_test.answers(folder, path)


def test_systems_without_pair_scores_are_refused(side_test: Any) -> None:
    model: System = medvl.create_model("classifier", encoder={"name": "resnet_tiny"}, labels=["Edema"])
    ids_BT = torch.zeros(1, 3, dtype=torch.int64)
    batch = Batch(
        keys=["a"], image_BCHW=torch.zeros(1, 1, 64, 64), ids_BT=ids_BT, mask_BT=ids_BT == 0,
        labels_BL=torch.zeros(1, 0), texts=["a"], mirrored_ids_BT=ids_BT, mirrored_mask_BT=ids_BT == 0,
    )  # fmt: skip
    with raises(ConfigError, "unsupported"):
        side_test.score_pairs(model, batch)
