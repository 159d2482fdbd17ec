"""Shards on disk: plain webdataset tars with an index beside each and a manifest beside all.

    OUT/train/mimic-cxr-train-000000.tar      {key}.jpg {key}.json {key}.jpg ...
    OUT/train/mimic-cxr-train-000000.index    key, suffix, offset, size: one line a member
    OUT/train/manifest.json                   what is in the folder, how it was made, what was left out

`ShardSource` reads any sample of a folder by its number, in any order, without reading anything else.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.files import write_atomic
from medvl.data.images.codecs import decode_image
from medvl.errors import ShardError
from medvl.schema import SCHEMA_VERSION, Sample

MANIFEST = "manifest.json"
IMAGE_SUFFIXES = ("jpg", "png")
MAX_MEMBER_BYTES = 256 * 2**20
_INDEX_HEADER = "# medvl index 1"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One tar, as the manifest records it."""

    name: str
    """File name without `.tar`."""
    samples: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a folder of shards holds and how it came to be. Deterministic: no dates, no paths, no machine."""

    corpus: str
    split: str
    samples: int
    shards: tuple[Shard, ...]
    label_names: tuple[str, ...]
    patients: tuple[str, ...]
    """Hashed patient ids, sorted: what disjointness is proved with."""
    salt: str
    """Fingerprint of the salt that the ids were hashed with."""
    planned: int
    """Images of this split that were to be converted: samples + excluded + skipped."""
    excluded_from_corpus: Mapping[str, int]
    """Images of the whole corpus that a rule left out before that, by rule."""
    excluded: Mapping[str, int]
    """Images of this split that a rule left out when they were read (no text), by rule."""
    skipped: Mapping[str, int]
    """Images of this split that could not be read, by reason."""
    skipped_keys: tuple[tuple[str, str], ...]
    """(key, reason) of each skipped image."""
    warnings: Mapping[str, int]
    """What was noticed and kept: empty sections, texts that look as if an identifier was left in, ... What a converter
    mended in the tables of its corpus is counted over all splits."""
    options: Mapping[str, Any]
    packages: Mapping[str, str]
    schema_version: int = SCHEMA_VERSION

    @property
    def fingerprint(self) -> str:
        """sha256 over the shards and their meaning: what a run records as its data."""
        content = [self.corpus, self.split, list(self.label_names), [shard.sha256 for shard in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write `manifest.json` whole or not at all."""
        write_atomic(folder / MANIFEST, json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> "Manifest":
        """Raises ShardError when the manifest is missing, damaged, or of another schema version."""
        path = Path(folder) / name
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist: {folder} is not a finished folder of shards. "
                "`medvl shards --help` lists the commands that make one."
            ) from None
        except (ValueError, OSError) as error:
            raise ShardError(f"{path} cannot be read ({type(error).__name__}): make the shards again") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: Any, where: str) -> "Manifest":
        """A manifest from its JSON. Raises ShardError, naming `where`, when it is no manifest of this schema."""
        if not isinstance(content, dict):
            raise ShardError(f"{where} is no manifest of shards: expected a JSON object", "malformed")
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ShardError(
                f"{where}: expected schema version {SCHEMA_VERSION}, got {version}; make the shards again", "version"
            )
        content = dict(content)
        try:
            content["shards"] = tuple(Shard(**shard) for shard in content["shards"])
            content["skipped_keys"] = tuple((key, reason) for key, reason in content["skipped_keys"])
            for name in ("label_names", "patients"):
                content[name] = tuple(content[name])
            return cls(**content)
        except (TypeError, KeyError, ValueError) as error:
            raise ShardError(f"{where} is damaged: its fields are not those of a manifest ({error})") from error


