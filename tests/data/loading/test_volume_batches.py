"""Batches of volumes: what is cut, order and resume, reconstructions, and the limit of memory."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan
from helpers.volume_shards import DEID, SHAPE, volume_shards

from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.profile import time_stages
from medvl.data.loading.sources import ConcatSource, OtherTexts, Subset, no_text
from medvl.data.loading.studies import ScanSource
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.data.volumes.resampling import crop_or_pad, rgb_slices
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import BudgetError, ConfigError, ShardError
from medvl.schema import Batch, Inputs

PATIENTS = 3
TRANSFORM = VolumeTransform(size=(12, 40, 24))
SHIFTED = VolumeTransform(size=(12, 40, 24), shift=(3, 3, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return volume_shards(tmp_path_factory.mktemp("volumes"), PATIENTS)


def open_it(source: Any, **changes: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch": 2,
        "image": SHIFTED,
        "text": WholeText(),
        "tokenizer": no_text,
        "train": True,
        "seed": 7,
    }
    return open_loader(source, **settings | changes)


def volumes_of(batch: Batch) -> torch.Tensor:
    assert batch.image_BCDHW is not None
    return batch.image_BCDHW


def test_batches_hold_the_volumes_of_the_source(folder: Path) -> None:
    source = ShardSource(folder)
    loader = open_it(source, train=False, batch=4, image=TRANSFORM)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 2]
    position = 0
    for batch in batches:
        volumes = volumes_of(batch)
        assert volumes.dtype == torch.int16
        assert batch.image_BCHW.numel() == 0
        assert len(batch.rows([1]).image_BCHW) == len(volumes_of(batch.rows([1]))) == 1
        for key, volume_CDHW in zip(batch.keys, volumes, strict=True):
            assert key == source.key(position)
            expected = crop_or_pad(source.volume(position), TRANSFORM.size).hu_DHW
            np.testing.assert_array_equal(volume_CDHW[0].numpy(), expected)
            position += 1
    first = batches[0]
    assert first.studies == ["train-s00000", "train-s00000", "train-s00001", "train-s00001"]
    assert first.texts[0] == first.texts[1] != first.texts[2]


def test_shifted_crops_are_parts_of_the_volume(folder: Path) -> None:
    """Along y the volume is smaller and stays centred."""
    source = ShardSource(folder)
    transform = VolumeTransform(size=(8, 40, 24), shift=(2, 5, 20))
    places = set()
    keys = [source.key(position) for position in range(len(source))]
    loader = open_it(source, image=transform)
    for _ in range(3):
        for batch in loader:
            for key, volume_CDHW in zip(batch.keys, volumes_of(batch), strict=True):
                values = volume_CDHW[0].numpy()
                assert (values[:, :4] == -1024).all()
                assert (values[:, -4:] == -1024).all()
                whole = source.volume(keys.index(key)).hu_DHW
                found = [
                    (z, x)
                    for z in range(SHAPE[0] - 8 + 1)
                    for x in range(SHAPE[2] - 24 + 1)
                    if np.array_equal(values[:, 4:-4], whole[z : z + 8, :, x : x + 24])
                ]
                assert len(found) == 1
                places.add(found[0])
    assert {z for z, _ in places} <= {2, 3, 4, 5, 6}, "at most 2 slices from the centre at 4"
    assert len(places) > 6


@pytest.mark.parametrize("workers", [0, 1])
def test_order_and_resume_are_exact(folder: Path, workers: int) -> None:
    source = ShardSource(folder)
    loader = open_it(source)
    expected = [batch for _ in range(2) for batch in loader]
    assert sorted(key for batch in expected[:3] for key in batch.keys) == sorted(
        source.key(position) for position in range(len(source))
    )
    again = open_it(source)
    iterator = iter(again)
    next(iterator)
    state = again.state_dict()
    resumed = open_it(source, workers=workers)
    resumed.load_state_dict(state)
    rest = [batch for _ in range(2) for batch in resumed]
    assert len(rest) == 5
    for ours, theirs in zip(rest, expected[1:], strict=True):
        assert ours.keys == theirs.keys
        assert torch.equal(volumes_of(ours), volumes_of(theirs))


def test_ranks_read_parts_of_the_same_batches(folder: Path) -> None:
    source = ShardSource(folder)
    whole = list(open_it(source))
    for rank in range(2):
        parts = open_it(source, rank=rank, world=2)
        for batch, part in zip(whole, parts, strict=True):
            assert part.keys == batch.keys[rank : rank + 1]
            assert torch.equal(volumes_of(part), volumes_of(batch)[rank : rank + 1])


def test_one_reconstruction_of_each_scan_is_drawn(folder: Path) -> None:
    scans = ScanSource(ShardSource(folder))
    loader = open_it(scans, batch=1)
    assert len(loader) == PATIENTS
    drawn = []
    for _ in range(6):
        keys = [batch.keys[0] for batch in loader]
        assert {key[:6] for key in keys} == {"s00000", "s00001", "s00002"}
        drawn += keys
    assert {key[-1] for key in drawn} == {"1", "2"}
    resumed = open_it(scans, batch=1)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 4, "batch": 1})
    assert [batch.keys[0] for batch in resumed] == drawn[4 * PATIENTS + 1 : 5 * PATIENTS]


def test_views_of_a_source_have_its_volumes(folder: Path) -> None:
    source = ShardSource(folder)
    other = dataclasses.replace(TRANSFORM, shift=(0, 0, 0))
    for view in (Subset(source, [4, 1]), OtherTexts(Subset(source, [4, 1]), "none")):
        (batch,) = open_it(view, train=False, image=other)
        assert batch.keys == [source.key(4), source.key(1)]
        expected = crop_or_pad(source.volume(4), other.size).hu_DHW
        np.testing.assert_array_equal(volumes_of(batch)[0, 0].numpy(), expected)


def test_folders_are_read_together(folder: Path, tmp_path: Path) -> None:
    other = volume_shards(tmp_path, 1, split="more", seed=5)
    sources = [ShardSource(folder), ShardSource(other)]
    batches = list(open_it(ConcatSource(sources), train=False, batch=4, image=TRANSFORM))
    expected = crop_or_pad(sources[1].volume(1), TRANSFORM.size).hu_DHW
    np.testing.assert_array_equal(volumes_of(batches[-1])[-1, 0].numpy(), expected)


def test_images_and_volumes_are_told_apart(folder: Path, tmp_path: Path) -> None:
    source = ShardSource(folder)
    run = ShardRun(out=tmp_path / "out", workers=1)
    write_shards(make_plan(tmp_path / "images", 4), DEID, run, OPTIONS)
    with raises(ConfigError, "mismatch", names="images"):
        open_it(ShardSource(tmp_path / "out" / "train"))
    with raises(ConfigError, "conflict", "prior_image"):
        open_it(source, inputs=Inputs(prior_image=True))


def test_transforms_of_images_read_the_middle_slice(folder: Path) -> None:
    source = ShardSource(folder)
    transform = EvalTransform(size=24)
    batch = next(iter(open_it(source, train=False, batch=4, image=transform)))
    assert batch.image_BCDHW is None
    assert batch.image_BCHW.shape == (4, 3, 24, 24)
    middle_HWC = rgb_slices(source.volume(2))[0]
    expected = transform.build()(middle_HWC, np.random.default_rng(0)).image_HWC
    np.testing.assert_array_equal(batch.image_BCHW[2].permute(1, 2, 0).numpy(), expected)


def test_transforms_of_images_read_several_slices(folder: Path) -> None:
    source = ShardSource(folder)
    transform = EvalTransform(size=24)
    loader = open_it(source, train=False, batch=4, image=transform, slices=4)
    batch = next(iter(loader))
    assert loader.slices == 4
    assert batch.image_BCHW.numel() == 0
    assert batch.image_BCDHW is None
    assert batch.slices_BNCHW.shape == (4, 4, 3, 24, 24)
    assert batch.slices_BNCHW.dtype == torch.uint8
    for row in range(4):
        for place, pixels in enumerate(rgb_slices(source.volume(row), [2, 6, 10, 14])):
            expected = transform.build()(pixels, np.random.default_rng(0)).image_HWC
            found = batch.slices_BNCHW[row, place].permute(1, 2, 0)
            np.testing.assert_array_equal(found.numpy(), expected)


def test_training_on_images_draws_a_slice_of_each_volume(folder: Path) -> None:
    source = ShardSource(folder)
    loader = open_it(source, image=EvalTransform(size=32), batch=6)
    drawn = [batch for _ in range(2) for batch in loader]
    again = next(iter(open_it(source, image=EvalTransform(size=32), batch=6)))
    assert torch.equal(drawn[0].image_BCHW, again.image_BCHW)
    places = set()
    for batch in drawn:
        for key, image in zip(batch.keys, batch.image_BCHW, strict=True):
            position = next(row for row in range(len(source)) if source.key(row) == key)
            slices = rgb_slices(source.volume(position), range(SHAPE[0]))
            (place,) = np.flatnonzero((slices == image.permute(1, 2, 0).numpy()).all((1, 2, 3)))
            places.add(int(place))
    assert len(places) > 3
    assert places <= set(range(1, 15)), "the inner 80 %"


def test_damaged_volumes_are_counted(folder: Path, tmp_path: Path) -> None:
    copy = volume_shards(tmp_path, PATIENTS)
    source = ShardSource(copy)
    (tar, _) = sorted(copy.glob("*.tar"))
    content = tar.read_bytes()
    place = content.index(source.image_bytes(1)) + len(source.image_bytes(1)) - 5
    tar.write_bytes(content[:place] + bytes(5) + content[place + 5 :])
    loader = open_it(ShardSource(copy), train=False, image=TRANSFORM, max_skipped=1)
    assert sum(len(batch) for batch in loader) == 2 * PATIENTS - 1
    assert dict(loader.skipped) == {"shard_damaged": 1}
    with raises(BudgetError, "budget"):
        list(open_it(ShardSource(copy), train=False, image=TRANSFORM, max_skipped=0))


def test_another_shape_in_the_sample_is_damage(folder: Path, monkeypatch: Any) -> None:
    source = ShardSource(folder)
    sample = source.sample(0)
    wrong = dataclasses.replace(sample, extra={**sample.extra, "shape": [16, 32, 31]})
    monkeypatch.setattr(source, "sample", lambda position: wrong)
    with raises(ShardError, "malformed", names=sample.key):
        source.volume(0)


def test_memory_limits_workers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ShardSource(folder)
    batch_bytes = 2 * TRANSFORM.bytes
    assert batch_bytes == 2 * 2 * 12 * 40 * 24
    with caplog.at_level(logging.WARNING):
        loader = open_it(source, workers=3, memory=5 * batch_bytes)
    assert not caplog.records
    assert (loader._batches.num_workers, loader._batches.prefetch_factor) == (3, 1)
    with caplog.at_level(logging.WARNING):
        loader = open_it(source, workers=3, memory=2 * batch_bytes)
    assert loader._batches.num_workers == 2
    assert "2 of 3" in caplog.text
    with raises(ConfigError, "too_large", "memory"):
        open_it(source, memory=batch_bytes - 1)


def test_sizes_are_checked() -> None:
    with raises(ConfigError, "out_of_range", "size"):
        VolumeTransform(size=(0, 4, 4))
    with raises(ConfigError, "out_of_range", "shift"):
        VolumeTransform(size=(4, 4, 4), shift=(-1, 0, 0))


def test_stages_are_timed(folder: Path) -> None:
    source = ShardSource(folder)
    tokenizer = train_words([source.sample(0).sections["findings"]] * 3)
    stages = time_stages(open_it(source, tokenizer=tokenizer), 2, batches=1)
    assert stages.decode > 0
    assert stages.text > 0
