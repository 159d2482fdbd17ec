"""VQA converters on fixtures in the published layouts, with the errors of the releases."""

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises
from helpers.vqa_corpora import (
    RAD_TRAIN,
    RAD_WARNINGS,
    SLAKE,
    rad_row,
    write_path_vqa,
    write_rad,
    write_slake,
    write_vqa_med,
)

from medvl.cli import main as cli
from medvl.common.untrusted import ANYWHERE
from medvl.data.annotations import MIXED, Question, questions_of
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.figures.m3ae_arrow import read_plain_pickle
from medvl.data.corpora.questions import path_vqa, slake, vqa_med, vqa_rad
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError

CARDS = Path(__file__).parents[4] / "data_cards"


def by_id(plan: Plan) -> dict[str, Question]:
    return {
        question.id: question for record in plan.records for question in questions_of(record.sample)
    }


@pytest.mark.parametrize("form", ["mevf", "original"])
def test_vqa_rad_forms_give_equal_questions_and_count_repairs(tmp_path, deid, form):
    plan = vqa_rad.VQARAD(root=write_rad(tmp_path, form)).plan(deid)
    questions = by_id(plan)
    assert [questions[str(n)].split for n in range(1, 9)] == ["train"] * 6 + ["test"] * 2
    assert questions["1"] == Question(
        id="1", question="Is the heart enlarged?", answer="Yes", answer_type="closed", kind="PRES",
        organ="CHEST", split="train", phrasing="freeform",
    )  # fmt: skip
    assert (questions["2"].answer, questions["3"].answer) == ("2", "right lung")
    assert (questions["3"].kind, questions["4"].kind, questions["8"].kind) == (
        "POS, PRES",
        "PRES",
        "ATTRIB",
    )
    assert questions["4"].question == "Is it the patient's heart?"
    assert (questions["4"].answer, questions["5"].answer) == (
        "",
        "None",
    )  # NULL is empty, None is an answer
    assert questions["8"].phrasing == "para"
    assert plan.warnings == RAD_WARNINGS | ({"qid_text": 1} if form == "original" else {})


def test_vqa_rad_official_split_gives_mixed_samples(tmp_path, deid):
    plan = vqa_rad.VQARAD(root=write_rad(tmp_path), split="official").plan(deid)
    assert {record.sample.split for record in plan.records} == {MIXED}
    first = plan.records[0].sample
    assert first.key == deid.image("synpic1.jpg")
    assert first.patient == deid.patient("synpic1.jpg")
    assert first.sections == {}
    assert Counter(question.split for question in questions_of(first)) == {"train": 4, "test": 2}


def test_vqa_rad_image_disjoint_split_is_independent_of_the_salt(tmp_path, deid):
    rows = [rad_row(n, f"synpic{n}.jpg", "What is it?", "mass") for n in range(400)]
    (tmp_path / "images").mkdir()
    (tmp_path / "trainset.json").write_text(json.dumps(rows))
    (tmp_path / "testset.json").write_text(
        json.dumps([rad_row("t", "synpic3.jpg", "What?", "mass")])
    )
    plans = [
        vqa_rad.VQARAD(root=tmp_path, split="image-disjoint").plan(salt)
        for salt in (deid, Deidentifier(b"x" * 32))
    ]
    splits = [{question.id: question.split for question in by_id(plan).values()} for plan in plans]
    assert splits[0] == splits[1]
    assert splits[0]["t"] == splits[0]["3"]
    shares = Counter(splits[0].values())
    assert shares["train"] / 401 == pytest.approx(0.7, abs=0.06)
    assert shares["validate"] / 401 == pytest.approx(0.1, abs=0.05)
    assert {splits[0][str(n)] for n in (0, 1, 2, 4)} <= {"train", "validate", "test"}
    for record in plans[0].records:
        assert {question.split for question in questions_of(record.sample)} == {record.sample.split}


def test_slake_keeps_one_language_and_unanswered_questions(tmp_path, deid):
    plan = slake.SLAKE(root=write_slake(tmp_path)).plan(deid)
    questions = by_id(plan)
    assert [questions[n].split for n in ("0", "2", "3", "1622")] == [
        "train",
        "train",
        "validate",
        "test",
    ]
    assert (questions["2"].answer_type, questions["2"].kind, questions["3"].phrasing) == (
        "closed",
        "Modality",
        "kvqa",
    )
    assert questions["1622"].answer == ""
    assert (plan.excluded, plan.warnings) == ({"other_language": 1}, {"no_answer": 1})
    assert [record.sample.extra["modality"] for record in plan.records] == [
        "X-Ray",
        "CT",
        "X-Ray",
        "X-Ray",
    ]
    assert plan.records[0].sample.image == tmp_path / "imgs" / "xmlab1" / "source.jpg"
    chinese = by_id(slake.SLAKE(root=tmp_path, language="zh").plan(deid))
    assert chinese["1"].answer == "肺"