def sample_to_json(sample: Sample) -> bytes:
    """What `{key}.json` holds: the sample without its pixels, empty fields left out."""
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample) if field.name != "image"}
    kept = {name: value for name, value in fields.items() if value not in (None, {}, "")}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def sample_from_json(data: bytes) -> Sample:
    """Raises ValueError when the bytes are not a sample."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("a sample must be a JSON object")
    try:
        return Sample(**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of a sample: {error}") from error


def check_key(key: str) -> None:
    """Raises ShardError unless `key` can name a member: no dots, no separators, no surprises."""
    if not _KEY.fullmatch(key):
        raise ShardError("a sample key must be 1 to 100 letters, digits, '-' or '_'")


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """Where the members of one tar lie. Row i is sample i of the shard."""

    keys: tuple[str, ...]
    suffixes: tuple[str, ...]
    """Of the image."""
    image: np.ndarray
    """int64 (n, 2): offset and size of the image."""
    meta: np.ndarray
    """int64 (n, 2): offset and size of the JSON."""

    def to_text(self) -> str:
        """The file's content: a header, then `key<TAB>suffix<TAB>offset<TAB>size`, two lines a sample."""
        lines = [_INDEX_HEADER]
        for key, suffix, image, meta in zip(self.keys, self.suffixes, self.image, self.meta, strict=True):
            lines.append(f"{key}\t{suffix}\t{image[0]}\t{image[1]}")
            lines.append(f"{key}\tjson\t{meta[0]}\t{meta[1]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Index":
        """Raises ShardError when the index is missing or damaged."""
        try:
            lines = path.read_text(encoding="ascii").splitlines()
            if not lines or lines[0] != _INDEX_HEADER or len(lines) % 2 == 0:
                raise ValueError("header or number of lines")
            rows = [line.split("\t") for line in lines[1:]]
            images, metas = rows[0::2], rows[1::2]
            for image, meta in zip(images, metas, strict=True):
                if image[0] != meta[0] or image[1] not in IMAGE_SUFFIXES or meta[1] != "json":
                    raise ValueError(f"lines of sample {image[0]}")
            table = [np.array([row[2:4] for row in part], np.int64).reshape(-1, 2) for part in (images, metas)]
        except FileNotFoundError:
            raise ShardError(f"{path} is missing: make the shards again, or copy the .index files too") from None
        except (ValueError, IndexError, OSError) as error:
            raise ShardError(f"{path} is damaged ({error}): make the shards again") from error
        if any(
            (part[:, 0] < 0).any() or (part[:, 1] <= 0).any() or (part[:, 1] > MAX_MEMBER_BYTES).any() for part in table
        ):
            raise ShardError(f"{path} is damaged: an offset or a size is out of range")
        suffixes = tuple(sys.intern(row[1]) for row in images)  # one text for all: a loader holds every index
        return cls(tuple(row[0] for row in images), suffixes, table[0], table[1])


class ShardSource:
    """Random access to the samples of one folder of shards.

    Opens and checks the manifest, every index and every tar's size at once, so a damaged folder fails before training
    starts. Files are opened on first use in each process, so a source may be handed to loader workers.

    Raises ShardError when anything is missing, damaged or does not belong together.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.label_names = self.manifest.label_names
        self.fingerprint = self.manifest.fingerprint
        self._indexes = [self._open_index(shard) for shard in self.manifest.shards]
        counts = [len(index.keys) for index in self._indexes]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._tars: dict[int, _Tar] = {}
        self._lock = threading.Lock()
        if len(self) != self.manifest.samples:
            raise ShardError(
                f"{self.folder}: the indexes hold {len(self)} samples, the manifest {self.manifest.samples}"
            )

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tars", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tars={}, _lock=threading.Lock())

    def key(self, position: int) -> str:
        """The key of sample number `position`."""
        shard, row = self._locate(position)
        return self._indexes[shard].keys[row]

    def sample(self, position: int) -> Sample:
        """Everything but the pixels. Raises ShardError naming the shard and the key."""
        shard, row = self._locate(position)
        data = self._read(shard, self._indexes[shard].meta[row], self._indexes[shard].keys[row])
        try:
            sample = sample_from_json(data)
        except ValueError as error:
            raise self._damaged(shard, self._indexes[shard].keys[row], "its JSON cannot be read") from error
        if sample.key != self._indexes[shard].keys[row]:
            raise self._damaged(shard, self._indexes[shard].keys[row], "the tar holds another sample there")
        return sample

    def image_bytes(self, position: int) -> bytes:
        """The encoded image."""
        shard, row = self._locate(position)
        return self._read(shard, self._indexes[shard].image[row], self._indexes[shard].keys[row])

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """The decoded image: uint8 (H, W), or (H, W, 3) with `color`. Raises ImageError or ShardError."""
        return decode_image(self.image_bytes(position), color=color)

    def labels(self, sample: Sample) -> np.ndarray:
        """float32 (L,): 1, 0, -1 or NaN, in the order of `label_names`."""
        return label_row(sample.labels, self.label_names)

    def _open_index(self, shard: Shard) -> Index:
        path = self.folder / f"{shard.name}.tar"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ShardError(f"{path} is missing: copy it again, or make the shards again") from None
        if size != shard.bytes:
            raise ShardError(f"{path} has {size} bytes where the manifest says {shard.bytes}: copy it again")
        index = Index.read(path.with_suffix(".index"))
        ends = np.concatenate([index.image.sum(axis=1), index.meta.sum(axis=1)])
        if len(index.keys) != shard.samples or (len(ends) and ends.max() > size):
            raise ShardError(f"{path.with_suffix('.index')} does not belong to its tar: make the shards again")
        return index

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        shard = int(np.searchsorted(self._first, position, side="right")) - 1
        return shard, position - int(self._first[shard])

    def _read(self, shard: int, place: np.ndarray, key: str) -> bytes:
        offset, size = int(place[0]), int(place[1])
        tar = self._open(shard)
        # A mapped file that was cut since would end the process at the first touch beyond its end; this look is cheap.
        if os.fstat(tar.descriptor).st_size < offset + size:
            raise self._damaged(shard, key, "the tar ends before it")
        return tar.content[offset : offset + size]

    def _open(self, shard: int) -> "_Tar":
        if shard not in self._tars:
            with self._lock:
                if shard not in self._tars:
                    self._tars[shard] = _Tar(self.folder / f"{self.manifest.shards[shard].name}.tar")
        return self._tars[shard]

    def _damaged(self, shard: int, key: str, what: str) -> ShardError:
        path = self.folder / f"{self.manifest.shards[shard].name}.tar"
        return ShardError(
            f"{path} is damaged at sample {key}: {what}. `medvl verify {self.folder}` finds all such places."
        )


class _Tar:
    """A tar, mapped: an eighth of the time of positioned reads, and pages are shared by all workers of a machine."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.descriptor = os.dup(file.fileno())
        self.content = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def __del__(self) -> None:
        if hasattr(self, "content"):
            self.content.close()
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def label_row(labels: Mapping[str, int], names: Sequence[str]) -> np.ndarray:
    """float32 (L,): the labels in the order of `names`, NaN where there is none."""
    return np.array([labels.get(name, np.nan) for name in names], np.float32)
