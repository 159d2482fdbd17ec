"""Region features of a folder of shards, computed once by a frozen detector (`medvl regions`).

Shards are read in order, and each becomes one file of regions (`medvl.data.shards.regions`).
Batches never cross a shard, so that a resumed run writes the same bytes. Memory holds two batches
of images and the regions of one batch.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

import medvl
from medvl.common.config_io import check_within
from medvl.common.files import RunLock, subfolder, sweep, write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.shards.format import REGION_SUFFIX, Shard, TarWriter, new_tar
from medvl.data.shards.regions import (
    REGION_MANIFEST,
    RegionManifest,
    Regions,
    RegionShard,
    index_text,
    region_folder,
)
from medvl.data.shards.source import ShardSource
from medvl.data.storage.location import require_local
from medvl.errors import BudgetError, ConfigError, ImageError, ShardError

_PROGRESS = ".progress"
_PLAN = "plan.json"
_PACKAGES = ("numpy", "torch", "torchvision")


class RegionDetector(Protocol):
    """A frozen model that finds regions in images.

    Attributes:
        name: name for messages and the manifest.
        sha256: hash of its weights and settings.
        settings: JSON values.
        width: width of the features.
        class_names: classes of the distribution, the background included; empty without one.
        trained_on: manifests of the shards that it was trained on, as JSON objects; empty if
            unknown.
        color: whether it reads RGB instead of grey images; None: as the shards have them.
    """

    name: str
    sha256: str
    settings: Mapping[str, Any]
    width: int
    class_names: tuple[str, ...]
    trained_on: tuple[Mapping[str, Any], ...]
    color: bool | None

    def prepare(self, pixels: np.ndarray) -> Any:
        """Return an image, uint8 (H, W) or (H, W, 3), as `__call__` takes it; called in threads."""

    def __call__(self, images: Sequence[Any]) -> list[Regions]:
        """Return the regions of each image, at least one, most confident first, in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionOptions:
    """Options of a run. `batch` may change the last bits of the features, so a resumed run must
    have the same.
    """

    batch: int = 8
    """Images that the detector reads at once."""
    workers: int = 4
    """Threads that decode images."""
    full_precision: bool = False
    """Store features as float32 instead of float16."""
    max_skipped: float = 0.001
    """Budget of unreadable images: below 1 a fraction of the samples, else a number."""

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "batch", "workers")


