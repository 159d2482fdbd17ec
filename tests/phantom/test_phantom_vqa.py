"""The phantom as VQA-RAD and SLAKE: questions that are true, that the wording does not answer, in the real layouts."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medvl.cli import main as cli
from medvl.data.corpora import slake, vqa_rad
from medvl.errors import CorpusError
from medvl.eval import VQAData, judge_answers
from medvl.phantom import World, take_slice, vqa_images, write_slake, write_vqa_rad
from medvl.phantom.language.vqa import KINDS, balance
from medvl.phantom.layouts.vqa_rad_slake import CANDIDATES
from medvl.phantom.rendering.ct_mr_slices import _TISSUES, MODALITIES, ORGANS, draw_slice

PATIENTS, SIZE = 120, 48


@pytest.fixture(scope="module")
def rad(tmp_path_factory) -> Path:
    return write_vqa_rad(tmp_path_factory.mktemp("rad"), patients=PATIENTS, size=SIZE, workers=1)


@pytest.fixture(scope="module")
def tube(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("slake")
    return write_slake(out, patients=60, size=SIZE, split=(0.6, 0.2, 0.2), workers=1)


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_every_kind_of_question_is_asked_open_or_closed():
    asked = Counter(
        (one.kind, one.closed)
        for patient in World(2).patients(80)
        for image in vqa_images(patient)
        for one in image.asked
    )
    assert {kind for kind, _ in asked} == set(KINDS)
    for kind in ("modality", "plane", "organ", "laterality", "count", "size"):
        assert asked[kind, True] > 10
        assert asked[kind, False] > 10


def test_answers_are_true_of_the_image():
    for patient in World(2).patients(60):
        study = patient.studies[-1]
        images = vqa_images(patient)
        assert [image.plane for image in images[: len(study.views)]] == [
            "lateral" if v.lateral else "frontal" for v in study.views
        ]
        severity = {finding.label: finding.severity for finding in study.findings}
        for image in images:
            said = {one.question: one.answer for one in image.asked}
            assert {said.get("What modality is this?"), said.get("How was this image taken?")} == {image.modality, None}
            for text, truth in (("a CT scan", "CT"), ("an MRI", "MRI"), ("an X-ray", "X-ray")):
                assert said.get(f"Is this {text}?") in (None, "yes" if image.modality == truth else "no")
            for organ in ORGANS:
                assert said.get(f"Is this an image of the {organ}?") in (None, "yes" if image.organ == organ else "no")
            if image.plane == "frontal":
                if "Cardiomegaly" not in severity:
                    assert said["Is the heart enlarged?"] == "no"
                elif severity["Cardiomegaly"] == "mild":
                    assert "Is the heart enlarged?" not in said
                assert said.get("How severe is the cardiomegaly?") == severity.get("Cardiomegaly")
                assert said.get("Is there pneumothorax?", "no") == "no" or severity["Pneumothorax"] != "mild"


def test_masses_are_where_and_as_many_as_the_answers_say():
    seen = 0
    for number in range(60):
        part = take_slice((7, number))
        bright = draw_slice(part, 256) if part.modality == "CT" and part.organ == "chest" else None
        if bright is None:
            continue
        bone, mass = (level * 4095 for level in (_TISSUES["bone"][0], _TISSUES["mass"][0]))
        between = ((bright > 0.72 * 4095) & (bright < (bone + mass) / 2)).astype(np.uint8)
        columns = np.flatnonzero(between.sum(axis=0) > 4)
        away = [column for column in columns if abs(column - 128) > 28]  # the bones of the midline
        seen += 1
        assert bool(away) == bool(part.masses)
        if away:
            assert ("left" if np.mean(away) > 128 else "right") == part.side
    assert seen > 5


@pytest.mark.parametrize("organ", ORGANS)
@pytest.mark.parametrize("modality", MODALITIES)
def test_slices_look_alike_at_any_size_and_differ_from_each_other(organ, modality):
    found = [
        part for number in range(120) if (part := take_slice((3, number))).organ == organ and part.modality == modality
    ]
    large, small = draw_slice(found[0], 192), draw_slice(found[0], 96)
    assert large.shape == (192, 192)
    assert large.dtype == np.uint16
    halved = large.reshape(96, 2, 96, 2).mean(axis=(1, 3))
    assert np.corrcoef(halved.ravel(), small.ravel())[0, 1] > 0.97
    assert np.array_equal(small, draw_slice(found[0], 96))
    assert not np.array_equal(small, draw_slice(found[1], 96))


def test_balancing_leaves_no_answer_ahead_of_the_second():
    rows = [("heart", "yes", f"a{n}") for n in range(10)] + [("heart", "no", f"b{n}") for n in range(4)]
    rows += [
        ("plane", answer, f"{answer}{n}")
        for answer, count in (("axial", 9), ("frontal", 5), ("lateral", 2))
        for n in range(count)
    ]
    rows += [("alone", "yes", "c")]
    kept = balance(rows)
    counts = Counter(row[:2] for row, keep in zip(rows, kept, strict=True) if keep)
    assert counts == {
        ("heart", "yes"): 4,
        ("heart", "no"): 4,
        ("plane", "axial"): 5,
        ("plane", "frontal"): 5,
        ("plane", "lateral"): 2,
    }
    order = np.random.default_rng(0).permutation(len(rows))
    again = balance([rows[place] for place in order])
    assert [kept[place] for place in order] == again  # which rows stay hangs on their names alone


def test_phantom_vqa_rad_has_the_layout_and_the_fields_of_the_release(rad, deid):
    rows = {name: json.loads((rad / f"{name}set.json").read_text()) for name in ("train", "test")}
    everything = rows["train"] + rows["test"]
    assert {tuple(row) for row in everything} == {
        ("qid", "image_name", "image_organ", "answer", "answer_type", "question_type", "question", "phrase_type")
    }
    assert sorted(row["qid"] for row in everything) == list(range(1, len(everything) + 1))
    assert {row["image_organ"] for row in everything} == {"HEAD", "CHEST", "ABD"}
    assert not {row["image_name"] for row in rows["train"]} & {row["image_name"] for row in rows["test"]}
    with Image.open(rad / "images" / everything[0]["image_name"]) as image:
        assert (image.mode, max(image.size)) == ("L", SIZE)
    plan = vqa_rad.plan(rad, deid)
    assert {record.sample.split for record in plan.records} == {"train", "test"}
    assert not plan.warnings


def test_splits_of_the_phantom_share_no_patient(rad):
    patients: dict[str, set[int]] = {}
    for split in ("train", "test"):
        names = {row["image_name"] for row in json.loads((rad / f"{split}set.json").read_text())}
        patients[split] = {int(name.removeprefix("synpic").removesuffix(".jpg")) // 8 for name in names}
    assert patients["test"]
    assert not patients["train"] & patients["test"]


def test_closed_answers_are_balanced_a_wording_in_each_split(rad):
    for split in ("train", "test"):
        counts: dict[str, Counter[str]] = {}
        for row in json.loads((rad / f"{split}set.json").read_text()):
            counts.setdefault(row["question"], Counter())[row["answer"]] += 1
        for question, found in counts.items():
            top, second, *_ = sorted(found.values(), reverse=True)
            assert top == second, question


def test_the_question_alone_is_not_enough(rad, deid):
    data = VQAData.from_samples(vqa_rad.plan(rad, deid).iter_samples())
    result = judge_answers(data, resamples=0).results
    for name in ("majority", "majority_by_kind", "question_lookup", "question_only"):
        assert result.row("accuracy", "closed", f"baseline: {name}").value <= 0.55
        assert result.row("accuracy", "overall", f"baseline: {name}").value <= 0.5
    assert result.row("ceiling", "overall").value > 0.98


def test_phantom_slake_has_the_layout_and_the_fields_of_the_release(tube, deid):
    rows = [row for name in ("train", "validate", "test") for row in json.loads((tube / f"{name}.json").read_text())]
    assert set(rows[0]) == {
        "img_id", "img_name", "question", "answer", "q_lang", "location", "modality", "answer_type", "base_type",
        "content_type", "triple", "qid",
    }  # fmt: skip
    assert all(row["img_name"] == f"xmlab{row['img_id']}/source.jpg" for row in rows)
    assert {row["modality"] for row in rows} == {"X-ray", "CT", "MRI"}
    plan = slake.plan(tube, deid)
    assert {record.sample.split for record in plan.records} == {"train", "validate", "test"}
    assert all(record.sample.image.is_file() for record in plan.records)


@pytest.mark.parametrize("write", [write_vqa_rad, write_slake])
def test_neither_workers_nor_a_second_run_change_a_byte(tmp_path, write):
    one = write(tmp_path / "one", patients=12, size=32, workers=1)
    two = write(tmp_path / "two", patients=12, size=32, workers=2)
    assert content(one) == content(two)
    stamps = {path: path.stat().st_mtime_ns for path in one.rglob("*.json")}
    write(one, patients=12, size=32, workers=1)
    assert {path: path.stat().st_mtime_ns for path in one.rglob("*.json")} == stamps
    with pytest.raises(CorpusError, match="another seed"):
        write(one, patients=12, size=32, seed=4, workers=1)


def test_a_run_cut_off_before_its_questions_were_thinned_is_completed(tmp_path):
    root = write_vqa_rad(tmp_path, patients=12, size=32, workers=1)
    whole = content(root)
    (root / "trainset.json").unlink()
    (root / "testset.json").write_text("[")
    write_vqa_rad(tmp_path, patients=12, size=32, workers=1)
    assert content(root) == whole
    assert CANDIDATES in whole


def test_the_commands_write_what_the_converters_read(tmp_path, monkeypatch, capsys):
    for name in ("vqa-rad", "slake"):
        out = tmp_path / name
        cli.main(["phantom", name, "--out", str(out), "--patients", "12", "--size", "32", "--workers", "1"])
        assert f"Next: medvl shards {name} --root {out}" in capsys.readouterr().out
        cli.main(["shards", name, "--root", str(out), "--out", f"{out}-shards", "--workers", "1"])
        assert "questions in train" in capsys.readouterr().out
