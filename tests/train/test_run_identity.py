"""Another command with the folder of a run: refused where it would train something else."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import train_fakes as fakes
from helpers.errors import raises

from medvl.errors import CheckpointError
from medvl.train.run import _start_weights

SETTINGS: dict[str, Any] = {
    "pretrained": False,
    "uncertain": "ignore",
    "data": {"train": "a", "valid": "b", "workers": 2, "image": {"size": 224}, "text": {"min_tokens": 3}},
}


def run(folder: Path, **changes: Any) -> None:
    settings = {**SETTINGS, **changes}
    start = settings.pop("start", {"init_from": "1f"})
    with fakes.fake_files():
        fakes.train(
            fakes.TwoTowers(),
            fakes.FakeLoader(20, 4),
            optim=fakes.optim(),
            config=fakes.config(folder / "run"),
            run={"settings": settings, "start": start},
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start": {"init_from": "2e"}}, "start.init_from"),
        ({"pretrained": True}, "recipe.pretrained"),
        ({"uncertain": "zeros"}, "recipe.uncertain"),
        ({"data": {**SETTINGS["data"], "image": {"size": 288}}}, "data.image.size"),
        ({"data": {**SETTINGS["data"], "text": {"min_tokens": 1}}}, "data.text.min_tokens"),
    ],
)
def test_a_finished_run_of_other_weights_or_samples_is_not_taken_for_this_one(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Commands that fine-tune several checkpoints share a default folder."""
    run(tmp_path)
    with raises(CheckpointError, "mismatch", field, names="another run_dir"):
        run(tmp_path, **changes)


def test_folders_and_processes_may_change(tmp_path: Path) -> None:
    """Shards are compared by their content, and processes make no difference."""
    run(tmp_path)
    before = (tmp_path / "run/last").resolve()
    run(tmp_path, data={**SETTINGS["data"], "train": "moved/a", "valid": "moved/b", "workers": 8, "valid_batch": 64})
    assert (tmp_path / "run/last").resolve() == before


def test_checkpoints_are_described_by_their_weights(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same, other = (
        _start_weights(SimpleNamespace(init_from=tmp_path / name, data=None)) for name in ("one", "same", "other")
    )
    assert one == same != other
    assert json.loads(json.dumps(one)) == one
    assert _start_weights(SimpleNamespace(init_from=Path("timm:vit_tiny"))) == {"init_from": "timm:vit_tiny"}
    assert _start_weights(SimpleNamespace(init_from=None)) == {}
