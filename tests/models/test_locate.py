"""Checkpoints by their folder, their run, or their name on the hub."""

from pathlib import Path

import pytest
from helpers.errors import raises

import medvl
from medvl.errors import CheckpointError
from medvl.eval.core.publish import default_folder
from medvl.eval.core.results import checkpoint_sha256
from medvl.models import save
from medvl.models.locate import find_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings = {"image_encoder": "resnet_tiny", "text_encoder": "tiny_bert", "image_size": 32, "vocab_size": 50}
    for step, dim in (("step-1", 4), ("step-2", 8)):
        folder = tmp_path / "run" / "checkpoints" / step
        folder.mkdir(parents=True)
        save(medvl.create_model("convirt", projection_dim=dim, frozen_text_layers=0, **settings), folder)
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-1")
    (tmp_path / "run" / "last").symlink_to("checkpoints/step-2")
    return tmp_path / "run"


def test_a_run_stands_for_its_best_checkpoint(run: Path) -> None:
    assert medvl.load(run).config.projection_dim == 4
    assert medvl.create_model(str(run)).config.projection_dim == 4
    assert medvl.create_model("convirt", init_from=run, projection_dim=4, image_encoder="resnet_tiny",
                              text_encoder="tiny_bert", image_size=32, frozen_text_layers=0).config.projection_dim == 4  # fmt: skip
    assert checkpoint_sha256(run) == checkpoint_sha256(run / "best")
    assert default_folder(run, "x") == default_folder(run / "best", "x") == run / "eval/step-1/x"
    assert medvl.load(run / "last").config.projection_dim == 8
    (run / "best").unlink()
    assert medvl.load(run).config.projection_dim == 8
    assert find_checkpoint(run / "checkpoints") == run / "checkpoints"
    with raises(CheckpointError, "not_found"):
        medvl.load(run / "checkpoints")


@pytest.mark.parametrize("name", ["hf-hub:someone/something", "hf-hub:someone/something@v1", "someone/something"])
def test_a_model_of_the_hub_that_is_not_cached(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "not_found", names="someone/something"):
        medvl.load(name)


def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "malformed"):
        medvl.load("hf-hub:../../etc")
    (tmp_path / "runs").mkdir()
    with raises(CheckpointError, "not_found", names="runs/convrit does not exist"):  # a misspelt path
        medvl.load("runs/convrit")


def test_a_folder_of_runs_names_them(run: Path) -> None:
    with raises(CheckpointError, "not_found", names=f"give one of {run}"):
        medvl.load(run.parent)
    with raises(CheckpointError, "not_found", names=f"give one of {run}"):
        medvl.load(run.parent / "rnu")
    with raises(CheckpointError, "not_found", names=str(run / "checkpoints" / "step-1")):
        medvl.load(run / "checkpoints")


def test_the_name_of_a_system_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "not_found", names="create_model('convirt') makes a new model; give a run"):
        medvl.load("convirt")
