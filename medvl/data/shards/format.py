"""The shard format: plain webdataset tars, one index per tar, one manifest per folder.

    OUT/train/mimic-cxr-train-000000.tar      {key}.jpg {key}.json {key}.jpg ...
                                              of volumes {key}.vol in place of {key}.jpg, and
                                              {key}.organs where they have masks of organs
    OUT/train/mimic-cxr-train-000000.index    key, suffix, offset, size: two lines per sample, a
                                              third one for its organs
    OUT/train/manifest.json
        content of the folder, conversion options, excluded and skipped images

A sample without an image has its JSON only; the line of its image has the suffix `-` and two zeros.
`medvl.data.shards.source.ShardSource` reads samples by position with the help of the indexes.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from medvl.common.files import new_file, write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.storage.location import Location, locate
from medvl.errors import ShardError
from medvl.schema import SCHEMA_VERSION, Sample

MANIFEST = "manifest.json"
IMAGE_SUFFIXES = ("jpg", "png")
VOLUME_SUFFIX = "vol"
"""Suffix of the members of `medvl.data.volumes.codec`, in place of an image."""
ORGAN_SUFFIX = "organs"
"""Suffix of the organs of voxels, in the same format, beside a volume."""
REGION_SUFFIX = "safetensors"
"""Suffix of the members of `medvl.data.shards.regions`."""
NO_IMAGE = "-"
"""Suffix in the index of a sample without an image."""
MAX_MEMBER_BYTES = 256 * 2**20
_INDEX_HEADER = "# medvl index 1"
_TYPES = {
    ("key", "corpus", "split", "patient", "study"): (str,),
    ("view", "sex"): (str, type(None)),
    ("age", "order"): (int, type(None)),
}
_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Manifest entry of one tar."""

    name: str
    """File name without `.tar`."""
    samples: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a folder of shards and how it was converted. Deterministic: no dates, paths or
    host names.
    """

    corpus: str
    split: str
    samples: int
    shards: tuple[Shard, ...]
    label_names: tuple[str, ...]
    patients: tuple[str, ...]
    """Hashed patient ids, sorted. Used to check that splits are disjoint."""
    salt: str
    """Fingerprint of the salt that hashed the ids."""
    planned: int
    """Images of this split given to the converter: samples + excluded + skipped."""
    excluded_from_corpus: Mapping[str, int]
    """Rows of the whole corpus left out before planning by an option or a rule, by reason."""
    excluded: Mapping[str, int]
    """Images of this split excluded during conversion (no text), by rule."""
    skipped: Mapping[str, int]
    """Unreadable images of this split, by reason."""
    skipped_keys: tuple[tuple[str, str], ...]
    """(key, reason) of each skipped image."""
    warnings: Mapping[str, int]
    """Counts of irregularities in stored samples: samples without an image (`no_image`), empty
    sections, possible identifiers in a text, ... Repairs to the tables of the corpus are counted
    over all splits.
    """
    options: Mapping[str, Any]
    packages: Mapping[str, str]
    schema_version: int = SCHEMA_VERSION
    generators: tuple[Mapping[str, Any], ...] = ()
    """Generators of the synthetic images of the folder: `sha256` of the weights, and `trained_on`,
    the JSON of the manifests of all their training data. Empty: no image is synthetic.
    """
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rows of the whole corpus: `unit`, `read`, `kept`, and `skipped` by reason, as
    `RowCounts.to_json` returns them. Empty in manifests of earlier versions.
    """

    @property
    def fingerprint(self) -> str:
        """sha256 over corpus, split, label names and shard hashes: the data version that a run
        records.
        """
        content = [
            self.corpus,
            self.split,
            list(self.label_names),
            [shard.sha256 for shard in self.shards],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def color(self) -> bool:
        """Whether the images are stored in colour (`ShardOptions.color`)."""
        return bool(self.options.get("color"))

    def to_json(self) -> dict[str, Any]:
        """Return the content of `manifest.json`; `generators` and `rows` only if there are
        any.
        """
        content = dataclasses.asdict(self)
        return {
            name: value
            for name, value in content.items()
            if value or name not in ("generators", "rows")
        }

    def to_text(self) -> str:
        """Return the text of `manifest.json`."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n"

    def lineage(self) -> Iterator["Manifest"]:
        """Yield this manifest and those of all data that its generators were trained on, theirs
        included.

        A model trained on a generator's images depends on the generator's training data. Raises
        ShardError when one is damaged.
        """
        yield self
        for generator in self.generators:
            for content in generator["trained_on"]:
                yield from Manifest.parse(
                    content, f"training data of a generator of {self.corpus}"
                ).lineage()

    def write(self, folder: Path) -> None:
        """Write `manifest.json` atomically."""
        write_atomic(folder / MANIFEST, self.to_text())

    @classmethod
    def read(cls, folder: str | Location, name: str = MANIFEST) -> "Manifest":
        """Read the manifest of a folder or an address.

        Raises ShardError when it is missing, damaged or of another schema version, StorageError.
        """
        path = locate(folder) / name
        try:
            content = parse_json(path.read_bytes())
        except FileNotFoundError:
            advice = "the conversion is not finished, or the folder has no shards; "
            advice += "`medvl shards --help` lists the commands that create shards"
            raise ShardError(
                f"{path} does not exist: {nearby_splits(folder) or advice}", "not_found"
            ) from None
        except (ValueError, OSError) as error:
            code = "malformed" if isinstance(error, ValueError) else "unreadable"
            raise ShardError(
                f"cannot read {path} ({type(error).__name__}); convert the corpus again", code
            ) from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: Any, where: str) -> "Manifest":
        """Build a manifest from its JSON. Raises ShardError, naming `where`, when it does not
        have this schema.
        """
        if not isinstance(content, dict):
            raise ShardError(
                f"{where}: expected a JSON object; convert the corpus again", "malformed"
            )
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            expected = f"expected schema version {SCHEMA_VERSION}, got {version}"
            raise ShardError(f"{where}: {expected}; convert the corpus again", "version")
        content = dict(content)
        try:
            content["shards"] = tuple(Shard(**shard) for shard in content["shards"])
            content["skipped_keys"] = tuple(
                (key, reason) for key, reason in content["skipped_keys"]
            )
            for name in ("label_names", "patients"):
                content[name] = tuple(content[name])
            content["generators"] = tuple(
                _parse_generator(each) for each in content.get("generators", ())
            )
            _check_rows(content.get("rows", {}))
            return cls(**content)
        except (TypeError, KeyError, ValueError) as error:
            raise ShardError(
                f"{where}: missing or unknown fields ({error}); convert again", "malformed"
            ) from error


def nearby_splits(folder: str | Location) -> str:
    """Return advice that names the folders of splits in a local folder, or beside it; "" where
    there are none.
    """
    path = locate(folder)
    if not isinstance(path, Path):
        return ""
    inside, beside = (
        sorted(manifest.parent for manifest in where.glob(f"*/{MANIFEST}"))
        for where in (path, path.parent)
    )
    folders = inside or ([] if path.exists() else beside)
    return f"give the folder of one split: {', '.join(map(str, folders))}" if folders else ""


def _check_rows(content: Any) -> None:
    """Raise TypeError unless the rows of a manifest are empty or have the form of
    `RowCounts.to_json`.
    """
    if not isinstance(content, dict):
        raise TypeError("rows is an object")
    if content:
        skipped = content.get("skipped")
        counts = [
            content.get("read"),
            content.get("kept"),
            *(skipped.values() if isinstance(skipped, dict) else [None]),
        ]
        if not isinstance(content.get("unit"), str) or not all(
            type(count) is int for count in counts
        ):
            raise TypeError("rows has unit, read, kept and skipped")


def _parse_generator(content: Any) -> Mapping[str, Any]:
    """Raise TypeError unless a generator has a hash and a list of manifests."""
    if not (isinstance(content, dict) and set(content) == {"sha256", "trained_on"}):
        raise TypeError("a generator has sha256 and trained_on")
    if not (isinstance(content["sha256"], str) and isinstance(content["trained_on"], list)):
        raise TypeError("a generator has a hash and a list of manifests")
    return content


def split_folders(folder: str | Location) -> list[Location]:
    """Return the folders of shards in a folder of splits; the folder itself if it is one, or
    contains none.
    """
    root = locate(folder)
    if (root / MANIFEST).is_file():
        return [root]
    folders = [path.parent for path in root.glob(f"*/{MANIFEST}")]
    return sorted(folders, key=str) or [root]


def sample_to_json(sample: Sample) -> bytes:
    """Return the content of `{key}.json`: the sample without its image path and without empty
    fields.
    """
    fields = {
        field.name: getattr(sample, field.name)
        for field in dataclasses.fields(sample)
        if field.name != "image"
    }
    content = {name: value for name, value in fields.items() if value not in (None, {}, "")}
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def sample_from_json(data: bytes) -> Sample:
    """Parse the content of `{key}.json`. Raises ValueError when it is not a sample."""
    fields = parse_json(data)
    if not isinstance(fields, dict):
        raise ValueError("a sample must be a JSON object")
    try:
        sample = Sample(**fields)
    except TypeError as error:
        raise ValueError(f"not the fields of a sample: {error}") from error
    if (field := _field_of_wrong_type(sample)) is not None:
        raise ValueError(f"{field} of a sample has the wrong type")
    return sample


def check_sample(sample: Sample) -> None:
    """Raise ShardError when a field has another type than `Sample` documents, or the key is not
    a safe member name.
    """
    if (field := _field_of_wrong_type(sample)) is not None:
        message = (
            f"a sample of {sample.corpus} has a {field} of the wrong type; see medvl.schema.Sample"
        )
        raise ShardError(message, "wrong_type", field=field)
    check_key(sample.key)


def _field_of_wrong_type(sample: Sample) -> str | None:
    for names, kinds in _TYPES.items():
        for name in names:
            if type(getattr(sample, name)) not in kinds:
                return name
    for name in ("sections", "labels", "extra"):
        if not isinstance(getattr(sample, name), Mapping):
            return name
    if not all(type(name) is type(text) is str for name, text in sample.sections.items()):
        return "sections"
    if not all(
        type(name) is str and type(value) is int and -1 <= value <= 1
        for name, value in sample.labels.items()
    ):
        return "labels"
    return None


def check_key(key: str) -> None:
    """Raise ShardError unless `key` is a safe member name: no dots, no path separators."""
    if not _KEY.fullmatch(key):
        raise ShardError(
            "a sample key must have 1 to 100 letters, digits, '-' or '_'", "malformed", field="key"
        )


def label_row(labels: Mapping[str, int], names: Sequence[str]) -> np.ndarray:
    """Return the labels in the order of `names`: float32 (L,), NaN where a label is absent."""
    return np.array([labels.get(name, np.nan) for name in names], np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """Positions of the members of one tar. Row i is sample i of the shard."""

    keys: tuple[str, ...]
    suffixes: tuple[str, ...]
    """Image suffixes; `NO_IMAGE` where a sample has none."""
    image: np.ndarray
    """int64 (n, 2): offset and size of each image; zeros where a sample has none."""
    meta: np.ndarray
    """int64 (n, 2): offset and size of each JSON."""
    organs: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Row -> offset and size of the organs, of samples that have them."""

    def to_text(self) -> str:
        """Return the index file: a header, then `key<TAB>suffix<TAB>offset<TAB>size`, two or
        three lines per sample.
        """
        lines = [_INDEX_HEADER]
        rows = zip(self.keys, self.suffixes, self.image, self.meta, strict=True)
        for row, (key, suffix, image, meta) in enumerate(rows):
            lines.append(f"{key}\t{suffix}\t{image[0]}\t{image[1]}")
            if row in self.organs:
                offset, size = self.organs[row]
                lines.append(f"{key}\t{ORGAN_SUFFIX}\t{offset}\t{size}")
            lines.append(f"{key}\tjson\t{meta[0]}\t{meta[1]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: Location, data: bytes | None = None) -> "Index":
        """Read an index file, or its content if given. Raises ShardError when it is missing or
        damaged.
        """
        try:
            lines = (path.read_bytes() if data is None else data).decode("ascii").splitlines()
            if not lines or lines[0] != _INDEX_HEADER:
                raise ValueError("header")
            rows = [line.split("\t") for line in lines[1:]]
            rows, organs = _without_organs(rows)
            if len(rows) % 2:
                raise ValueError("number of lines")
            images = rows[0::2]
            metas = rows[1::2]
            for image, meta in zip(images, metas, strict=True):
                if (
                    image[0] != meta[0]
                    or image[1] not in (*IMAGE_SUFFIXES, VOLUME_SUFFIX, NO_IMAGE)
                    or meta[1] != "json"
                ):
                    raise ValueError(f"lines of sample {image[0]}")
            tables = [
                np.array([row[2:4] for row in part], np.int64).reshape(-1, 2)
                for part in (images, metas)
            ]
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist; copy the .index files too", "not_found"
            ) from None
        except (ValueError, IndexError, OSError) as error:
            raise ShardError(
                f"{path} is damaged ({error}); convert the corpus again", "malformed"
            ) from error
        has_image_N = np.array([row[1] != NO_IMAGE for row in images], bool)
        if tables[0][~has_image_N].any():
            raise ShardError(
                f"{path} is damaged: an image without a suffix; convert the corpus again",
                "malformed",
            )
        organs_N2 = np.array(list(organs.values()), np.int64).reshape(-1, 2)
        for table_N2 in (tables[0][has_image_N], tables[1], organs_N2):
            offset_N, size_N = table_N2.T
            if (offset_N < 0).any() or (size_N <= 0).any() or (size_N > MAX_MEMBER_BYTES).any():
                raise ShardError(
                    f"{path} is damaged: an offset or a size is out of range", "malformed"
                )
        # shared strings: a loader keeps every index in memory
        suffixes = tuple(sys.intern(row[1]) for row in images)
        return cls(tuple(row[0] for row in images), suffixes, tables[0], tables[1], organs)


def _without_organs(
    rows: list[list[str]],
) -> tuple[list[list[str]], dict[int, tuple[int, int]]]:
    """Return the lines of images and of JSON, and row -> place of the organs, whose lines are
    between them. Raises ValueError or IndexError for other lines.
    """
    if not any(row[1] == ORGAN_SUFFIX for row in rows):
        return rows, {}
    others: list[list[str]] = []
    organs: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row[1] != ORGAN_SUFFIX:
            others.append(row)
        elif len(others) % 2 == 0 or others[-1][:2] != [row[0], VOLUME_SUFFIX]:
            raise ValueError(f"organs of sample {row[0]}")
        elif len(others) // 2 in organs:
            raise ValueError(f"two organs of sample {row[0]}")
        else:
            organs[len(others) // 2] = (int(row[2]), int(row[3]))
    return others, organs


# Reading the members of an untrusted tar in order and in bounded memory.
#
# Only what shards contain is accepted: plain files with short names. Links, devices, sparse files
# and extended headers are refused; Python's `tarfile` would load an extended header of gigabytes,
# expand sparse files and keep every member in memory. Nothing is unpacked to disk.

_SUFFIXES = ("json", *IMAGE_SUFFIXES, VOLUME_SUFFIX, ORGAN_SUFFIX, REGION_SUFFIX)
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,100}}\.(?:{'|'.join(_SUFFIXES)})")
_BLOCK = tarfile.BLOCKSIZE


