"""Checkpoints by their folder, their run, or their name on the hub."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
from helpers.errors import raises

import medvl
from medvl.common.files import sha256
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import CheckpointError, ConfigError
from medvl.eval.core.results import checkpoint_sha256, default_folder
from medvl.models import save
from medvl.models.checkpoint_folder import described_model, detector_of, find_checkpoint

TINY = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 32,
    "frozen_text_layers": 0,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, dim in (("step-1", 4), ("step-2", 8)):
        folder = tmp_path / "run" / "checkpoints" / step
        folder.mkdir(parents=True)
        save(medvl.create_model("convirt", projection_dim=dim, vocab_size=50, **TINY), folder)
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-1")
    (tmp_path / "run" / "last").symlink_to("checkpoints/step-2")
    return tmp_path / "run"


def test_a_run_stands_for_its_best_checkpoint(run: Path) -> None:
    assert medvl.load(run).config.projection_dim == 4
    assert medvl.create_model(str(run)).config.projection_dim == 4
    assert medvl.create_model("convirt", init_from=run, projection_dim=4,
        image_encoder="resnet_tiny",
                              text_encoder="tiny_bert", image_size=32,
                              frozen_text_layers=0).config.projection_dim == 4  # fmt: skip
    assert checkpoint_sha256(run) == checkpoint_sha256(run / "best")
    assert default_folder(run, "x") == default_folder(run / "best", "x") == run / "eval/step-1/x"
    assert medvl.load(run / "last").config.projection_dim == 8
    (run / "best").unlink()
    assert medvl.load(run).config.projection_dim == 8
    assert find_checkpoint(run / "checkpoints") == run / "checkpoints"
    with raises(CheckpointError, "not_found"):
        medvl.load(run / "checkpoints")


@pytest.mark.parametrize("name", ["hf-hub:someone/something", "hf-hub:someone/something@v1"])
def test_a_model_of_the_hub_that_is_not_cached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "not_found", names="someone/something"):
        medvl.load(name)


def test_names_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError, "malformed"):
        medvl.load("hf-hub:../../etc")
    for name in ("runs/convirt", "someone/something@v1"):  # never looked up on the hub
        with raises(
            CheckpointError, "not_found", names=f"for a model of the hub write hf-hub:{name}"
        ):
            medvl.load(name)
        with raises(CheckpointError, "not_found", names=f"hf-hub:{name}"):
            medvl.create_model("convirt", init_from=name)
    with raises(ConfigError, "unknown_name", names="hf-hub:runs/convirt"):
        medvl.create_model("runs/convirt")
    (tmp_path / "runs").mkdir()
    with raises(
        CheckpointError, "not_found", names="runs/convrit does not exist"
    ):  # a misspelt path
        medvl.load("runs/convrit")


def test_a_folder_of_runs_names_them(run: Path) -> None:
    with raises(CheckpointError, "not_found", names=f"give one of {run}"):
        medvl.load(run.parent)
    with raises(CheckpointError, "not_found", names=f"give one of {run}"):
        medvl.load(run.parent / "rnu")
    with raises(CheckpointError, "not_found", names=str(run / "checkpoints" / "step-1")):
        medvl.load(run / "checkpoints")


def test_the_name_of_a_system_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(
        CheckpointError, "not_found", names="create_model('convirt') makes a new model; give a run"
    ):
        medvl.load("convirt")


@pytest.mark.parametrize(
    "lost", ["complete.json", "train_manifest.json", "ancestor_manifests.json", "tokenizer"]
)
def test_a_checkpoint_that_was_copied_in_part_is_refused(lost: str, run: Path) -> None:
    """Without its manifests, patients of its training would be tested on unnoticed."""
    folder = run / "checkpoints" / "step-1"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "files": [lost]}))
    for read in (medvl.load, described_model, detector_of):
        with raises(CheckpointError, "missing", names=lost):
            read(folder)


def test_a_checkpoint_of_a_run_is_not_loaded_without_its_marker(run: Path) -> None:
    folder = run / "checkpoints" / "step-1"
    save(medvl.load(folder), folder, {"marker": "complete.json", "recipe": "convirt"})
    with raises(CheckpointError, "missing", names="complete.json"):
        medvl.load(folder)
    with raises(CheckpointError, "missing", names="complete.json"):
        medvl.create_model("convirt", init_from=folder)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in folder.glob("*.json")
    }
    (folder / "complete.json").write_text(json.dumps({"files": files}))
    model = medvl.load(folder)
    assert model.provenance == {"recipe": "convirt"}
    model.save_pretrained(run / "given")
    assert medvl.load(run / "given").provenance == {"recipe": "convirt"}
    (run / "checkpoints" / "step-2" / "train_state").mkdir()  # of an earlier version of medvl
    config = run / "checkpoints" / "step-2" / "config.json"
    content = json.loads(config.read_text())
    del content["files"]
    config.write_text(json.dumps(content))
    with raises(CheckpointError, "missing", names="complete.json"):
        medvl.load(run / "last")


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "complete.json", "train_manifest.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_refused_at_once(file: str, kind: str, run: Path) -> None:
    folder = run / "checkpoints" / "step-1"
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file) if kind == "pipe" else (folder / file).mkdir()
    with raises(CheckpointError, "not_a_file", names=str(folder / file)):
        medvl.load(folder)


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "image_head.0.weight"), (float("inf"), "text_head.0.bias")]
)
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, name: str, run: Path
) -> None:
    path = run / "checkpoints" / "step-1" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[name].view(-1)[1] = value
    safetensors.torch.save_file(tensors, path)
    for read in (
        medvl.load,
        lambda folder: medvl.create_model("convirt", init_from=folder, projection_dim=4, **TINY),
    ):
        with raises(CheckpointError, "nonfinite", names=name):
            read(run / "best")


@pytest.mark.parametrize(
    "change", ['{"model": 1, "model": 2', '"x": 1e400, "format"', '"x": NaN, "format"']
)
def test_a_configuration_that_loses_values_is_refused(change: str, run: Path) -> None:
    path = run / "checkpoints" / "step-1" / "config.json"
    text = path.read_text()
    path.write_text(
        text.replace("{", change + ",", 1)
        if change.startswith("{")
        else text.replace('"format"', change, 1)
    )
    with raises(CheckpointError, "malformed", names="config.json"):
        medvl.load(run)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(run: Path) -> None:
    folder = run / "checkpoints" / "step-1"
    train_wordpiece(
        [f"{chr(97 + n // 20)}{chr(97 + n % 20)}" for n in range(300)],
        vocab_size=200,
        min_frequency=1,
    ).save(folder / "tokenizer")
    with raises(CheckpointError, "mismatch", names="embeddings"):
        medvl.load(folder)


@pytest.mark.parametrize("link", ["eval", "eval/step-1", "eval/step-1/retrieval"])
def test_results_are_not_written_where_a_link_in_a_run_leads(
    run: Path, tmp_path: Path, link: str
) -> None:
    (tmp_path / "documents").mkdir()
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    (run / link).symlink_to(tmp_path / "documents")
    with raises(ConfigError, "outside_folder", names=link):
        default_folder(run, "retrieval")
