"""Region features beside shards, as `medvl regions` writes them; the shards stay as they are.

    OUT/train/regions/NAME/mimic-cxr-train-000000.tar
        {key}.safetensors of every image that has regions
    OUT/train/regions/NAME/mimic-cxr-train-000000.index
        key, offset, size: one line per sample of the shard
    OUT/train/regions/NAME/regions.json
        detector and its hash, the shards they belong to, counts

A member holds `features` (P, D), float16 or float32; `boxes` (P, 4), float32: left, top, right and
bottom as shares of the stored image, in 0..1; and, if the detector has classes, `classes` (P, K):
its distribution over them, of the features' type. Samples without an image, and images that were
skipped, have the offset and the size 0.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from medvl.common.files import write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.shards.format import MAX_MEMBER_BYTES, Manifest
from medvl.data.storage.cache import Cache
from medvl.data.storage.location import Location, locate
from medvl.data.storage.tars import FolderFiles, open_tars
from medvl.errors import ConfigError, ShardError

REGIONS = "regions"
REGION_MANIFEST = "regions.json"
NO_REGIONS = "no_regions"
"""Reason for leaving out a sample whose image the detector could not read."""
_VERSION = 1
_INDEX_HEADER = "# medvl regions 1"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_AGAIN = "run `medvl regions` again"


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """The regions of one image, most confident first."""

    features_PD: np.ndarray
    """float16 or float32."""
    boxes_P4: np.ndarray
    """float32: left, top, right, bottom as shares of the image, in 0..1."""
    classes_PK: np.ndarray | None = None
    """Distribution over the detector's classes; None if it has none."""

    def to_bytes(self) -> bytes:
        """Return the content of a member; equal regions give equal bytes."""
        arrays = {"features": self.features_PD, "boxes": self.boxes_P4}
        if self.classes_PK is not None:
            arrays["classes"] = self.classes_PK
        return safetensors.numpy.save(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        )

    @classmethod
    def from_bytes(cls, data: bytes, width: int, classes: int) -> "Regions":
        """Parse a member.

        Raises ValueError unless it has regions, features of `width`, boxes in 0..1, and `classes`
        classes.
        """
        try:
            arrays = safetensors.numpy.load(data)
        except (safetensors.SafetensorError, TypeError, KeyError, EOFError) as error:
            raise ValueError(f"not a safetensors file ({type(error).__name__})") from error
        expected = {"features": width, "boxes": 4} | ({"classes": classes} if classes else {})
        count = len(arrays["boxes"]) if "boxes" in arrays and arrays["boxes"].ndim == 2 else -1
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != {name: (count, columns) for name, columns in expected.items()}:
            raise ValueError(f"expected regions with {expected} columns, got {shapes}")
        if not count:
            raise ValueError("expected one region or more, got none")
        if any(array.dtype not in (np.float16, np.float32) for array in arrays.values()):
            raise ValueError("expected float16 or float32")
        boxes_P4 = arrays["boxes"]
        if (
            not ((boxes_P4 >= 0) & (boxes_P4 <= 1)).all()
            or (boxes_P4[:, 2:] < boxes_P4[:, :2]).any()
        ):
            raise ValueError("a box is not in 0..1")
        return cls(arrays["features"], boxes_P4, arrays.get("classes"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionShard:
    """Manifest entry of the regions of one shard."""

    name: str
    """Name of the shard, and of the file without `.tar`."""
    shard_sha256: str
    """Hash of the shard's tar: its images are those that the detector read."""
    samples: int
    images: int
    """Samples with regions."""
    regions: int
    bytes: int
    sha256: str
    index_sha256: str
    skipped: tuple[tuple[str, str], ...] = ()
    """(key, reason) of each image that could not be read."""

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> "RegionShard":
        """Build an entry from its JSON. Raises TypeError, KeyError or ValueError for another
        schema.
        """
        return cls(
            **{**content, "skipped": tuple((key, reason) for key, reason in content["skipped"])}
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionManifest:
    """Content of a folder of regions and how they were computed. Deterministic: no dates, paths
    or host names.
    """

    detector: str
    """Name of the detector."""
    detector_sha256: str
    """Hash of the detector's weights and settings, those of the selection of regions included."""
    settings: Mapping[str, Any]
    width: int
    """D, width of the features."""
    class_names: tuple[str, ...]
    """Names of the K classes, the background included; empty if the detector has none."""
    trained_on: tuple[Mapping[str, Any], ...]
    """Manifests of the shards that the detector was trained on, if known: their patients cannot
    be tested on.
    """
    source: str
    """`Manifest.fingerprint` of the shards."""
    shards: tuple[RegionShard, ...]
    packages: Mapping[str, str]
    version: int = _VERSION

    @property
    def regions(self) -> int:
        """Number of all regions."""
        return sum(shard.regions for shard in self.shards)

    @property
    def images(self) -> int:
        """Number of images with regions."""
        return sum(shard.images for shard in self.shards)

    @property
    def skipped(self) -> int:
        """Number of images that could not be read."""
        return sum(len(shard.skipped) for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """sha256 over the detector's hash and those of all files."""
        content = [self.detector_sha256, self.source, [shard.sha256 for shard in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """Return the record for checkpoints: a model works with regions of the same detector
        only.
        """
        return {
            "detector": self.detector,
            "sha256": self.detector_sha256,
            "fingerprint": self.fingerprint,
        }

    def write(self, folder: Path) -> None:
        """Write `regions.json` atomically."""
        write_atomic(
            folder / REGION_MANIFEST,
            json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n",
        )

    @classmethod
    def read(cls, folder: Location) -> "RegionManifest":
        """Read the manifest of a folder. Raises ShardError when it is missing, damaged or of
        another version.
        """
        path = folder / REGION_MANIFEST
        try:
            content = parse_json(path.read_bytes())
        except FileNotFoundError:
            advice = f"; there is {', '.join(list_regions(folder.parent.parent)) or 'none'}"
            message = f"{path} does not exist: `medvl regions` did not finish here{advice}"
            raise ShardError(message, "not_found", field="regions") from None
        except (ValueError, OSError) as error:
            code = "malformed" if isinstance(error, ValueError) else "unreadable"
            raise ShardError(
                f"cannot read {path} ({type(error).__name__}); {_AGAIN}", code
            ) from error
        version = content.get("version") if isinstance(content, dict) else None
        if version != _VERSION:
            raise ShardError(
                f"{path}: expected version {_VERSION}, got {version}; {_AGAIN}", "version"
            )
        try:
            names = {name: tuple(content[name]) for name in ("class_names", "trained_on")}
            shards = tuple(map(RegionShard.parse, content["shards"]))
            return cls(**{**content, **names, "shards": shards})
        except (TypeError, KeyError, ValueError) as error:
            raise ShardError(
                f"{path}: missing or unknown fields ({error}); {_AGAIN}", "malformed"
            ) from error

    def check_shards(self, manifest: Manifest, folder: Location) -> None:
        """Raise ShardError unless the regions were computed from the shards of a manifest."""
        ours = [(shard.name, shard.shard_sha256, shard.samples) for shard in self.shards]
        if self.source != manifest.fingerprint or ours != [
            (s.name, s.sha256, s.samples) for s in manifest.shards
        ]:
            message = f"{folder} holds the regions of other shards; remove it and {_AGAIN}"
            raise ShardError(message, "mismatch", field="regions")


def region_folder(shards: str | Location, name: str) -> Location:
    """Return the folder of the regions `name` of a folder of shards. Raises ConfigError for a
    name with a path.
    """
    if not _NAME.fullmatch(name):
        message = (
            f"expected a name of letters, digits, '.', '-' and '_' for the regions, got {name!r}"
        )
        raise ConfigError(message, "malformed", field="regions")
    return locate(shards) / REGIONS / name


def list_regions(shards: str | Location) -> list[str]:
    """Return the names of the finished regions of a folder of shards; none of a web server,
    which lists no files.
    """
    return sorted(
        path.parent.name for path in (locate(shards) / REGIONS).glob(f"*/{REGION_MANIFEST}")
    )


def find_regions(shards: str | Location, detector_sha256: str) -> str:
    """Return the name of a detector's regions of a folder of shards. Raises ShardError if it has
    none.
    """
    for name in list_regions(shards):
        if RegionManifest.read(region_folder(shards, name)).detector_sha256 == detector_sha256:
            return name
    message = (
        f"{shards} has no regions of the detector that the model was trained with (sha256 "
        f"{detector_sha256[:12]}); run `medvl regions` on it with the same detector and options"
    )
    raise ShardError(message, "not_found", field="regions")


def index_text(keys: Sequence[str], place_N2: np.ndarray) -> str:
    """Return the index file: a header, then `key<TAB>offset<TAB>size` for each sample of the
    shard.
    """
    lines = [
        f"{key}\t{offset}\t{size}"
        for key, (offset, size) in zip(keys, place_N2.tolist(), strict=True)
    ]
    return "\n".join([_INDEX_HEADER, *lines]) + "\n"


def read_index(path: Location, data: bytes | None = None) -> tuple[tuple[str, ...], np.ndarray]:
    """Read an index file, or its content if given: keys, and int64 (N, 2) offsets and sizes.
    Raises ShardError.
    """
    try:
        lines = (path.read_bytes() if data is None else data).decode("ascii").splitlines()
        if not lines or lines[0] != _INDEX_HEADER:
            raise ValueError("header")
        rows = [line.split("\t") for line in lines[1:]]
        place_N2 = np.array([row[1:] for row in rows], np.int64).reshape(-1, 2)
        if (
            len(place_N2) != len(rows)
            or (place_N2 < 0).any()
            or (place_N2[:, 1] > MAX_MEMBER_BYTES).any()
        ):
            raise ValueError("an offset or a size is out of range")
    except FileNotFoundError:
        raise ShardError(f"{path} does not exist; copy it, or {_AGAIN}", "not_found") from None
    except (ValueError, OSError) as error:
        raise ShardError(f"{path} is damaged ({error}); {_AGAIN}", "malformed") from error
    return tuple(row[0] for row in rows), place_N2


class RegionReader:
    """The regions of a folder of shards, by shard and row.

    The manifest, every index and the size of every tar are checked here; tars are opened on first
    use in each process.

    Args:
        shards: folder of the shards.
        name: name of the regions.
        manifest: manifest of the shards.
        keys: keys of the samples of each shard.
        cache: local cache of remote regions.

    Raises ShardError when a file is missing, truncated, damaged, or belongs to other shards.
    """

    def __init__(
        self,
        shards: Location,
        name: str,
        manifest: Manifest,
        keys: Sequence[tuple[str, ...]],
        cache: Cache | None = None,
    ) -> None:
        self.folder = region_folder(shards, name)
        self.manifest = RegionManifest.read(self.folder)
        self.manifest.check_shards(manifest, self.folder)
        files = FolderFiles(self.folder, cache)
        paths = [self.folder / f"{shard.name}.tar" for shard in self.manifest.shards]
        self._tars = open_tars(paths, self.manifest.shards, cache)
        rows = list(zip(paths, self.manifest.shards, keys, strict=True))
        self._places = list(files.map(lambda row: self._open_index(*row, files), rows))

    def read(self, shard: int, row: int) -> Regions | None:
        """Return the regions of a sample, None where it has none. Raises ShardError, naming the
        file.
        """
        offset, size = self._places[shard][row].tolist()
        if not size:
            return None
        try:
            data = self._tars.read(shard, offset, size)
            return Regions.from_bytes(data, self.manifest.width, len(self.manifest.class_names))
        except (EOFError, ValueError, OSError) as error:
            code = "truncated" if isinstance(error, EOFError) else "malformed"
            message = (
                f"{self._tars.paths[shard]} is damaged at sample {row} ({error}); run "
                f"`medvl verify`"
            )
            raise ShardError(message, code, field="regions") from error

    def _open_index(
        self, path: Location, shard: RegionShard, expected: tuple[str, ...], files: FolderFiles
    ) -> np.ndarray:
        try:
            size = files.size(path)
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist; copy it, or {_AGAIN}", "not_found", field="regions"
            ) from None
        if size != shard.bytes:
            message = f"{path}: expected {shard.bytes} bytes, got {size}; copy it again"
            raise ShardError(
                message, "truncated" if size < shard.bytes else "mismatch", field="regions"
            )
        place = path.with_suffix(".index")
        try:
            keys, place_N2 = read_index(place, files.verified(place, shard.index_sha256))
        except FileNotFoundError:
            raise ShardError(f"{place} does not exist; copy it, or {_AGAIN}", "not_found") from None
        if keys != expected or (len(place_N2) and place_N2.sum(axis=1).max() > size):
            message = f"{place} does not fit its shard; {_AGAIN}"
            raise ShardError(message, "mismatch", field="regions")
        return place_N2


def check_one_detector(manifests: Sequence[RegionManifest | None]) -> None:
    """Raise ConfigError unless all are regions of one detector, or none has regions."""
    if len({None if manifest is None else manifest.detector_sha256 for manifest in manifests}) > 1:
        message = (
            "the folders have regions of different detectors; run `medvl regions` with "
            "one detector on all"
        )
        raise ConfigError(message, "mismatch", field="regions")
