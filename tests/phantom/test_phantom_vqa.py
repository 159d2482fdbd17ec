"""Phantom VQA-RAD and SLAKE: correct answers, balanced wordings, and the real layouts."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises
from PIL import Image

from medvl.cli import main as cli
from medvl.data.corpora.questions import slake, vqa_rad
from medvl.errors import CorpusError
from medvl.eval import VQAData, evaluate_answers
from medvl.phantom import World, sample_slice, vqa_images, write_slake, write_vqa_rad
from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.vqa import KINDS, balanced_rows
from medvl.phantom.layouts.questions import CANDIDATES
from medvl.phantom.population.volumes import MODALITIES, ORGANS
from medvl.phantom.rendering.draw import _TISSUES, draw_slice

PATIENTS, SIZE = 120, 48


@pytest.fixture(scope="module")
def rad(tmp_path_factory) -> Path:
    return write_vqa_rad(tmp_path_factory.mktemp("rad"), patients=PATIENTS, size=SIZE, workers=1)


@pytest.fixture(scope="module")
def slake_root(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("slake")
    return write_slake(out, patients=60, size=SIZE, split=(0.6, 0.2, 0.2), workers=1)


def content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_every_kind_has_open_and_closed_questions():
    counts_of_kinds = Counter(
        (question.kind, question.closed)
        for patient in World(2).patients(80)
        for image in vqa_images(patient)
        for question in image.questions
    )
    assert {kind for kind, _ in counts_of_kinds} == set(KINDS)
    for kind in ("modality", "plane", "organ", "laterality", "count", "size"):
        assert counts_of_kinds[kind, True] > 10
        assert counts_of_kinds[kind, False] > 10


def test_answers_agree_with_the_ground_truth():
    for patient in World(2).patients(60):
        study = patient.studies[-1]
        images = vqa_images(patient)
        assert [image.plane for image in images[: len(study.views)]] == [
            "lateral" if v.lateral else "frontal" for v in study.views
        ]
        severity = {finding.label: finding.severity for finding in study.findings}
        for image in images:
            answers = {question.question: question.answer for question in image.questions}
            assert {
                answers.get("What modality is this?"),
                answers.get("How was this image taken?"),
            } == {
                image.modality,
                None,
            }
            for text, truth in (("a CT scan", "CT"), ("an MRI", "MRI"), ("an X-ray", "X-ray")):
                assert answers.get(f"Is this {text}?") in (
                    None,
                    "yes" if image.modality == truth else "no",
                )
            for organ in ORGANS:
                assert answers.get(f"Is this an image of the {organ}?") in (
                    None,
                    "yes" if image.organ == organ else "no",
                )
            if image.plane == "frontal":
                if "Cardiomegaly" not in severity:
                    assert answers["Is the heart enlarged?"] == "no"
                elif severity["Cardiomegaly"] == "mild":
                    assert "Is the heart enlarged?" not in answers
                assert answers.get("How severe is the cardiomegaly?") == severity.get(
                    "Cardiomegaly"
                )
                assert (
                    answers.get("Is there pneumothorax?", "no") == "no"
                    or severity["Pneumothorax"] != "mild"
                )
                for finding in study.findings:
                    name = NAMES[finding.label]
                    assert answers.get(f"How severe is the {name}?") in (None, finding.severity)
                    side = {"bilateral": "both sides"}.get(finding.side, finding.side)
                    assert answers.get(f"On which side is the {name}?") in (None, side)
                    for side in ("left", "right"):
                        correct = "yes" if finding.side == side else "no"
                        assert answers.get(f"Is the {name} on the {side}?") in (None, correct)
                    if finding.label == "Lung Lesion":
                        count = str(len(finding.parts))
                        assert answers.get("How many nodules are there?") in (None, count)


def test_questions_of_a_patient_are_reproducible():
    images = vqa_images(World(9).patient(3))
    assert sum(len(image.questions) for image in images) > 0
    assert images == vqa_images(World(9).patient(3))


def test_masses_are_drawn_on_their_side():
    checked = 0
    for number in range(60):
        part = sample_slice((7, number))
        bright = draw_slice(part, 256) if part.modality == "CT" and part.organ == "chest" else None
        if bright is None:
            continue
        bone, mass = (level * 4095 for level in (_TISSUES["bone"][0], _TISSUES["mass"][0]))
        between = ((bright > 0.72 * 4095) & (bright < (bone + mass) / 2)).astype(np.uint8)
        columns = np.flatnonzero(between.sum(axis=0) > 4)
        lateral_columns = [
            column for column in columns if abs(column - 128) > 28
        ]  # the bones of the midline
        checked += 1
        assert bool(lateral_columns) == bool(part.masses)
        if lateral_columns:
            assert ("left" if np.mean(lateral_columns) > 128 else "right") == part.side
    assert checked > 5


@pytest.mark.parametrize("organ", ORGANS)
@pytest.mark.parametrize("modality", MODALITIES)
def test_slices_agree_between_sizes_and_differ_from_each_other(organ, modality):
    slices = [
        part
        for number in range(120)
        if (part := sample_slice((3, number))).organ == organ and part.modality == modality
    ]
    large, small = draw_slice(slices[0], 192), draw_slice(slices[0], 96)
    assert large.shape == (192, 192)
    assert large.dtype == np.uint16
    halved = large.reshape(96, 2, 96, 2).mean(axis=(1, 3))
    assert np.corrcoef(halved.ravel(), small.ravel())[0, 1] > 0.97
    assert np.array_equal(small, draw_slice(slices[0], 96))
    assert not np.array_equal(small, draw_slice(slices[1], 96))


def test_balanced_rows_limit_every_answer_to_the_second_most_frequent():
    rows = [("heart", "yes", f"a{n}") for n in range(10)] + [
        ("heart", "no", f"b{n}") for n in range(4)
    ]
    rows += [
        ("plane", answer, f"{answer}{n}")
        for answer, count in (("axial", 9), ("frontal", 5), ("lateral", 2))
        for n in range(count)
    ]
    rows += [("alone", "yes", "c")]
    kept = balanced_rows(rows)
    counts = Counter(row[:2] for row, keep in zip(rows, kept, strict=True) if keep)
    assert counts == {
        ("heart", "yes"): 4,
        ("heart", "no"): 4,
        ("plane", "axial"): 5,
        ("plane", "frontal"): 5,
        ("plane", "lateral"): 2,
    }
    order = np.random.default_rng(0).permutation(len(rows))
    again = balanced_rows([rows[place] for place in order])
    assert [kept[place] for place in order] == again  # the kept rows depend on their names only


def test_vqa_rad_has_the_layout_and_fields_of_the_release(rad, deid):
    rows = {name: json.loads((rad / f"{name}set.json").read_text()) for name in ("train", "test")}
    everything = rows["train"] + rows["test"]
    assert {tuple(row) for row in everything} == {
        (
            "qid",
            "image_name",
            "image_organ",
            "answer",
            "answer_type",
            "question_type",
            "question",
            "phrase_type",
        )
    }
    assert sorted(row["qid"] for row in everything) == list(range(1, len(everything) + 1))
    assert {row["image_organ"] for row in everything} == {"HEAD", "CHEST", "ABD"}
    assert not {row["image_name"] for row in rows["train"]} & {
        row["image_name"] for row in rows["test"]
    }
    with Image.open(rad / "images" / everything[0]["image_name"]) as image:
        assert (image.mode, max(image.size)) == ("L", SIZE)
    plan = vqa_rad.VQARAD(root=rad).plan(deid)
    assert {record.sample.split for record in plan.records} == {"train", "test"}
    assert not plan.warnings


def test_vqa_rad_splits_share_no_patient(rad):
    patients: dict[str, set[int]] = {}
    for split in ("train", "test"):
        names = {row["image_name"] for row in json.loads((rad / f"{split}set.json").read_text())}
        patients[split] = {
            int(name.removeprefix("synpic").removesuffix(".jpg")) // 8 for name in names
        }
    assert patients["test"]
    assert not patients["train"] & patients["test"]


def test_answers_are_balanced_per_wording_and_split(rad):
    for split in ("train", "test"):
        counts: dict[str, Counter[str]] = {}
        for row in json.loads((rad / f"{split}set.json").read_text()):
            counts.setdefault(row["question"], Counter())[row["answer"]] += 1
        for question, answers in counts.items():
            top, second, *_ = sorted(answers.values(), reverse=True)
            assert top == second, question


def test_question_only_baselines_are_near_chance(rad, deid):
    data = VQAData.from_samples(vqa_rad.VQARAD(root=rad).plan(deid).iter_samples())
    result = evaluate_answers(data, resamples=0).results
    for name in ("majority", "majority_by_kind", "question_lookup", "question_only"):
        assert result.row("accuracy", "closed", f"baseline: {name}").value <= 0.55
        assert result.row("accuracy", "overall", f"baseline: {name}").value <= 0.5
    assert result.row("ceiling", "overall").value > 0.98


def test_slake_has_the_layout_and_fields_of_the_release(slake_root, deid):
    rows = [
        row
        for name in ("train", "validate", "test")
        for row in json.loads((slake_root / f"{name}.json").read_text())
    ]
    assert set(rows[0]) == {
        "img_id", "img_name", "question", "answer", "q_lang", "location", "modality", "answer_type",
        "base_type", "content_type", "triple", "qid",
    }  # fmt: skip
    assert all(row["img_name"] == f"xmlab{row['img_id']}/source.jpg" for row in rows)
    assert {row["modality"] for row in rows} == {"X-ray", "CT", "MRI"}
    plan = slake.SLAKE(root=slake_root).plan(deid)
    assert {record.sample.split for record in plan.records} == {"train", "validate", "test"}
    assert all(record.sample.image.is_file() for record in plan.records)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("write", [write_vqa_rad, write_slake])
def test_output_is_independent_of_workers_and_repetition(tmp_path, write):
    one = write(tmp_path / "one", patients=12, size=32, workers=1)
    two = write(tmp_path / "two", patients=12, size=32, workers=2)
    assert content(one) == content(two)
    stamps = {path: path.stat().st_mtime_ns for path in one.rglob("*.json")}
    write(one, patients=12, size=32, workers=1)
    assert {path: path.stat().st_mtime_ns for path in one.rglob("*.json")} == stamps
    with raises(CorpusError, "exists", "out", names="another seed"):
        write(one, patients=12, size=32, seed=4, workers=1)


def test_interrupted_run_is_completed(tmp_path):
    root = write_vqa_rad(tmp_path, patients=12, size=32, workers=1)
    complete = content(root)
    (root / "trainset.json").unlink()
    (root / "testset.json").write_text("[")
    write_vqa_rad(tmp_path, patients=12, size=32, workers=1)
    assert content(root) == complete
    assert CANDIDATES in complete


def test_converters_read_what_the_commands_write(tmp_path, monkeypatch, capsys):
    for name in ("vqa-rad", "slake"):
        out = tmp_path / name
        cli.main(
            [
                "phantom",
                name,
                "--out",
                str(out),
                "--patients",
                "12",
                "--size",
                "32",
                "--workers",
                "1",
            ]
        )
        assert f"Next: medvl shards {name} --root {out}" in capsys.readouterr().out
        cli.main(["shards", name, "--root", str(out), "--out", f"{out}-shards", "--workers", "1"])
        assert "questions in train" in capsys.readouterr().out
