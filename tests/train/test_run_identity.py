"""Another command with the folder of a run: refused where it would train something else."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from helpers import train_fakes as fakes
from helpers.errors import raises

from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import CheckpointError
from medvl.train.loop import state
from medvl.train.run import describe_start

SETTINGS: dict[str, Any] = {
    "pretrained": False,
    "uncertain": "ignore",
    "data": {
        "train": "a",
        "valid": "b",
        "workers": 2,
        "image": {"size": 224},
        "text": {"min_tokens": 3},
    },
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
        ({"random_unet": True}, "recipe.random_unet"),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewerConfig(fakes.TwoTowersConfig):
    """Settings of a later version: a new one, and one that became a constant."""

    mirror_weight: float = 0.0
    former = (("scale", 1.0),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewerData:
    train: str
    crop: float = 0.5
    text: fakes.TwoTowersConfig = dataclasses.field(default_factory=fakes.TwoTowersConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewerRecipe:
    data: NewerData
    pretrained: bool = False
    uncertain: str = "ignore"


def newer(folder: Path, *, data: Any = (), recipe: Any = (), **model: Any) -> None:
    config = NewerConfig(**model)
    settings = NewerRecipe(data=NewerData(train="moved", **dict(data)), **dict(recipe))
    with fakes.fake_files():
        fakes.train(
            fakes.TwoTowers(config),
            fakes.FakeLoader(20, 4),
            optim=fakes.optim(),
            config=fakes.config(folder / "run"),
            run={"settings": settings},
        )


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder with a run that a version without some of the settings wrote."""
    identity = state.identity

    def earlier(*arguments: Any) -> dict[str, Any]:
        stored = identity(*arguments)
        assert stored["data"] == {"crop": 0.5, "text": {"width": 8, "dropout": 0.0, "norm": False}}
        del stored["model"]["settings"]["mirror_weight"]
        stored["model"]["settings"]["scale"] = 1.0
        del stored["data"]["crop"], stored["data"]["text"]["norm"], stored["recipe"]["uncertain"]
        del stored["optim"]["optimizer"], stored["train"]["accumulate"]
        return stored

    with mock.patch.object(state, "identity", earlier):
        newer(tmp_path)
    return tmp_path


def test_settings_that_were_added_since_count_as_their_defaults(
    older: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        newer(older)
    [line] = [one.message for one in caplog.records if "existed" in one.message]
    assert "model.settings.mirror_weight, " in line
    assert all(name in line for name in ("data.crop", "data.text.norm", "recipe.uncertain"))
    assert all(name in line for name in ("optim.optimizer", "train.accumulate"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mirror_weight": 0.5}, "model.settings.mirror_weight"),
        ({"data": {"crop": 0.7}}, "data.crop"),
        ({"data": {"text": fakes.TwoTowersConfig(norm=True)}}, "data.text.norm"),
        ({"recipe": {"uncertain": "zeros"}}, "recipe.uncertain"),
    ],
)
def test_an_added_setting_with_another_value_is_another_run(
    changes: dict[str, Any], field: str, older: Path
) -> None:
    name = field.rpartition(".")[2]
    with raises(CheckpointError, "mismatch", field, names=f"{name} was "):
        newer(older, **changes)


def test_folders_and_processes_may_change(tmp_path: Path) -> None:
    """Shards are compared by their content, and processes make no difference."""
    run(tmp_path)
    before = (tmp_path / "run/last").resolve()
    moved = {
        "train": "moved/a",
        "valid": "moved/b",
        "valid_split": "dev",
        "workers": 8,
        "valid_batch": 64,
    }
    run(
        tmp_path,
        data={
            **SETTINGS["data"],
            **moved,
            "text": {"min_tokens": 3, "file": "moved/statements.jsonl"},
        },
    )
    assert (tmp_path / "run/last").resolve() == before


def test_what_a_run_starts_from_is_described_by_content(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(content)

    def described(**settings: Any) -> dict[str, str]:
        data = SimpleNamespace(text=SimpleNamespace(file=settings.pop("file", None)))
        return describe_start(SimpleNamespace(data=data, **settings), None)

    for field in ("init_from", "image_weights", "file"):
        folder = {"file": "model.safetensors"}.get(field, "")
        one, same, other = (
            described(**{field: tmp_path / name / folder}) for name in ("one", "same", "other")
        )
        assert one == same != other
    model = SimpleNamespace(image_weights=str(tmp_path / "one/model.safetensors"))
    assert list(described(model=model)) == ["model.image_weights"]
    hub = "owner/name@d5892b39a4adaed74b92212a44081509db72f87b"
    assert described(init_from=Path("timm:vit_tiny"), image_weights=hub) == {
        "init_from": "timm:vit_tiny",
        "image_weights": hub,
    }
    assert described(init_from=None) == {}


def test_another_vocabulary_of_the_same_size_is_another_start() -> None:
    settings = SimpleNamespace(data=None)
    one, same, other = (
        describe_start(
            settings,
            SimpleNamespace(tokenizer=train_wordpiece([text], vocab_size=60, min_frequency=1)),
        )
        for text in ("left effusion", "left effusion", "right effusion")
    )
    assert one == same != other