def write_regions(
    source: ShardSource,
    detector: RegionDetector,
    name: str,
    options: RegionOptions | None = None,
    *,
    progress: bool = False,
) -> RegionManifest:
    """Write the regions of all images of a folder of shards into its subfolder `regions/NAME`, or
    resume doing so.

    Returns:
        The manifest. Finished regions of the same detector and options are left as they are.

    Raises:
        ConfigError: the shards are remote ("unsupported"), the folder holds regions of another
            detector, other shards or options ("exists"), or another process writes them ("in_use").
        BudgetError: too many images cannot be read.
        ShardError: a shard is damaged, or the detector's output is empty, not finite or of another
            form.
    """
    folder = region_folder(require_local(source.folder, "shards"), name)
    run = _Run(source, detector, options or RegionOptions(), require_local(folder, "shards"))
    with RunLock(run.folder, error=ConfigError, field="name"):
        if (run.folder / REGION_MANIFEST).is_file():
            return run.check_finished()
        run.claim()
        shards = source.manifest.shards
        done = []
        for number in tqdm(
            range(len(shards)),
            f"regions {source.manifest.split}",
            unit="shard",
            disable=not progress,
        ):
            done.append(run.shard(number, sum(shard.samples for shard in shards[:number])))
            run.check_budget(done)
        manifest = run.manifest(done)
        manifest.write(run.folder)
        shutil.rmtree(run.folder / _PROGRESS)
    return manifest


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Steps of `write_regions`, for one folder of shards and one detector."""

    source: ShardSource
    detector: RegionDetector
    options: RegionOptions
    folder: Path

    def manifest(self, shards: Sequence[RegionShard]) -> RegionManifest:
        """Return the manifest of the finished regions of all shards."""
        options = {"batch": self.options.batch, "full_precision": self.options.full_precision}
        return RegionManifest(
            detector=self.detector.name,
            detector_sha256=self.detector.sha256,
            settings={**self.detector.settings, **options},
            width=self.detector.width,
            class_names=self.detector.class_names,
            trained_on=self.detector.trained_on,
            source=self.source.manifest.fingerprint,
            shards=tuple(shards),
            packages={
                "medvl": medvl.__version__,
                **{name: importlib.metadata.version(name) for name in _PACKAGES},
            },
        )

    def check_finished(self) -> RegionManifest:
        """Return the manifest of finished regions. Raises ConfigError if they have other
        settings.
        """
        manifest = RegionManifest.read(self.folder)
        self._compare(_identity(manifest))
        return manifest

    def claim(self) -> None:
        """Record the settings of this run. Raises ConfigError if the folder has the beginning of
        another run.
        """
        sweep(self.folder)  # partial tars of a killed process
        path = subfolder(self.folder, _PROGRESS) / _PLAN
        if path.is_file():
            self._compare(_load(path))
        write_atomic(path, json.dumps(_identity(self.manifest(())), sort_keys=True))

    def _compare(self, stored: Mapping[str, Any]) -> None:
        ours = _identity(self.manifest(()))
        differing = ", ".join(
            name for name in {**stored, **ours} if stored.get(name) != ours.get(name)
        )
        if differing:
            message = (
                f"{self.folder} holds regions with another {differing}; give another "
                f"--name, or remove it"
            )
            raise ConfigError(message, "exists", field="name")

    def check_budget(self, shards: Sequence[RegionShard]) -> None:
        """Raise BudgetError where more images than allowed could not be read."""
        limit = self.options.max_skipped
        samples = len(self.source)
        skipped = [reason for shard in shards for _, reason in shard.skipped]
        if len(skipped) > int(limit if limit >= 1 else limit * samples):
            message = (
                f"{len(skipped)} unreadable images ({', '.join(sorted(set(skipped)))}) in "
                f"{self.source.folder}"
            )
            raise BudgetError(
                f"{message}; run `medvl verify --decode`, or set --max-skipped",
                "budget",
                field="max_skipped",
            )

    def shard(self, number: int, first: int) -> RegionShard:
        """Write the regions of a shard, or return the entry of one that is written already."""
        shard = self.source.manifest.shards[number]
        note = self.folder / _PROGRESS / f"{shard.name}.json"
        tar = self.folder / f"{shard.name}.tar"
        if note.is_file() and tar.with_suffix(".index").is_file():
            entry = RegionShard.parse(_load(note))
            if tar.is_file() and tar.stat().st_size == entry.bytes:
                return entry
        entry = self._write(shard, tar, first)
        write_atomic(note, json.dumps(dataclasses.asdict(entry)))
        return entry

    def _write(self, shard: Shard, tar: Path, first: int) -> RegionShard:
        keys = [self.source.key(first + row) for row in range(shard.samples)]
        place_N2 = np.zeros((shard.samples, 2), np.int64)
        skipped = []
        regions = 0
        with new_tar(tar) as writer:
            for rows, detections in self._detect(first, shard.samples):
                for row, each in zip(rows, detections, strict=True):
                    if isinstance(each, str):
                        skipped.append((keys[row], each))
                    else:
                        place_N2[row] = self._add(writer, keys[row], each)
                        regions += len(each.boxes_P4)
            writer.close()
            text = index_text(keys, place_N2)
            write_atomic(tar.with_suffix(".index"), text)
        return RegionShard(
            name=shard.name,
            shard_sha256=shard.sha256,
            samples=shard.samples,
            images=int((place_N2[:, 1] > 0).sum()),
            regions=regions,
            bytes=writer.offset,
            sha256=writer.hash.hexdigest(),
            index_sha256=hashlib.sha256(text.encode()).hexdigest(),
            skipped=tuple(skipped),
        )

    def _add(self, writer: TarWriter, key: str, regions: Regions) -> tuple[int, int]:
        dtype = np.float32 if self.options.full_precision else np.float16
        with np.errstate(over="ignore"):  # checked below
            stored = dataclasses.replace(
                regions,
                features_PD=regions.features_PD.astype(dtype),
                boxes_P4=regions.boxes_P4.astype(np.float32),
                classes_PK=None if regions.classes_PK is None else regions.classes_PK.astype(dtype),
            )
        if not np.isfinite(stored.features_PD).all():
            message = (
                f"{self.detector.name}: a feature of {key} is not finite in "
                f"{dtype.__name__}; try --full-precision"
            )
            raise ShardError(message, "nonfinite")
        data = stored.to_bytes()
        try:
            Regions.from_bytes(data, self.detector.width, len(self.detector.class_names))
        except ValueError as error:
            code = "mismatch" if len(stored.boxes_P4) else "empty"
            raise ShardError(
                f"{self.detector.name}: {error}, for the image of {key}", code
            ) from error
        return writer.member(f"{key}.{REGION_SUFFIX}", data)

    def _detect(self, first: int, samples: int) -> Iterator[tuple[list[int], list[Regions | str]]]:
        """Yield batches: rows of a shard, and the regions of each, or the reason why there are
        none.
        """
        rows = [row for row in range(samples) if self.source.has_image(first + row)]
        groups = [
            rows[start : start + self.options.batch]
            for start in range(0, len(rows), self.options.batch)
        ]
        pending: deque[tuple[list[int], list[Future[Any]]]] = deque()
        with ThreadPoolExecutor(self.options.workers) as pool:
            for group in [*groups, None]:
                if group is not None:
                    pending.append((group, [pool.submit(self._load, first + row) for row in group]))
                if len(pending) > (group is not None):
                    current, futures = pending.popleft()
                    yield current, self._detect_images([future.result() for future in futures])

    def _load(self, position: int) -> Any:
        try:
            return self.detector.prepare(self.source.pixels(position, self.detector.color))
        except ImageError as error:
            return error.code

    def _detect_images(self, images: Sequence[Any]) -> list[Regions | str]:
        readable = [image for image in images if not isinstance(image, str)]
        detections = iter(self.detector(readable) if readable else ())
        return [image if isinstance(image, str) else next(detections) for image in images]


def _identity(manifest: RegionManifest) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the earlier one."""
    values = {"detector": manifest.detector_sha256, "shards": manifest.source, **manifest.settings}
    stored: dict[str, Any] = parse_json(json.dumps(values))  # as it is read back: lists for tuples
    return stored


def _load(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ShardError(
            f"cannot read {path} ({type(error).__name__}); remove its folder", "malformed"
        ) from error
    return content