@pytest.mark.parametrize("blank", [None, "NULL", " "])
def test_blank_questions_are_counted(tmp_path, deid, blank):
    path = write_slake(tmp_path) / "train.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([rows[0] | {"question": blank}, *rows[1:]]))
    assert slake.SLAKE(root=tmp_path).plan(deid).warnings["no_question"] == 1


def test_slake_accepts_both_names_of_the_validation_file(tmp_path, deid):
    plan = slake.SLAKE(root=write_slake(tmp_path, "validation.json")).plan(deid)
    assert len(plan.records) == 4


def test_vqa_med_reads_categories_and_alternative_answers(tmp_path, deid):
    plan = vqa_med.VQAMed(root=write_vqa_med(tmp_path)).plan(deid)
    questions = list(by_id(plan).values())
    assert [(q.id, q.kind, q.answer, q.answer_type) for q in questions] == [
        ("train-1", "modality", "no", "closed"),
        ("train-2", "plane", "axial", "open"),
        ("train-3", "organ", "lung, mediastinum, pleura", "open"),
        ("train-4", "abnormality", "mass | cyst", "open"),
        ("validate-1", "modality", "xr - plain film", "open"),
        ("test-1", "abnormality", "(large) mass#cyst", "open"),
        ("test-2", "organ", "spine and contents", "open"),
    ]
    assert plan.warnings == {"several_answers": 1}
    assert all(record.sample.image.is_file() for record in plan.records)


def test_vqa_med_without_abnormality_keeps_the_ids(tmp_path, deid):
    """M3AE trains and tests on three of the four categories."""
    plan = vqa_med.VQAMed(
        root=write_vqa_med(tmp_path), categories=("modality", "plane", "organ")
    ).plan(deid)
    assert list(by_id(plan)) == ["train-1", "train-2", "train-3", "validate-1", "test-2"]
    assert (plan.excluded, plan.warnings) == ({"other_category": 2}, {})
    with raises(ConfigError, "unknown_name", "categories"):
        vqa_med.VQAMed(root=tmp_path, categories=("anatomy",)).plan(deid)


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("form", ["qa.pkl", "vqa.pkl", "qa.json", "vqa.json"])
def test_path_vqa_forms_give_equal_questions(tmp_path, deid, form, protocol):
    plan = path_vqa.PathVQA(root=write_path_vqa(tmp_path, form, protocol)).plan(deid)
    assert [(q.id, q.answer, q.answer_type, q.kind) for q in by_id(plan).values()] == [
        ("train-1", "liver", "open", "what"),
        ("train-3", "yes", "closed", "is"),
        ("validate-1", "in the lobule", "open", "where"),
        ("test-1", "no", "closed", "is"),
    ]
    assert (plan.excluded, plan.warnings) == ({"duplicate": 1}, {})
    assert [record.sample.split for record in plan.records] == ["train", "validate", "test"]
    assert all(record.sample.image.is_file() for record in plan.records)


class CreatesFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_plain_pickle_is_read_without_running_it(tmp_path, protocol):
    path = tmp_path / "data.pkl"
    shared = ["a", "ü"]
    plain = [
        {"x": 1, "y": 2.5, "z": None},
        (True, False),
        (1, 2, 3, 4),
        10**20,
        -5,
        300,
        70_000,
        shared,
        shared,
        [],
        {},
        (),
    ]
    path.write_bytes(pickle.dumps(plain, protocol))
    assert read_plain_pickle(path, ANYWHERE) == plain
    trace = tmp_path / "it-ran"
    path.write_bytes(pickle.dumps([{"x": CreatesFolder(trace)}], protocol))
    with raises(CorpusError, "unsupported"):
        read_plain_pickle(path, ANYWHERE)
    assert not trace.exists()


def test_truncated_pickle_raises(tmp_path):
    path = tmp_path / "data.pkl"
    data = pickle.dumps([{"question": "what?"}] * 3)
    for end in (0, 1, 10, len(data) - 1):
        path.write_bytes(data[:end])
        with raises(CorpusError, "malformed"):
            read_plain_pickle(path, ANYWHERE)
    with raises(CorpusError, "not_found"):
        read_plain_pickle(tmp_path / "none.pkl", ANYWHERE)


