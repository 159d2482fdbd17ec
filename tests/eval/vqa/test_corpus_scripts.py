"""Scripts of VQA corpora, run as commands."""

import json
import subprocess
import sys
from pathlib import Path

from helpers import forked
from helpers.errors import raises
from helpers.vqa_corpora import rad_row, write_image, write_slake

from medvl.data.corpora.questions import vqa_rad
from medvl.errors import EvaluationError
from medvl.eval import VQAData, read_results

SCRIPT = Path(__file__).parents[3] / "scripts" / "vqa_rad.py"


def rad_root(folder: Path) -> Path:
    rows = [
        rad_row(n, f"synpic{n}.jpg", "Is there a mass?", ("Yes", "No")[n % 2], answer_type="CLOSED")
        for n in range(8)
    ]
    (folder / "trainset.json").write_text(json.dumps(rows))
    (folder / "testset.json").write_text(
        json.dumps([row | {"qid": 10 + row["qid"]} for row in rows])
    )
    write_image(folder / "images" / "synpic0.jpg", 0)
    return folder


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(folder), "--resamples", "10", *options]
    return forked.run(command)


def test_vqa_rad_script_evaluates_predictions_and_reports_errors(tmp_path):
    root = rad_root(tmp_path)
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        "".join(json.dumps({"id": str(10 + n), "answer": "yes"}) + "\n" for n in range(8))
    )
    done = run(
        root, "--predictions", str(answers), "--published-protocols", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    assert "8 questions on 8 images, 2 answers in the vocabulary" in done.stdout
    assert read_results(tmp_path / "out").row("accuracy", "closed").value == 0.5
    assert "m3ae" in done.stdout
    answers.write_text('{"id": "99", "answer": "yes"}')
    done = run(root, "--predictions", str(answers))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "first 99" in done.stderr


def test_split_definition_is_read_from_samples(tmp_path, deid):
    samples = (
        vqa_rad.VQARAD(root=rad_root(tmp_path), split="image-disjoint").plan(deid).iter_samples()
    )
    assert VQAData.from_samples(samples).split_id == "image-disjoint"
    with raises(EvaluationError, "empty"):
        VQAData.from_samples([])


def test_slake_script_evaluates_baselines(tmp_path):
    script = SCRIPT.with_name("slake.py")
    command = [
        sys.executable,
        str(script),
        "--root",
        str(write_slake(tmp_path)),
        "--resamples",
        "10",
    ]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    assert "slake, official split, test, protocol medvl: 1 questions on 1 images" in done.stdout
