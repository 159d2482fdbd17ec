"""Medical-Diff-VQA and GEMeX: pairs of dates, and answers with boxes, of the phantom and of damaged
releases.
"""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.annotations import all_phrases_of, questions_of
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.questions.diff_vqa import IMAGES, QUESTIONS, DiffVQA
from medvl.data.corpora.questions.gemex import GEMeX
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, CorpusError
from medvl.eval.vqa.predictions import questions_beside
from medvl.phantom import write_diff_vqa, write_gemex

SPLIT = (0.5, 0.2, 0.3)


@pytest.fixture(scope="module")
def diff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    return write_diff_vqa(folder, patients=12, size=32, split=SPLIT, workers=1)


@pytest.fixture(scope="module")
def gemex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemex")
    return write_gemex(folder, patients=10, size=32, split=SPLIT, workers=1)


def copy_of(root: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copy(root / name, folder / name)
    return folder


def change_rows(path: Path, edit: dict[int, dict[str, str]]) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, cells in edit.items():
        rows[number].update(cells)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def test_differences_have_the_earlier_image(diff: Path, deid: Deidentifier) -> None:
    plan = DiffVQA(root=diff).plan(deid)
    samples = {record.sample.key: record.sample for record in plan.records}
    assert not plan.rows.excluded
    asked = [sample for sample in samples.values() if questions_of(sample)]
    kinds = {question.kind for sample in asked for question in questions_of(sample)}
    assert kinds == {"presence", "difference"}
    for sample in asked:
        prior = samples[str(sample.extra["prior"])]
        assert (prior.patient, prior.split) == (sample.patient, sample.split)
        assert prior.study != sample.study
        assert prior.order is not None
        assert sample.order is not None
        assert prior.order < sample.order
        assert sample.view in ("PA", "AP")
        assert {question.split for question in questions_of(sample)} == {sample.split}
    assert any("nothing" not in question.answer for one in asked for question in questions_of(one))
    assert {sample.split for sample in samples.values()} == {"train", "validate", "test"}
    only = DiffVQA(root=diff, kinds=("difference",)).plan(deid)
    assert only.rows.excluded == {"other_kind": len(asked)}
    with raises(ConfigError, "unknown_name", "kinds"):
        DiffVQA(root=diff, kinds=("change",)).plan(deid)


def test_questions_of_two_tables_have_ids_of_their_own(
    diff: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    """Both tables number their rows from 1."""
    ids = []
    for half in (0, 1):
        root = copy_of(diff, tmp_path / f"{half}", QUESTIONS, IMAGES)
        lines = (root / QUESTIONS).read_text(encoding="utf-8").splitlines(keepends=True)
        middle = len(lines) // 2
        rows = lines[1:middle] if half else lines[middle:]
        (root / QUESTIONS).write_text("".join([lines[0], *rows]), encoding="utf-8")
        records = DiffVQA(root=root, images=diff).plan(deid).records
        ids.append({each.id for record in records for each in questions_of(record.sample)})
        assert len(ids[half]) == len(rows)
    assert not ids[0] & ids[1]


def test_splits_beside_two_conversions_of_a_table_may_have_the_same_questions(
    diff: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    for name, kinds in (("all", ()), ("changes", ("difference",))):
        plan = DiffVQA(root=diff, kinds=kinds).plan(deid)
        options = ShardOptions(short_side=32, keep_textless=True)
        write_shards(plan, deid, ShardRun(out=tmp_path / name, workers=1), options)
    train, test = tmp_path / "all/train", tmp_path / "changes/test"
    beside = Counter(question.id for question in questions_beside([train, test]))
    assert {1, 2} == {*beside.values()}


def test_questions_without_images_are_counted_and_mixed_splits_are_refused(
    diff: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    root = copy_of(diff, tmp_path / "a", QUESTIONS, IMAGES)
    rows = change_rows(
        root / QUESTIONS,
        {0: {"ref_id": ""}, 1: {"ref_id": ""}, 3: {"ref_id": "1"}, 5: {"study_id": "2"}},
    )
    plan = DiffVQA(root=root, images=diff).plan(deid)
    # A presence question needs no earlier image.
    assert plan.rows.excluded == {"no_reference": 1, "not_in_images": 2}
    kept = sum(len(questions_of(record.sample)) for record in plan.records)
    assert kept == len(rows) - 3
    other = "test" if rows[-1]["split"] == "train" else "train"
    change_rows(root / QUESTIONS, {len(rows) - 1: {"split": other}})
    with raises(CorpusError, "malformed", "split"):
        DiffVQA(root=root, images=diff, splits="release").plan(deid)


def test_a_study_with_two_earlier_ones_gives_two_samples(
    diff: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    root = copy_of(diff, tmp_path / "b", QUESTIONS, IMAGES)
    with (root / QUESTIONS).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    patients = [row["subject_id"] for row in rows]
    later = next(n for n in range(2, len(rows), 2) if patients[n] == patients[n - 2])
    change_rows(root / QUESTIONS, {later + 1: {"ref_id": rows[later - 2]["ref_id"]}})
    samples = [record.sample for record in DiffVQA(root=root, images=diff).plan(deid).records]
    assert len({sample.key for sample in samples}) == len(samples)
    asked = [sample for sample in samples if questions_of(sample)]
    studies = [sample.study for sample in asked]
    twice = [sample for sample in asked if studies.count(sample.study) == 2]
    assert len({sample.extra["prior"] for sample in twice}) == len(twice) == 2


def test_answers_have_regions_and_options(gemex: Path, deid: Deidentifier) -> None:
    plan = GEMeX(root=gemex).plan(deid)
    assert not plan.rows.excluded
    forms = set()
    boxed = 0
    for record in plan.records:
        sample = record.sample
        assert "Not for the model" not in json.dumps(sample.extra)
        names = {phrase.label for phrase in all_phrases_of(sample)}
        boxed += bool(names)
        for question in questions_of(sample):
            forms.add(question.kind)
            assert set(sample.extra["answer_regions"][question.id]) == names
            if question.kind.endswith("choice") and question.right:
                texts = [question.options[place] for place in question.right]
                assert question.answer == ", ".join(texts)
                assert not question.options[0].startswith("A")
    assert len(forms) == 4
    assert boxed


def test_damaged_answers_and_boxes_are_counted(
    gemex: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    root = copy_of(gemex, tmp_path / "c", "single_choice_question.jsonl")
    path = root / "single_choice_question.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["answer"] = "Z"
    lines[1] |= {"visual_regions": ["heart"], "visual_locations": []}
    lines[2] |= {"visual_regions": ["heart", "lung"], "visual_locations": [[1, 2, 3], [1, 2, 0, 4]]}
    lines[3]["image_path"] = "files/aaaaaaaa-aaaaaaaa-aaaaaaaa-aaaaaaaa-aaaaaaaa.jpg"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = GEMeX(root=root, images=gemex).plan(deid)
    assert plan.rows.excluded == {"malformed_options": 1, "not_in_metadata": 1}
    assert plan.warnings["regions_differ"] == 1
    assert plan.warnings["box_malformed"] == 2
    with raises(CorpusError, "not_found"):
        GEMeX(root=tmp_path).plan(deid)
    path.write_text(json.dumps(lines[4] | {"image_path": "x.jpg"}) + "\n")
    with raises(CorpusError, "malformed", "image_path"):
        GEMeX(root=root, images=gemex).plan(deid)
