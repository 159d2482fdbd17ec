"""Region features beside shards: written once, resumable, verified, and tied to their shards and
detector.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.region_shards import QuarterDetector, region_table, with_regions

from medvl.cli import main as cli
from medvl.common.files import temporary_name
from medvl.data.convert.regions import RegionOptions, write_regions
from medvl.data.shards.regions import Regions, find_regions, list_regions
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.errors import BudgetError, ConfigError, ImageError, ShardError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return region_table(tmp_path_factory.mktemp("table")) / "train"


@pytest.fixture
def folder(shards: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(shards, tmp_path / "train"))


def content(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_image_has_the_detectors_regions(folder: Path) -> None:
    before = content(folder)
    source = with_regions(folder, batch=2)
    after = content(folder)
    assert {name: after[name] for name in before} == before  # the shards stay as they are
    detector = QuarterDetector()
    images = 0
    for position in range(len(source)):
        if not source.has_image(position):
            with raises(ImageError, "no_image"):
                source.regions(position)
            continue
        images += 1
        expected, regions = (
            detector.regions(detector.prepare(source.pixels(position))),
            source.regions(position),
        )
        assert regions.features_PD.dtype == np.float16
        np.testing.assert_array_equal(regions.features_PD, expected.features_PD.astype(np.float16))
        np.testing.assert_array_equal(regions.boxes_P4, expected.boxes_P4)
        assert regions.classes_PK is not None
        np.testing.assert_allclose(regions.classes_PK.sum(axis=1), 1, atol=2e-3)
    manifest = source.region_manifest
    assert manifest is not None
    assert (manifest.images, manifest.skipped, manifest.width) == (images, 0, 2)
    assert manifest.regions == sum(
        len(source.regions(p).boxes_P4) for p in range(len(source)) if source.has_image(p)
    )
    assert (manifest.detector, manifest.detector_sha256) == ("quarters", "d" * 64)
    assert source.fingerprint != ShardSource(folder).fingerprint


def test_bytes_are_the_same_whenever_they_are_written(
    shards: Path, folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(shards, tmp_path / "other"))
    with_regions(folder, batch=2, workers=1)
    with_regions(other, batch=2, workers=3)
    assert content(folder) == content(other)
    before = content(folder)
    detector = QuarterDetector()
    write_regions(ShardSource(folder), detector, "quarters", RegionOptions(batch=2))
    assert content(folder) == before
    assert not detector.batches  # nothing is computed again
    full = with_regions(other, "full", full_precision=True)
    assert full.regions(0).features_PD.dtype == np.float32


class Interrupted(QuarterDetector):
    """A detector that is stopped at its n-th batch."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def __call__(self, images: Any) -> list[Regions]:
        if len(self.batches) == self.stop:
            raise KeyboardInterrupt
        return super().__call__(images)


@pytest.mark.parametrize("stop", [1, 3])
def test_an_interrupted_run_resumes_with_the_same_bytes(
    stop: int, shards: Path, folder: Path, tmp_path: Path
) -> None:
    whole = Path(shutil.copytree(shards, tmp_path / "whole"))
    with_regions(whole, batch=2)
    with pytest.raises(KeyboardInterrupt):
        write_regions(ShardSource(folder), Interrupted(stop), "quarters", RegionOptions(batch=2))
    assert not list(folder.rglob("*.partial"))
    assert list_regions(folder) == []
    with raises(ShardError, "not_found", "regions"):
        ShardSource(folder, regions="quarters")
    with raises(ConfigError, "exists", "name"):
        write_regions(
            ShardSource(folder), QuarterDetector("e" * 64), "quarters", RegionOptions(batch=2)
        )
    with raises(ConfigError, "exists", "name"):
        write_regions(ShardSource(folder), QuarterDetector(), "quarters", RegionOptions(batch=3))
    resumed = QuarterDetector()
    write_regions(ShardSource(folder), resumed, "quarters", RegionOptions(batch=2))
    assert content(folder) == content(whole)
    complete = QuarterDetector()
    write_regions(ShardSource(whole), complete, "again", RegionOptions(batch=2))
    assert len(resumed.batches) == len(complete.batches) - {1: 0, 3: 2}[stop]
    assert max(complete.batches) <= 2


def test_a_killed_run_leaves_no_file_under_its_final_name(folder: Path) -> None:
    """What SIGKILL leaves: a partial tar, and the notes of finished shards."""
    with_regions(folder, "whole", batch=2)
    with pytest.raises(KeyboardInterrupt):
        write_regions(ShardSource(folder), Interrupted(3), "quarters", RegionOptions(batch=2))
    half = folder / "regions/quarters"
    finished = sorted(half.glob("*.tar"))
    assert len(finished) == 1
    temporary_name(half / "lab-train-000001.tar").write_bytes(b"half of a tar")
    finished[0].write_bytes(finished[0].read_bytes()[:700])  # damaged after the kill: written again
    write_regions(ShardSource(folder), QuarterDetector(), "quarters", RegionOptions(batch=2))
    assert not list(half.glob(".*.partial"))
    assert content(half) == content(folder / "regions/whole")


