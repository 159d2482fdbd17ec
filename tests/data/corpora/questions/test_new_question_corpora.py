"""PMC-VQA, MIMIC-CXR-VQA and MIMIC-Ext-CXR-QBA: questions of the phantom, and errors of releases."""

import csv
import json
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.annotations import questions_of
from medvl.data.corpora.questions.cxr_qba import CXRQBA
from medvl.data.corpora.questions.mimic_cxr_vqa import MIMICCXRVQA
from medvl.data.corpora.questions.pmc_vqa import PMCVQA
from medvl.errors import CorpusError
from medvl.phantom import write_cxr_qba, write_mimic_cxr_vqa, write_pmc_vqa


def asked(plan):
    return [
        (record.sample, question)
        for record in plan.records
        for question in questions_of(record.sample)
    ]


@pytest.fixture(scope="module")
def mimic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mimic_cxr_vqa(
        tmp_path_factory.mktemp("vqa"), patients=12, size=32, split=(0.5, 0.2, 0.3), workers=1
    )


def test_pmc_vqa_keeps_articles_apart(tmp_path, deid):
    root = write_pmc_vqa(tmp_path, patients=12, size=32, split=(0.6, 0.0, 0.4), workers=1)
    plan = PMCVQA(root=root, validate_share=0.3).plan(deid)
    assert plan.rows.excluded == {"article_in_test": 1}
    patients = {split: {s.patient for s, q in asked(plan) if q.split == split}
                for split in ("train", "validate", "test")}  # fmt: skip
    assert all(patients.values())
    assert not patients["test"] & (patients["train"] | patients["validate"])
    assert not patients["train"] & patients["validate"]
    for sample, question in asked(plan):
        assert not sample.sections
        assert question.answer == question.options[question.right[0]]
        assert not any(option.startswith(("A", "B")) for option in question.options)

    text = (root / "test_2.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))
    rows[1][8] = rows[1][4].strip()  # the text of the option, as in the first version
    rows[2][8] = "E"
    with (root / "test_clean.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    clean = PMCVQA(root=root, clean=True).plan(deid)
    assert clean.rows.excluded["malformed_options"] == 1
    first = next(question for _, question in asked(clean) if question.id == "test_clean-1")
    assert first.right == (0,)
    with raises(CorpusError, "not_found"):
        PMCVQA(root=root / "figures").plan(deid)


def test_mimic_cxr_vqa_joins_answers(mimic, deid):
    plan = MIMICCXRVQA(root=mimic).plan(deid)
    entries = [e for name in ("train", "valid", "test")
               for e in json.loads((mimic / f"{name}.json").read_text())]  # fmt: skip
    assert len(asked(plan)) == len(entries)
    by_id = {question.id: (sample, question) for sample, question in asked(plan)}
    for entry in entries:
        sample, question = by_id[f"{entry['split']}-{entry['idx']}"]
        assert sample.key == deid.image(entry["image_id"])
        assert sample.patient == deid.patient(entry["subject_id"])
        assert sample.image == mimic / "files" / entry["image_path"]
        expected = {"m": "male", "f": "female"}.get("".join(entry["answer"]))
        assert question.answer == (expected or ", ".join(sorted(entry["answer"])) or "none")
        assert (question.answer_type == "closed") == (question.category == "verify")
    counts = plan.warnings
    assert counts["no_answer"] == sum(not entry["answer"] for entry in entries)
    assert counts["several_answers"] == sum(len(entry["answer"]) > 1 for entry in entries) > 0


def test_mimic_cxr_vqa_without_answers_is_refused(mimic, deid, tmp_path):
    (tmp_path / "_train_part1.json").write_text("[]")
    with raises(CorpusError, "missing", "root"):
        MIMICCXRVQA(root=tmp_path, images=mimic).plan(deid)
    entry = json.loads((mimic / "test.json").read_text())[0]
    for content, code in (
        ([{**entry, "answer": "yes"}], "malformed"), ([entry, 3], "malformed"),
        ({"a": entry}, "malformed"),
    ):  # fmt: skip
        (tmp_path / "test.json").write_text(json.dumps(content))
        with raises(CorpusError, code):
            MIMICCXRVQA(root=tmp_path, images=mimic).plan(deid)
    lost = [entry, {**entry, "idx": 5, "image_id": "0" * 8}]
    (tmp_path / "test.json").write_text(json.dumps(lost))
    plan = MIMICCXRVQA(root=tmp_path, images=mimic).plan(deid)
    assert plan.rows.excluded == {"not_in_metadata": 1}
    (tmp_path / "test.json").write_text(" [ ] ")
    assert not MIMICCXRVQA(root=tmp_path, images=mimic).plan(deid).records


def test_cxr_qba_takes_the_questions_of_the_export(tmp_path, deid):
    root = write_cxr_qba(tmp_path, patients=12, size=32, split=(0.5, 0.2, 0.3), workers=1)
    plan = CXRQBA(root=root).plan(deid)
    every = asked(plan)
    assert len({question.id for _, question in every}) == len(every)
    assert {question.category for _, question in every} == {"A++", "A", "C"}
    assert {question.split for _, question in every} == {"train", "validate", "test"}
    assert {sample.view for sample, _ in every} <= {"PA", "AP"}
    joined = [question.answer for _, question in every if ". It is " in question.answer]
    assert plan.warnings["several_answers"] == len(joined) > 0
    good = CXRQBA(root=root, ratings=("A++",)).plan(deid)
    kept = [question for _, question in every if question.category == "A++"]
    assert len(asked(good)) == len(kept)
    assert good.rows.excluded["rating"] == plan.rows.read - good.rows.kept - sum(
        good.rows.excluded[name] for name in ("not_in_archive", "no_frontal_image")
    )
    whole = (root / "qa.zip").read_bytes()
    for start, mark in ((6, 1), (8, 77)):  # encrypted; of an unknown compression
        damaged = bytearray(whole)
        entry = whole.index(b"PK\x01\x02")
        while entry > 0:
            damaged[entry + start + 2] = mark
            entry = whole.find(b"PK\x01\x02", entry + 1)
        (root / "qa.zip").write_bytes(bytes(damaged))
        with raises(CorpusError, "malformed"):
            CXRQBA(root=root).plan(deid)
    (root / "qa.zip").write_bytes(b"PK")
    with raises(CorpusError, "malformed"):
        CXRQBA(root=root).plan(deid)
