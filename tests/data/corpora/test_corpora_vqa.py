"""Corpora of questions about images, in the layouts and with the dirt of their releases."""

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.vqa_corpora import (
    RAD_DIRT,
    RAD_TRAIN,
    SLAKE,
    rad_row,
    write_path_vqa,
    write_rad,
    write_slake,
    write_vqa_med,
)

from medvl.cli import main as cli
from medvl.data.annotations.questions import MIXED, Question, questions_of
from medvl.data.corpora import path_vqa, slake, vqa_med, vqa_rad
from medvl.data.corpora.common.pickle_reader import read_plain_pickle
from medvl.data.corpora.common.tables import Plan
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import Manifest, ShardSource
from medvl.errors import CorpusError

CARDS = Path(__file__).parents[3] / "data_cards"


def by_id(plan: Plan) -> dict[str, Question]:
    return {question.id: question for record in plan.records for question in questions_of(record.sample)}


@pytest.mark.parametrize("form", ["mevf", "original"])
def test_vqa_rad_is_read_alike_in_both_forms_and_its_dirt_is_counted(tmp_path, deid, form):
    plan = vqa_rad.plan(write_rad(tmp_path, form), deid)
    questions = by_id(plan)
    assert [questions[str(n)].split for n in range(1, 9)] == ["train"] * 6 + ["test"] * 2
    assert questions["1"] == Question(
        id="1", question="Is the heart enlarged?", answer="Yes", answer_type="closed", kind="PRES", organ="CHEST",
        split="train", phrasing="freeform",
    )  # fmt: skip
    assert (questions["2"].answer, questions["3"].answer) == ("2", "right lung")
    assert (questions["3"].kind, questions["4"].kind, questions["8"].kind) == ("POS, PRES", "PRES", "ATTRIB")
    assert questions["4"].question == "Is it the patient's heart?"
    assert (questions["4"].answer, questions["5"].answer) == ("", "None")  # NULL is nothing, None is an answer
    assert questions["8"].phrasing == "para"
    assert plan.noticed == RAD_DIRT | ({"qid_text": 1} if form == "original" else {})


def test_the_official_split_of_vqa_rad_divides_questions_so_its_samples_are_mixed(tmp_path, deid):
    plan = vqa_rad.plan(write_rad(tmp_path), deid, split="official")
    assert {record.sample.split for record in plan.records} == {MIXED}
    first = plan.records[0].sample
    assert first.key == deid.image("synpic1.jpg")
    assert first.patient == deid.patient("synpic1.jpg")
    assert first.sections == {}
    assert Counter(question.split for question in questions_of(first)) == {"train": 4, "test": 2}


def test_the_image_disjoint_split_is_the_same_with_any_salt(tmp_path, deid):
    rows = [rad_row(n, f"synpic{n}.jpg", "What is it?", "mass") for n in range(400)]
    (tmp_path / "images").mkdir()
    (tmp_path / "trainset.json").write_text(json.dumps(rows))
    (tmp_path / "testset.json").write_text(json.dumps([rad_row("t", "synpic3.jpg", "What?", "mass")]))
    plans = [vqa_rad.plan(tmp_path, salt, split="image-disjoint") for salt in (deid, Deidentifier(b"x" * 32))]
    splits = [{question.id: question.split for question in by_id(plan).values()} for plan in plans]
    assert splits[0] == splits[1]
    assert splits[0]["t"] == splits[0]["3"]
    shares = Counter(splits[0].values())
    assert shares["train"] / 401 == pytest.approx(0.7, abs=0.06)
    assert shares["validate"] / 401 == pytest.approx(0.1, abs=0.05)
    assert {splits[0][str(n)] for n in (0, 1, 2, 4)} <= {"train", "validate", "test"}
    for record in plans[0].records:
        assert {question.split for question in questions_of(record.sample)} == {record.sample.split}


def test_slake_keeps_one_language_and_questions_without_an_answer(tmp_path, deid):
    plan = slake.plan(write_slake(tmp_path), deid)
    questions = by_id(plan)
    assert [questions[n].split for n in ("0", "2", "3", "1622")] == ["train", "train", "validate", "test"]
    assert (questions["2"].answer_type, questions["2"].kind, questions["3"].phrasing) == ("closed", "Modality", "kvqa")
    assert questions["1622"].answer == ""
    assert plan.noticed == {"other_language": 1, "no_answer": 1}
    assert [record.sample.extra["modality"] for record in plan.records] == ["X-Ray", "CT", "X-Ray", "X-Ray"]
    assert plan.records[0].sample.image == tmp_path / "imgs" / "xmlab1" / "source.jpg"
    chinese = by_id(slake.plan(tmp_path, deid, language="zh"))
    assert chinese["1"].answer == "肺"


