"""Loaders of a run on volumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.errors import raises
from helpers.volume_shards import volume_shards

from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.text import WholeText
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import ConfigError, SplitError
from medvl.schema import Inputs
from medvl.train.tasks.volumes import VolumeDataConfig, open_volumes

SIZE = (8, 16, 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("volume_data")
    return {
        split: volume_shards(root / split, 2, shape=SIZE, split=split, seed=seed)
        for seed, split in enumerate(("train", "valid", "extra"))
    }


def config(folders: dict[str, Path], **changes: Any) -> VolumeDataConfig:
    settings: dict[str, Any] = {
        "train": folders["train"],
        "valid": folders["valid"],
        "volume": VolumeTransform(size=SIZE, shift=(1, 1, 1)),
        "text": WholeText(),
        "workers": 0,
    }
    return VolumeDataConfig(**settings | changes)


def model() -> Any:
    tokenizer = train_words(["There is no pleural effusion."], min_frequency=1)
    transform = VolumeTransform(size=(4, 16, 16))
    return SimpleNamespace(name="some", tokenizer=tokenizer, transform=transform, inputs=Inputs())


def test_loaders_cut_volumes_and_validation_as_the_model(folders: dict[str, Path]) -> None:
    loaders = open_volumes(config(folders), model(), 2)
    (train, _) = list(loaders.train)
    assert train.image_BCDHW.shape == (2, 1, *SIZE)
    assert loaders.valid is not None
    assert loaders.valid_images is not None
    (valid,) = loaders.valid_images
    assert valid.image_BCDHW.shape == (4, 1, 4, 16, 16)
    assert loaders.described["data"]["train"]["reconstructions"] == "all"


def test_one_reconstruction_and_further_folders(folders: dict[str, Path]) -> None:
    data = config(folders, valid=None, extra_train=(folders["extra"],), reconstructions="one")
    loaders = open_volumes(data, model(), 4)
    (batch,) = loaders.train
    assert len(set(batch.studies)) == 4
    assert loaders.valid is None


def test_shared_patients_and_large_batches_are_refused(folders: dict[str, Path]) -> None:
    with raises(SplitError, "leak"):
        open_volumes(config(folders, extra_train=(folders["valid"],)), model(), 2)
    with raises(ConfigError, "too_large", "memory"):
        open_volumes(config(folders, memory_gib=1e-6), model(), 2)
