"""ReXVQA: questions of the phantom with their images, and the errors of the release."""

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.annotations import questions_of
from medvl.data.corpora.questions.rexvqa import ReXVQA
from medvl.data.corpora.reports.rexgradient import ReXGradient
from medvl.errors import CorpusError
from medvl.phantom import write_rexvqa


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rexvqa(tmp_path_factory.mktemp("rex"), patients=20, seed=3, size=32, workers=1)


def test_questions_belong_to_the_images_of_rexgradient(root, deid):
    plan = ReXVQA(root=root).plan(deid)
    images = {
        record.sample.key: record.sample for record in ReXGradient(root=root).plan(deid).records
    }
    seen = Counter()
    for record in plan.records:
        sample, image = record.sample, images[record.sample.key]
        for field in ("patient", "study", "view", "sex", "age", "image", "split"):
            assert getattr(sample, field) == getattr(image, field)
        assert not sample.sections
        for question in questions_of(sample):
            assert len(question.options) == 4
            assert question.answer == question.options[question.right[0]]
            assert not question.options[0].startswith("A.")
            seen[question.split, question.kind, question.answer] += 1
    assert plan.rows.excluded == {"malformed_options": 3}
    assert {split for split, *_ in seen} == {"train", "validate", "test"}


def test_the_first_frontal_image_that_exists_is_chosen(root, deid, tmp_path):
    (tmp_path / "metadata").mkdir()
    entries = json.loads((root / "metadata/train_vqa_data.json").read_text())
    entry = next(e for e in entries.values() if {"PA", "LATERAL"} <= {*e["ImageViewPosition"]})
    frontal = entry["ImagePath"][0]
    path = f"{Path(frontal).parent}/1.99.png"
    changed = {**entry, "ImagePath": [path, *entry["ImagePath"][::-1]],
               "ImageViewPosition": ["PA", *entry["ImageViewPosition"][::-1]]}  # fmt: skip
    lost = {**entry, "ImagePath": [path], "ImageViewPosition": ["PA"]}
    (tmp_path / "metadata/test_vqa_data.json").write_text(json.dumps({"a": changed, "b": lost}))
    plan = ReXVQA(root=tmp_path, images=root).plan(deid)
    (record,) = plan.records
    assert record.sample.view in ("PA", "AP")
    assert (plan.rows.excluded["image_missing"], plan.warnings["several_images"]) == (1, 1)
    assert [q.id for q in questions_of(record.sample)] == ["a"]


def test_missing_files_and_wrong_entries_raise(root, deid, tmp_path):
    with raises(CorpusError, "not_found"):
        ReXVQA(root=tmp_path).plan(deid)
    (tmp_path / "metadata").mkdir()
    entries = json.loads((root / "metadata/test_vqa_data.json").read_text())
    entry = next(iter(entries.values()))
    for change, field in (
        ({"options": "A. x"}, "options"), ({"ImagePath": ["../../x.png"]}, "ImagePath"),
        ({"ImagePath": []}, "ImagePath"),
    ):  # fmt: skip
        text = json.dumps({"a": {**entry, **change}})
        (tmp_path / "metadata/test_vqa_data.json").write_text(text)
        with raises(CorpusError, "malformed", field):
            ReXVQA(root=tmp_path, images=root).plan(deid)