def damage(path: Path, change: dict[str, object]) -> None:
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([rows[0] | change, *rows[1:]]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"answer_type": "MAYBE"}, ("malformed", "answer_type")),
        ({"image_name": "../secret.jpg"}, ("malformed",)),
        ({"image_name": "/etc/passwd"}, ("malformed",)),
        ({"image_name": ""}, ("malformed",)),
        ({"qid": 2}, ("malformed",)),
    ],
)
def test_vqa_rad_invalid_row_raises(tmp_path, deid, change, expected):
    write_rad(tmp_path)
    damage(tmp_path / "trainset.json", change)
    with raises(CorpusError, *expected):
        vqa_rad.VQARAD(root=tmp_path).plan(deid)


def test_vqa_invalid_roots_and_options_raise(tmp_path, deid):
    with raises(CorpusError, "not_found"):
        vqa_rad.VQARAD(root=tmp_path).plan(deid)
    (tmp_path / "images").mkdir()
    with raises(CorpusError, "not_found"):
        vqa_rad.VQARAD(root=tmp_path).plan(deid)
    write_rad(tmp_path)
    (tmp_path / "VQA_RAD Dataset Public.json").write_text("[]")
    with raises(CorpusError, "conflict"):
        vqa_rad.VQARAD(root=tmp_path).plan(deid)
    with raises(CorpusError, "not_found"):
        slake.SLAKE(root=tmp_path).plan(deid)
    with raises(CorpusError, "not_found"):
        vqa_med.VQAMed(root=tmp_path).plan(deid)
    with raises(CorpusError, "not_found"):
        path_vqa.PathVQA(root=tmp_path).plan(deid)
    with raises(ConfigError, "unknown_name", "split"):
        vqa_rad.VQARAD(root=tmp_path, split="mine").plan(deid)
    with raises(ConfigError, "unknown_name", "language"):
        slake.SLAKE(root=tmp_path, language="fr").plan(deid)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", ("malformed",)),
        ("[]", ("malformed",)),
        ("{}", ("malformed",)),
        ("[1]", ("missing", "qid")),
        (json.dumps([RAD_TRAIN[0], {"qid": 1}]), ("missing", "image_name")),
    ],
)
def test_vqa_rad_damaged_file_raises(tmp_path, deid, content, expected):
    (write_rad(tmp_path) / "trainset.json").write_text(content)
    with raises(CorpusError, *expected):
        vqa_rad.VQARAD(root=tmp_path).plan(deid)


def test_vqa_med_damaged_table_raises(tmp_path, deid):
    root = write_vqa_med(tmp_path)
    path = next(root.rglob("C1_Modality_train.txt"))
    path.write_bytes(b"synpic1|no answer\n")
    with raises(CorpusError, "malformed"):
        vqa_med.VQAMed(root=root).plan(deid)
    path.write_bytes(b"synpic1|\xff|no\n")
    with raises(CorpusError, "malformed"):
        vqa_med.VQAMed(root=root).plan(deid)
    path.write_bytes(b"../x|is it?|no\n")
    with raises(CorpusError, "malformed"):
        vqa_med.VQAMed(root=root).plan(deid)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": None}, ("wrong_type", "id")),
        ({"answer_type": "CLOSED"}, ("unknown_name", "answer_type")),
    ],
)
def test_invalid_question_entry_raises(change, expected):
    good = {"id": "1", "question": "what?", "answer": "", "answer_type": "open", "split": "test"}
    assert Question.from_json(good | {"later": 1}).as_json() == good
    with raises(CorpusError, *expected):
        Question.from_json(good | change)
    with raises(CorpusError, "missing"):
        Question.from_json({"id": "1"})


def test_vqa_shards_round_trip_and_verify(tmp_path, monkeypatch, capsys):
    (tmp_path / "rad").mkdir()
    root, out = write_rad(tmp_path / "rad"), tmp_path / "shards"
    cli.main(["shards", "vqa-rad", "--root", str(root), "--out", str(out), "--workers", "1"])
    output = capsys.readouterr().out
    assert "6 questions in train, 2 questions in test" in output
    assert "1 also_in_train" in output
    manifest = Manifest.read(out / MIXED)
    assert manifest.warnings["answer_type_padded"] == 1
    source = ShardSource(out / MIXED)
    stored = [
        question
        for position in range(len(source))
        for question in questions_of(source.sample(position))
    ]
    assert {question.id for question in stored} == {str(n) for n in range(1, 9)}
    text = b"".join(path.read_bytes() for path in out.rglob("*.tar"))
    assert b"synpic" not in text
    cli.main(["verify", str(out)])
    assert "not the full release: 2 of 314 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "write"),
    [("slake", write_slake), ("vqa-med", write_vqa_med), ("path-vqa", write_path_vqa)],
)
def test_vqa_corpora_become_shards_by_split(tmp_path, monkeypatch, capsys, name, write):
    (tmp_path / "root").mkdir()
    root, out = write(tmp_path / "root"), tmp_path / "shards"
    cli.main(["shards", name, "--root", str(root), "--out", str(out), "--workers", "1"])
    assert {path.name for path in out.iterdir()} == {"train", "validate", "test"}
    pixels_HWC = ShardSource(out / "train").pixels(0, color=True)
    assert (np.ptp(pixels_HWC, axis=2).max() > 20) == (
        name == "path-vqa"
    )  # the others are stored as grey images
    assert SLAKE["train"][0]["question"] not in capsys.readouterr().err