def test_slake_is_read_under_the_other_name_of_its_validation_file(tmp_path, deid):
    plan = slake.plan(write_slake(tmp_path, "validation.json"), deid)
    assert len(plan.records) == 4


def test_vqa_med_takes_categories_from_files_and_references_with_their_alternatives(tmp_path, deid):
    plan = vqa_med.plan(write_vqa_med(tmp_path), deid)
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
    assert plan.noticed == {"several_answers": 1}
    assert all(record.sample.image.is_file() for record in plan.records)


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("form", ["qa.pkl", "vqa.pkl", "qa.json", "vqa.json"])
def test_path_vqa_is_read_alike_in_all_its_forms(tmp_path, deid, form, protocol):
    plan = path_vqa.plan(write_path_vqa(tmp_path, form, protocol), deid)
    assert [(q.id, q.answer, q.answer_type, q.kind) for q in by_id(plan).values()] == [
        ("train-1", "liver", "open", "what"),
        ("train-3", "yes", "closed", "is"),
        ("validate-1", "in the lobule", "open", "where"),
        ("test-1", "no", "closed", "is"),
    ]
    assert plan.noticed == {"duplicate": 1}
    assert [record.sample.split for record in plan.records] == ["train", "validate", "test"]
    assert all(record.sample.image.is_file() for record in plan.records)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_is_taken_apart_and_never_run(tmp_path, protocol):
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
    assert read_plain_pickle(path) == plain
    trace = tmp_path / "it-ran"
    path.write_bytes(pickle.dumps([{"x": Evil(trace)}], protocol))
    with pytest.raises(CorpusError, match="a pickle can run any program"):
        read_plain_pickle(path)
    assert not trace.exists()


def test_a_pickle_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "data.pkl"
    data = pickle.dumps([{"question": "what?"}] * 3)
    for end in (0, 1, 10, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(CorpusError, match=r"data\.pkl is no whole pickle"):
            read_plain_pickle(path)
    with pytest.raises(CorpusError, match="does not exist"):
        read_plain_pickle(tmp_path / "none.pkl")


def damage(path: Path, change: dict[str, object]) -> None:
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([rows[0] | change, *rows[1:]]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answer_type": "MAYBE"}, "an answer_type is neither CLOSED nor OPEN"),
        ({"image_name": "../secret.jpg"}, "does not lie in the folder of images"),
        ({"image_name": "/etc/passwd"}, "does not lie in the folder of images"),
        ({"image_name": ""}, "does not lie in the folder of images"),
        ({"qid": 2}, "1 question ids stand more than once, first 2"),
    ],
)
def test_a_wrong_row_of_vqa_rad_is_refused(tmp_path, deid, change, told):
    write_rad(tmp_path)
    damage(tmp_path / "trainset.json", change)
    with pytest.raises(CorpusError, match=told):
        vqa_rad.plan(tmp_path, deid)


def test_roots_that_are_no_release_are_named(tmp_path, deid):
    with pytest.raises(CorpusError, match="holds no folder VQA_RAD Image Folder or images"):
        vqa_rad.plan(tmp_path, deid)
    (tmp_path / "images").mkdir()
    with pytest.raises(CorpusError, match=r"neither VQA_RAD Dataset Public.json nor both of trainset.json"):
        vqa_rad.plan(tmp_path, deid)
    write_rad(tmp_path)
    (tmp_path / "VQA_RAD Dataset Public.json").write_text("[]")
    with pytest.raises(CorpusError, match="keep the files of one form"):
        vqa_rad.plan(tmp_path, deid)
    with pytest.raises(CorpusError, match=r"holds none of train\.json"):
        slake.plan(tmp_path, deid)
    with pytest.raises(CorpusError, match="holds neither C1_Modality_train.txt"):
        vqa_med.plan(tmp_path, deid)
    with pytest.raises(CorpusError, match=r"holds none of qas/train/train_qa\.pkl"):
        path_vqa.plan(tmp_path, deid)
    with pytest.raises(CorpusError, match="splits official, image-disjoint, not 'mine'"):
        vqa_rad.plan(tmp_path, deid, split="mine")
    with pytest.raises(CorpusError, match="languages en, zh, not 'fr'"):
        slake.plan(tmp_path, deid, language="fr")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a list of questions"),
        ("{}", "must hold a list of questions"),
        ("[1]", "question 1 lacks qid, "),
        (json.dumps([RAD_TRAIN[0], {"qid": 1}]), "question 2 lacks image_name, question, answer"),
    ],
)
def test_a_damaged_file_of_questions_is_named(tmp_path, deid, content, told):
    (write_rad(tmp_path) / "trainset.json").write_text(content)
    with pytest.raises(CorpusError, match=rf"trainset\.json.*{told}"):
        vqa_rad.plan(tmp_path, deid)


