"""Loaders of a run on volumes."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.errors import raises
from helpers.volume_shards import volume_shards

from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import ConfigError, SplitError
from medvl.schema import Inputs
from medvl.train.tasks.pretraining import DataConfig, open_pairs
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
    config = SimpleNamespace(positives="study")
    names = {"name": "some", "config": config, "tokenizer": tokenizer, "inputs": Inputs()}
    return SimpleNamespace(transform=transform, **names)


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


def slices_config(folders: dict[str, Path], **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "train": str(folders["train"]),
        "valid": folders["valid"],
        "image": EvalTransform(size=16),
        "text": WholeText(),
        "workers": 0,
    }
    return DataConfig(**settings | changes)


def model_of_images() -> Any:
    found = model()
    found.transform = EvalTransform(size=16)
    return found


def test_systems_of_images_read_one_volume_of_a_scan_in_an_epoch(folders: dict[str, Path]) -> None:
    """Reconstructions share a report: in a batch they would be negatives of each other."""
    loaders = open_pairs(slices_config(folders), model_of_images(), 2)
    keys = set()
    for _ in range(12):
        (batch,) = loaders.train
        assert len(set(batch.studies)) == 2
        assert batch.image_BCHW.shape == (2, 3, 16, 16)
        keys.update(batch.keys)
    assert len(keys) == 4
    assert loaders.valid is not None
    assert loaders.valid_images is not None
    assert [len(batch) for batch in loaders.valid] == [2]
    assert [len(batch) for batch in loaders.valid_images] == [4]


def test_shares_of_scans_with_several_volumes_are_refused(folders: dict[str, Path]) -> None:
    extra = {"extra_train": (folders["extra"],), "weights": (0.5, 0.5)}
    with raises(ConfigError, "conflict", "data.weights"):
        open_pairs(slices_config(folders, valid=None, **extra), model_of_images(), 2)
    with raises(ConfigError, "conflict", "data.paired_fraction"):
        open_pairs(slices_config(folders, paired_fraction=0.5), model_of_images(), 2)


@pytest.mark.parametrize(
    ("positives", "reconstructions", "warns"),
    [("own", "all", True), ("text", "all", True), ("study", "all", False), ("own", "one", False)],
)
def test_reconstructions_as_negatives_are_named(
    folders: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    positives: str,
    reconstructions: str,
    warns: bool,
) -> None:
    system = model()
    system.config.positives = positives
    data = config(folders, valid=None, reconstructions=reconstructions)
    with caplog.at_level(logging.WARNING):
        open_volumes(data, system, 2)
    assert ("4 volumes of 2 scans" in caplog.text) == warns