@pytest.mark.real
def test_vqa_rad_real_release_has_the_counts_of_its_card(real_data, deid):
    plan = vqa_rad.VQARAD(root=real_data / "vqa_rad").plan(deid)
    questions = by_id(plan).values()
    assert len(plan.records) == vqa_rad.VQARAD.counts["images"]
    assert Counter((q.split, q.phrasing) for q in questions) == {
        ("train", "freeform"): 1206, ("train", "para"): 591, ("train", "frame"): 1267,
        ("test", "freeform"): 308, ("test", "para"): 143,
    }  # fmt: skip
    assert Counter(q.answer_type for q in questions if q.split == "test") == {
        "closed": 272,
        "open": 179,
    }
    assert (plan.warnings["also_in_train"], plan.warnings["answer_number"]) == (14, 10)
    assert plan.warnings["answer_type_padded"] == 2
    assert all(record.sample.image.is_file() for record in plan.records)
    counts = Counter(
        q.split
        for q in by_id(
            vqa_rad.VQARAD(root=real_data / "vqa_rad", split="image-disjoint").plan(deid)
        ).values()
    )
    assert counts == {"train": 2319, "validate": 387, "test": 809}


@pytest.mark.parametrize(
    ("published", "options"),
    [
        (["A. fib", "B. line"], ("fib", "line")),
        ([" A:left ", " B: right"], ("left", "right")),
        (["(A) one", "(B)  two  lobes", "(C) three"], ("one", "two lobes", "three")),
        (["A) Axial", "B) Coronal"], ("Axial", "Coronal")),
        (["A. fib", "sinus rhythm"], ("A. fib", "sinus rhythm")),
        (["B. line", "A. fib"], ("B. line", "A. fib")),
        (["Axial", "Both"], ("Axial", "Both")),
        (["A: left", "B:"], ("left", "")),
        (["(A)", "(B)"], ("(A)", "(B)")),
    ],
)
def test_letters_of_options_are_removed_where_all_have_them_in_order(published, options):
    assert vqa.strip_letters(published) == options


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", (1,)), ("B.", (1,)), ("(B)", (1,)), ("B: right lung", (1,)), ("Right lung", (1,)),
        (["C", "A"], (0, 2)), ("D", ()), ("b", ()), ("", ()), ("Both", ()), (None, ()),
        (["A", "E"], ()), ("B: left lung", ()), ("B: the right one", (1,)),
    ],
)  # fmt: skip
def test_right_options_are_found_by_letter_or_text(answer, right):
    assert vqa.choose_right(answer, ["left lung", "right lung", "neither"]) == right


def test_malformed_options_have_no_right_one():
    assert vqa.choose_right("A", ["yes", "Yes "]) == ()
    assert vqa.choose_right("A", ["yes"]) == ()
    assert vqa.choose_right("A", ["yes", ""]) == ()
    assert vqa.choice_fields(["A:left", "B:right", "C:"], "A") is None


def test_a_letter_is_that_of_the_option_where_options_have_letters():
    """Options of figures with panels are letters themselves."""
    panels = [" A:C ", " B:A ", " C:B "]
    fields = vqa.choice_fields(panels, "A")
    assert fields is not None
    assert (fields["options"], fields["answer"]) == (("C", "A", "B"), "C")
    fields = vqa.choice_fields(["C", "A", "B"], "A")
    assert fields is not None
    assert fields["answer"] == "A"


def test_question_with_options_survives_json():
    question = Question(
        id="1", question="Which?", answer="right", answer_type="closed", split="test",
        category="Location", options=("left", "right"), right=(1,),
    )  # fmt: skip
    entry = json.loads(json.dumps(question.as_json()))
    assert entry["options"] == ["left", "right"]
    assert Question.from_json(entry) == question
    for change in (
        {"right": [2]}, {"right": [1, 0]}, {"options": ["a", "a"]}, {"options": "ab"},
        {"options": [1, 2]}, {"right": ["1"]}, {"right": [1.0]}, {"right": [True]},
        {"options": [str(n) for n in range(27)], "right": [26]},
    ):  # fmt: skip
        with pytest.raises(CorpusError):
            Question.from_json(entry | change)