def test_a_damaged_table_of_vqa_med_is_named(tmp_path, deid):
    root = write_vqa_med(tmp_path)
    path = next(root.rglob("C1_Modality_train.txt"))
    path.write_bytes(b"synpic1|no answer\n")
    with pytest.raises(CorpusError, match=r"C1_Modality_train.txt, line 1 has 2 fields and not 3"):
        vqa_med.plan(root, deid)
    path.write_bytes(b"synpic1|\xff|no\n")
    with pytest.raises(CorpusError, match="is no text in UTF-8"):
        vqa_med.plan(root, deid)
    path.write_bytes(b"../x|is it?|no\n")
    with pytest.raises(CorpusError, match="does not lie in the folder of images"):
        vqa_med.plan(root, deid)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": None}, "every field must be a text"),
        ({"answer_type": "CLOSED"}, "must be closed or open, not 'CLOSED'"),
    ],
)
def test_questions_of_a_sample_are_checked(change, told):
    good = {"id": "1", "question": "what?", "answer": "", "answer_type": "open", "split": "test"}
    assert Question.from_json(good | {"later": 1}).as_json() == good
    with pytest.raises(CorpusError, match=told):
        Question.from_json(good | change)
    with pytest.raises(CorpusError, match="has only the fields id"):
        Question.from_json({"id": "1"})


def test_vqa_shards_round_trip_and_verify(tmp_path, monkeypatch, capsys):
    (tmp_path / "rad").mkdir()
    root, out = write_rad(tmp_path / "rad"), tmp_path / "shards"
    cli.main(["shards", "vqa-rad", "--root", str(root), "--out", str(out), "--workers", "1"])
    told = capsys.readouterr().out
    assert "6 questions in train, 2 questions in test" in told
    assert "1 also_in_train" in told
    manifest = Manifest.read(out / MIXED)
    assert manifest.warnings["answer_type_padded"] == 1
    source = ShardSource(out / MIXED)
    stored = [question for position in range(len(source)) for question in questions_of(source.sample(position))]
    assert {question.id for question in stored} == {str(n) for n in range(1, 9)}
    text = b"".join(path.read_bytes() for path in out.rglob("*.tar"))
    assert b"synpic" not in text
    cli.main(["verify", str(out)])
    assert "not the full release: 2 of 314 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "write"), [("slake", write_slake), ("vqa-med", write_vqa_med), ("path-vqa", write_path_vqa)]
)
def test_the_other_corpora_become_shards_by_split(tmp_path, monkeypatch, capsys, name, write):
    (tmp_path / "root").mkdir()
    root, out = write(tmp_path / "root"), tmp_path / "shards"
    cli.main(["shards", name, "--root", str(root), "--out", str(out), "--workers", "1"])
    assert {path.name for path in out.iterdir()} == {"train", "validate", "test"}
    pixels_HWC = ShardSource(out / "train").pixels(0, color=True)
    assert (np.ptp(pixels_HWC, axis=2).max() > 20) == (name == "path-vqa")  # the others are stored in grey
    assert SLAKE["train"][0]["question"] not in capsys.readouterr().err


@pytest.mark.parametrize("module", [vqa_rad, slake, vqa_med, path_vqa])
def test_data_cards_of_vqa_corpora_name_the_counts_that_verify_compares_with(module):
    card = (CARDS / f"{module.NAME}.md").read_text()
    for name, count in module.COUNTS.items():
        assert f"| {name} | {count:,} |" in card


@pytest.mark.real
def test_the_real_vqa_rad_has_the_counts_of_its_card(real_data, deid):
    plan = vqa_rad.plan(real_data / "vqa_rad", deid)
    questions = by_id(plan).values()
    assert len(plan.records) == vqa_rad.COUNTS["images"]
    assert Counter((q.split, q.phrasing) for q in questions) == {
        ("train", "freeform"): 1206, ("train", "para"): 591, ("train", "frame"): 1267,
        ("test", "freeform"): 308, ("test", "para"): 143,
    }  # fmt: skip
    assert Counter(q.answer_type for q in questions if q.split == "test") == {"closed": 272, "open": 179}
    assert (plan.noticed["also_in_train"], plan.noticed["answer_number"]) == (14, 10)
    assert plan.noticed["answer_type_padded"] == 2
    assert all(record.sample.image.is_file() for record in plan.records)
    counts = Counter(q.split for q in by_id(vqa_rad.plan(real_data / "vqa_rad", deid, split="image-disjoint")).values())
    assert counts == {"train": 2319, "validate": 387, "test": 809}
