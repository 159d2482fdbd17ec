"""A folder of splits in place of one split: the message names the splits."""

from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ShardError
from medvl.train.tasks.pretraining import DataConfig, LoaderConfig


@pytest.mark.parametrize("name", ["", "valid"])
def test_split_is_named(tmp_path: Path, deid: Deidentifier, name: str) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "shards", workers=1), OPTIONS
    )
    folder, advice = (
        tmp_path / "shards" / name,
        f"give the folder of one split: {tmp_path / 'shards/train'}",
    )
    with raises(ShardError, "not_found", names=advice):
        ShardSource(folder)
    with raises(ConfigError, "not_found", "data.train", names=advice):
        LoaderConfig(train=folder, valid=None).check("medvl shards")


def test_folder_without_splits_names_the_commands(tmp_path: Path) -> None:
    with raises(ShardError, "not_found", names="medvl shards --help"):
        ShardSource(tmp_path)
    with raises(ConfigError, "not_found", names="medvl shards lab"):
        LoaderConfig(train=tmp_path, valid=None).check("medvl shards lab")


def test_a_missing_tokenizer_names_the_commands(tmp_path: Path, deid: Deidentifier) -> None:
    write_shards(
        make_plan(tmp_path / "images"), deid, ShardRun(out=tmp_path / "shards", workers=1), OPTIONS
    )
    policies = {"image": EvalTransform(), "text": WholeText()}
    train, vocabulary = str(tmp_path / "shards/train"), tmp_path / "shards/vocab"
    data = DataConfig(train=train, valid=None, tokenizer=vocabulary, **policies)
    with raises(ConfigError, "not_found", "data.tokenizer", names="medvl vocab") as caught:
        data.check("medvl vocab")
    assert "one split" not in str(caught.value)
