"""The checkpoint `demo` of the package, and the radiograph that the phantom draws for it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises

import medvl
from medvl.cli.infer import infer as infer_command
from medvl.data.images.read import read_pixels
from medvl.errors import CheckpointError, ConfigError, EvaluationError
from medvl.eval.core.results import evaluations_of
from medvl.eval.zero_shot_classification.calibration import calibration_for, calibration_path
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.models.checkpoint_folder import MARKER, find_checkpoint
from medvl.phantom import World, compose_report, draw, write_example

FOLDER = find_checkpoint("demo")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_is_small_and_has_a_card_and_hashes():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    assert "not a medical device" in (FOLDER / "README.md").read_text()
    listed = json.loads((FOLDER / MARKER).read_text())["files"]
    assert {str(path.relative_to(FOLDER)) for path in files} == {*listed, MARKER}


def test_it_scores_what_the_example_shows_above_what_it_does_not():
    model = medvl.load("demo")
    impression = write_example("chest.png")
    assert "large pleural effusion" in impression
    scores = medvl.infer(model, "chest.png")
    assert scores["Pleural Effusion"] > 0.5 > scores["Pneumothorax"]
    assert scores["Cardiomegaly"] > 0.5 > scores["Edema"]


def test_a_damaged_copy_is_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "copy")
    weights = tmp_path / "copy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with raises(CheckpointError, "mismatch", names="model.safetensors"):
        medvl.load(tmp_path / "copy")


def test_the_command_draws_an_example_once(capsys):
    table = infer_command(checkpoint="demo")
    assert "Drew demo.png" in capsys.readouterr().err
    first = table.split("value", 1)[1].split("\n")[1]
    assert first.startswith("Pleural Effusion")
    drawn = Path("demo.png").read_bytes()
    infer_command(checkpoint="demo")
    assert "Drew" not in capsys.readouterr().err
    assert Path("demo.png").read_bytes() == drawn


def test_its_scores_are_calibrated_and_a_calibration_of_ones_own_comes_first():
    prompts = load_prompts("chexpert_ensemble")
    found, _ = calibration_for(Path("demo"), prompts)
    assert found.findings["Pleural Effusion"].slope > 0
    own = calibration_path(Path("demo"), prompts.name)
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    with pytest.raises(EvaluationError):
        calibration_for(Path("demo"), prompts)


def test_other_checkpoints_need_images():
    with raises(ConfigError, "missing", names="medvl infer"):
        infer_command(checkpoint="runs/convirt")


def test_a_folder_of_this_name_comes_first():
    Path("demo").mkdir()
    assert find_checkpoint("demo") == Path("demo")


def test_evaluations_are_not_written_into_the_package():
    assert not evaluations_of("demo").is_absolute()
    assert evaluations_of("demo").parts[:2] == ("runs", "demo")


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".dcm"])
def test_the_example_is_the_same_image_in_every_format(suffix):
    study = World(seed=1).patient(48).studies[0]
    assert write_example(f"new/chest{suffix}", size=128) == compose_report(study).impression
    read_HW = read_pixels(Path(f"new/chest{suffix}"))[0].astype(float)
    drawn_HW = draw(study.views[0], 128).astype(float)
    assert read_HW.shape == drawn_HW.shape
    assert np.corrcoef(read_HW.ravel(), drawn_HW.ravel())[0, 1] > 0.98


def test_another_suffix_is_refused():
    with raises(ConfigError, "out_of_range", names=".gif"):
        write_example("chest.gif")
    assert not list(Path().iterdir())


def test_its_embeddings_are_finite_and_of_unit_length():
    model = medvl.load("demo")
    write_example("chest.png", size=128)
    embedding_BE = model.encode_image(model.transform("chest.png"))
    torch.testing.assert_close(embedding_BE.norm(dim=1), torch.ones(1))
