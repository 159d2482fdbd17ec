"""Training and evaluating with regions: one detector from pretraining to the test set."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TINY
from helpers.region_shards import QuarterDetector, region_data, region_table, with_regions

import medvl
from medvl.data.convert.regions import write_regions
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.encoders.regions import RegionEncoder
from medvl.errors import CheckpointError, ConfigError, ShardError, SplitError
from medvl.eval.core.open import open_for_evaluation, open_source
from medvl.models.checkpoint import load, save
from medvl.models.checkpoint_folder import detector_of
from medvl.train.tasks.pretraining import DataConfig, open_data

TOKENIZER = train_wordpiece(["the left lung of number is clear"], vocab_size=60, min_frequency=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = region_table(tmp_path_factory.mktemp("table"))
    for split in ("train", "validate"):
        with_regions(home / split)
    return home


def make_model(encoder: str = "regions:2+7") -> Any:
    settings = {
        **TINY["single_stream"],
        "image_encoder": encoder,
        "image_arguments": {},
        "image_positions": False,
    }
    return medvl.create_model("single_stream", tokenizer=TOKENIZER, **settings)


def config(shards: Path, **changes: Any) -> DataConfig:
    return region_data(shards, **{"size": 32, "regions": "quarters", **changes})


def encoder_of(model: Any) -> RegionEncoder:
    encoder = model.image_encoder
    assert isinstance(encoder, RegionEncoder)
    return encoder


def test_a_run_reads_regions_and_its_checkpoint_names_their_detector(
    shards: Path, tmp_path: Path
) -> None:
    model = make_model()
    opened = open_data(config(shards), model, micro_batch=4)
    batch = next(iter(opened.train))
    model(batch).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for loader in (opened.valid, opened.valid_images):
        assert loader is not None
        assert next(iter(loader)).regions_BPD is not None
    assert opened.described["data"]["train"]["regions"]["sha256"] == "d" * 64
    save(model, tmp_path, json.loads(json.dumps(opened.described)))
    assert detector_of(tmp_path) == "d" * 64
    restored: Any = load(tmp_path)
    assert encoder_of(restored).detector == "d" * 64
    source = open_source(shards / "validate", [tmp_path])  # found by the detector's hash
    loader = open_for_evaluation(source, restored.transform, TOKENIZER, batch=2, workers=0)
    with torch.no_grad():
        assert restored.features(next(iter(loader))).pooled_BD.isfinite().all()
    write_regions(ShardSource(shards / "train"), QuarterDetector("e" * 64), "others")
    with raises(ConfigError, "mismatch", "data.regions"):
        open_data(config(shards, regions="others", valid=None), restored, micro_batch=4)
    with raises(ConfigError, "mismatch", "regions"):
        write_regions(ShardSource(shards / "validate"), QuarterDetector("f" * 64), "others")
        open_data(config(shards, regions="others"), make_model(), micro_batch=4)


def test_evaluation_needs_regions_of_the_same_detector(shards: Path, tmp_path: Path) -> None:
    model = make_model()
    save(
        model,
        tmp_path,
        json.loads(json.dumps(open_data(config(shards), model, micro_batch=4).described)),
    )
    bare = region_table(tmp_path / "other", "other") / "train"
    with raises(ShardError, "not_found", "regions"):
        open_source(bare, [tmp_path])
    pixels = make_model("patches:16")
    (tmp_path / "pixels").mkdir()
    save(pixels, tmp_path / "pixels", {"data": {"train": {}}})
    assert detector_of(tmp_path / "pixels") is None
    assert open_source(bare, [tmp_path / "pixels"]).region_manifest is None


def test_patients_of_the_detectors_training_are_refused_at_the_test(
    shards: Path, tmp_path: Path
) -> None:
    """A detector that was trained on the test patients leaks their boxes into the regions."""
    tested = ShardSource(shards / "validate")

    class Trained(QuarterDetector):
        trained_on = (dataclasses.asdict(tested.manifest),)

    for split in ("train", "validate"):
        write_regions(ShardSource(shards / split), Trained("a" * 64), "trained")
    model = make_model()
    described = open_data(config(shards, regions="trained"), model, micro_batch=4).described
    save(model, tmp_path, json.loads(json.dumps(described)))
    with raises(SplitError, "leak"):
        open_source(shards / "validate", [tmp_path])


def test_damaged_checkpoints_are_named_before_their_regions_are_looked_for(
    shards: Path, tmp_path: Path
) -> None:
    with raises(CheckpointError, "not_found"):
        open_source(shards / "validate", [tmp_path / "nowhere"])
    save(make_model(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with raises(CheckpointError, "malformed"):
        open_source(shards / "validate", [tmp_path])


def test_settings_that_do_not_fit_are_named(shards: Path) -> None:
    with raises(ConfigError, "missing", "regions"):
        open_data(config(shards, regions=None), make_model(), micro_batch=4)
    with raises(ConfigError, "mismatch", "image_encoder"):
        open_data(config(shards), make_model("regions:3+7"), micro_batch=4)
    with raises(ConfigError, "conflict", "data.regions"):
        open_data(config(shards), make_model("patches:16"), micro_batch=4)
    with raises(ShardError, "not_found", "regions"):
        open_data(config(shards, regions="absent"), make_model(), micro_batch=4)
    with raises(ConfigError, "conflict", "data.regions"):
        open_data(
            config(shards, train="https://host/lab/{00..01}.tar"), make_model(), micro_batch=4
        )
