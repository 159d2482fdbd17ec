"""`scripts/zeroshot_chexpert.py` from the command line, on a CheXpert folder of noise images."""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import forked
from PIL import Image

import medvl
from medvl.data.privacy import Deidentifier, default_salt_file
from medvl.data.shards.format import Manifest
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.eval import load_prompts, read_results
from medvl.models.checkpoint import save
from medvl.models.checkpoint_folder import TRAIN_MANIFEST
from medvl.schema import FINDINGS

SCRIPT = Path(__file__).parents[3] / "scripts" / "zeroshot_chexpert.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a release of noise images (valid and test) and the checkpoint of an untrained
    model.
    """
    folder = tmp_path_factory.mktemp("chexpert")
    rng = np.random.default_rng(0)
    for split, first, count in (("valid", 1, 30), ("test", 100, 40)):
        rows = []
        for patient in range(first, first + count):
            view = "lateral" if patient % 5 == 4 else "frontal"
            image = (
                folder
                / "release"
                / split
                / f"patient{patient:05d}"
                / "study1"
                / f"view1_{view}.jpg"
            )
            image.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (60, 80), dtype=np.uint8)).save(image)
            path = f"CheXpert-v1.0-small/{image.relative_to(folder / 'release')}"
            projection = "PA" if patient % 2 else "AP"
            described = [path, "Female", 50, view.title(), "" if view == "lateral" else projection]
            rows.append(described + [float(label) for label in rng.random(len(FINDINGS)) < 0.4])
        with (folder / "release" / f"{split}.csv").open("w", newline="") as file:
            header = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *FINDINGS]
            csv.writer(file).writerows([header, *rows])
    model = medvl.create_model(
        "convirt",
        image_encoder="resnet_tiny",
        text_encoder="tiny_bert",
        tokenizer=train_wordpiece(list(load_prompts("chexpert_ensemble").texts())),
        frozen_text_layers=0,
        image_size=64,
        projection_dim=16,
    )
    (folder / "run" / "best").mkdir(parents=True)
    save(model, folder / "run" / "best")
    return folder


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--checkpoint",
        str(folder / "run" / "best"),
        *options,
        "--workers",
        "0",
    ]
    return forked.run(command)


# The first test that starts the script: libraries are imported, and two splits scored.
@pytest.mark.slow
def test_script_writes_results_and_page(folder):
    done = run(folder, "--root", str(folder / "release"), "--split", "test", "--thresholds-from",
        "valid",
               "--resamples", "20", "--frontal-only", "--out", str(folder / "out"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = read_results(folder / "out")
    assert results.details["images"] == 32  # of 40, one in five is lateral
    assert results.config["threshold_rule"] == "f1"
    assert len(results.inputs["checkpoint"]) == 64
    row = results.row("auroc", "macro_competition")
    assert f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]" in done.stdout
    assert done.stdout.rstrip().endswith("index.html")
    page = (folder / "out" / "index.html").read_text()
    assert "CheXpert, test, frontal views" in page
    assert str(folder) not in page + (folder / "out" / "results.json").read_text()
    lines = (folder / "out" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 32
    assert "patient" not in json.loads(lines[0])["key"]


def test_script_rejects_thresholds_from_test_split(folder):
    done = run(folder, "--root", str(folder / "release"), "--thresholds-from", "valid")
    assert done.returncode == 2
    assert "--thresholds-from must be another split than --split" in done.stderr


def test_script_reports_missing_release_in_one_line(folder):
    done = run(folder, "--root", str(folder))
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "valid.csv" in line


def test_script_reports_unknown_prompts_in_one_line(folder):
    done = run(folder, "--root", str(folder / "release"), "--prompts", "mine")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: no prompt set 'mine'")


def test_script_rejects_training_patients(folder):
    deid = Deidentifier.from_file(default_salt_file())
    none = {
        "planned": 0,
        "excluded_from_corpus": {},
        "excluded": {},
        "skipped": {},
        "skipped_keys": (),
        "warnings": {},
    }
    manifest = Manifest(
        corpus="chexpert", split="train", samples=0, shards=(), label_names=FINDINGS, options={},
        packages={}, patients=(deid.patient("patient00001"), deid.patient("patient09999")),
        salt=deid.fingerprint, **none,
    )  # fmt: skip
    content = json.dumps(dataclasses.asdict(manifest))
    (folder / "run" / "best" / TRAIN_MANIFEST).write_text(content)
    done = run(folder, "--root", str(folder / "release"))
    (folder / "run" / "best" / TRAIN_MANIFEST).unlink()
    assert done.returncode == 1
    assert "was trained on 1 of these patients" in done.stderr