def test_unreadable_images_are_counted_within_a_budget(tmp_path: Path) -> None:
    from medvl.data.shards.format import Index

    folder = region_table(tmp_path) / "train"
    tar = sorted(folder.glob("*.tar"))[0]
    index = Index.read(tar.with_suffix(".index"))
    data = bytearray(tar.read_bytes())
    offset, size = index.image[0].tolist()
    data[offset : offset + size] = bytes(size)
    tar.write_bytes(data)
    with raises(BudgetError, "budget", "max_skipped"):
        write_regions(
            ShardSource(folder), QuarterDetector(), "quarters", RegionOptions(max_skipped=0)
        )
    source = with_regions(folder, "some", max_skipped=1)
    assert source.region_manifest is not None
    assert [key for shard in source.region_manifest.shards for key, _ in shard.skipped] == [
        index.keys[0]
    ]
    with raises(ImageError, "no_regions"):
        source.regions(0)


def test_damaged_and_foreign_regions_are_refused(folder: Path, tmp_path: Path) -> None:
    with_regions(folder)
    where = folder / "regions/quarters"
    assert verify_folder(folder).regions[0].problems == ()
    tar, manifest = sorted(where.glob("*.tar"))[0], where / "regions.json"
    good = tar.read_bytes()
    tar.write_bytes(good[:-1])
    with raises(ShardError, "truncated", "regions"):
        ShardSource(folder, regions="quarters")
    assert "sha256" in verify_folder(folder).regions[0].problems[0]
    tar.write_bytes(good[:600] + bytes(100) + good[700:])
    opened = ShardSource(folder, regions="quarters")
    with raises(ShardError, "malformed", "regions"):
        [opened.regions(position) for position in range(3) if opened.has_image(position)]
    tar.unlink()
    with raises(ShardError, "not_found", "regions"):
        ShardSource(folder, regions="quarters")
    tar.write_bytes(good)
    for change, code in (
        ({"version": 9}, "version"),
        ({"source": "0" * 64}, "mismatch"),
        ({"shards": [{}]}, "malformed"),
    ):
        stored = manifest.read_text()
        manifest.write_text(json.dumps({**json.loads(stored), **change}))
        with raises(ShardError, code):
            ShardSource(folder, regions="quarters")
        assert verify_folder(folder).regions[0].problems
        manifest.write_text(stored)
    index = tar.with_suffix(".index")
    index.write_text(index.read_text().replace("\t", "x\t", 1))
    with raises(ShardError, "mismatch", "regions"):
        ShardSource(folder, regions="quarters")
    with raises(ConfigError, "malformed", "regions"):
        ShardSource(folder, regions="../quarters")


@pytest.mark.parametrize("other", [{"width": 3}, {"class_names": ["dark"]}, {"class_names": []}])
def test_samples_of_another_form_than_the_manifest_are_refused(
    other: dict[str, Any], folder: Path
) -> None:
    with_regions(folder)
    manifest = folder / "regions/quarters/regions.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **other}))
    with raises(ShardError, "malformed", "regions") as caught:
        ShardSource(folder, regions="quarters").regions(0)
    assert str(sorted((folder / "regions/quarters").glob("*.tar"))[0]) in str(caught.value)


def test_a_sample_without_a_region_is_refused() -> None:
    """Its place in the index is empty instead; a model would attend to padding alone."""
    none = Regions(np.ones((0, 2), np.float32), np.ones((0, 4), np.float32))
    with pytest.raises(ValueError, match="one region or more"):
        Regions.from_bytes(none.to_bytes(), width=2, classes=0)


def test_a_tar_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    source = with_regions(folder)
    source.regions(0)
    tar = sorted((folder / "regions/quarters").glob("*.tar"))[0]
    with tar.open("r+b") as file:
        file.truncate(100)
    with raises(ShardError, "truncated", "regions"):
        source.regions(0)


def test_verify_prints_the_regions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = with_regions(folder)
    cli.main(["verify", str(folder)])
    assert source.region_manifest is not None
    counts = (
        f"{source.region_manifest.regions} regions of {source.region_manifest.images} "
        f"images, 0 images skipped"
    )
    assert f"  regions quarters by quarters: {counts}: intact" in capsys.readouterr().out
    next((folder / "regions/quarters").glob("*.tar")).unlink()
    with pytest.raises(SystemExit):
        cli.main(["verify", str(folder)])
    assert "1 PROBLEMS" in capsys.readouterr().out


def test_regions_are_found_by_the_detectors_hash(folder: Path) -> None:
    with_regions(folder)
    write_regions(ShardSource(folder), QuarterDetector("e" * 64), "others")
    assert find_regions(folder, "e" * 64) == "others"
    with raises(ShardError, "not_found", "regions"):
        find_regions(folder, "f" * 64)


@pytest.mark.parametrize(
    ("features", "boxes", "code"),
    [
        (np.full((1, 2), 1e6), [[0, 0, 1, 1]], "nonfinite"),  # too large for float16
        (np.ones((1, 3)), [[0, 0, 1, 1]], "mismatch"),
        (np.ones((1, 2)), [[0, 0, 1, 1.1]], "mismatch"),
        (np.ones((1, 2)), [[0.5, 0, 0.4, 1]], "mismatch"),
        (np.ones((2, 2)), [[0, 0, 1, 1]], "mismatch"),
        (np.ones((0, 2)), np.ones((0, 4)), "empty"),
    ],
)
def test_a_detectors_output_is_checked(features: Any, boxes: Any, code: str, folder: Path) -> None:
    class Wrong(QuarterDetector):
        class_names = ()

        def regions(self, image: np.ndarray) -> Regions:
            return Regions(np.array(features, np.float32), np.array(boxes, np.float32))

    with raises(ShardError, code):
        write_regions(ShardSource(folder), Wrong(), "wrong")
    assert list_regions(folder) == []