class Readable(Protocol):
    """A byte stream: a file, a pipe or an HTTP response."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""


class Member(NamedTuple):
    """One file of a tar."""

    name: str
    offset: int
    """Position of its first byte in the tar."""
    data: bytes


def read_members(stream: Readable, where: str) -> Iterator[Member]:
    """Yield the members of a tar from its start.

    Raises ShardError, naming `where`, at the first header that is damaged or does not belong to a
    sample's file, and where the tar is truncated. The members before it have been yielded.
    """
    offset = 0
    while True:
        block = _read(stream, _BLOCK, where)
        offset += _BLOCK
        if not block.strip(b"\0"):
            return
        header = _header(block, where)
        data = _read(stream, header.size, where)
        yield Member(header.name, offset, data)
        padding = -header.size % _BLOCK
        _read(stream, padding, where)
        offset += header.size + padding


def read_samples(stream: Readable, where: str) -> Iterator[dict[str, Any]]:
    """Yield the members of a tar grouped by sample: `__key__`, and the data of each member by
    suffix.

    Raises ShardError as `read_members` does.
    """
    sample: dict[str, Any] = {}
    for member in read_members(stream, where):
        key, _, suffix = member.name.rpartition(".")
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        sample |= {"__key__": key, suffix: member.data}
    if sample:
        yield sample


def _header(block: bytes, where: str) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError):
        raise ShardError(
            f"{where}: damaged tar header; copy it, or convert the corpus again", "malformed"
        ) from None
    if (
        header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE)
        or not 0 <= header.size <= MAX_MEMBER_BYTES
    ):
        limit = f"a plain file of at most {MAX_MEMBER_BYTES >> 20} MiB"
        raise ShardError(f"{where}: a member is not {limit}; medvl did not write it", "unsupported")
    if not _NAME.fullmatch(header.name):
        raise ShardError(
            f"{where}: a member's name is not that of a sample; medvl did not write it",
            "unsupported",
        )
    return header


def _read(stream: Readable, size: int, where: str) -> bytes:
    data = stream.read(size) if size else b""
    if len(data) != size:
        raise ShardError(
            f"{where}: unexpected end of the tar; copy it again, or check the network", "truncated"
        )
    return data


# Writing tars whose bytes depend on their content alone.


class TarWriter:
    """Tar with fixed member headers, so that equal content gives equal bytes.

    Attributes:
        offset: bytes written so far.
        hash: sha256 of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0
        self.hash = hashlib.sha256()

    def member(self, name: str, data: bytes) -> tuple[int, int]:
        """Append a file. Returns the offset of its first byte, and its size."""
        header = tarfile.TarInfo(name)  # its defaults: owner 0, time 0, mode 0644
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        place = (self.offset, len(data))
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return place

    def close(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * _BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.offset += len(data)


@contextlib.contextmanager
def new_tar(path: Path) -> Iterator[TarWriter]:
    """Yield the writer of a tar that is complete, flushed and renamed to `path` at the end of the
    block.

    No partial tar is left on an error. Write the index inside the block: a tar under its name then
    has one.
    """
    with new_file(path) as file:
        yield TarWriter(file)
