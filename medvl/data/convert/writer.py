"""One shard: read the files of its records, encode the images, write the tar and its index, note what happened."""

import dataclasses
import hashlib
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from medvl.common.files import write_atomic
from medvl.data.convert.options import ShardOptions
from medvl.data.corpora.common.tables import Record, read_record
from medvl.data.images.codecs import encode_jpeg, encode_png, resize_short_side
from medvl.data.images.read import read_pixels
from medvl.data.shards.format import Index, Shard, sample_to_json
from medvl.errors import DicomError, ImageError, ReportError
from medvl.schema import Sample

_BLOCK = tarfile.BLOCKSIZE


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTask:
    """What goes into one shard, decided before any file is read."""

    name: str
    split: str
    folder: Path
    records: tuple[Record, ...]
    options: ShardOptions


@dataclasses.dataclass(slots=True)
class ShardNote:
    """What is known of a finished shard; kept in OUT-private until the manifest is written, and after."""

    name: str
    split: str
    samples: int = 0
    size: int = 0
    """Bytes of the tar."""
    sha256: str = ""
    index_sha256: str = ""
    patients: list[str] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    """(key, reason, message)."""
    excluded: Counter[str] = dataclasses.field(default_factory=Counter)
    warnings: Counter[str] = dataclasses.field(default_factory=Counter)

    def to_json(self) -> str:
        """For its file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, data: bytes) -> "ShardNote":
        """Raises ValueError or TypeError when the file was cut short or is something else."""
        note = cls(**json.loads(data))
        note.excluded, note.warnings = Counter(note.excluded), Counter(note.warnings)
        note.skipped = [(key, reason, message) for key, reason, message in note.skipped]
        return note

    @property
    def shard(self) -> Shard:
        """What the manifest keeps of it."""
        return Shard(
            name=self.name,
            samples=self.samples,
            bytes=self.size,
            sha256=self.sha256,
            index_sha256=self.index_sha256,
        )


def build_shard(task: ShardTask, tick: Callable[[], None]) -> ShardNote:
    """Write one shard and its index, whole or not at all. `tick` is called after each record.

    Unreadable images are noted, not raised. Raises OSError when the disk refuses.
    """
    note = ShardNote(task.name, task.split)
    tar, index = task.folder / f"{task.name}.tar", task.folder / f"{task.name}.index"
    partial = tar.with_name(tar.name + ".partial")
    try:
        with partial.open("wb") as file:
            writer = _TarWriter(file)
            for record in task.records:
                _add(record, task.options, writer, note)
                tick()
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        index_text = writer.index().to_text()
        write_atomic(index, index_text)
        partial.replace(tar)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    note.samples, note.size, note.sha256 = len(writer.keys), writer.offset, writer.hash.hexdigest()
    note.index_sha256 = hashlib.sha256(index_text.encode()).hexdigest()
    note.patients = sorted(set(note.patients))
    return note


def _add(record: Record, options: ShardOptions, writer: "_TarWriter", note: ShardNote) -> None:
    key = record.sample.key
    try:
        sample = read_record(record, note.warnings)
        if not any(sample.sections.values()) and not options.keep_textless:
            note.excluded["no_text"] += 1
            return
        pixels, sample = read_pixels(sample, color=options.color, warnings=note.warnings)
        data = _encode(pixels, options)
    except (DicomError, ImageError) as error:
        note.skipped.append((key, error.code, str(error)))
    except MemoryError:
        note.skipped.append((key, "too_large", "it takes more memory than a worker may have"))
    except FileNotFoundError as error:
        kind = "report_missing" if record.report and str(record.report) == error.filename else "image_missing"
        note.skipped.append((key, kind, str(error)))
    except ReportError as error:
        note.skipped.append((key, "report_unreadable", str(error)))
    else:
        writer.add(sample, options.image_format, data)
        note.patients.append(sample.patient)


def _encode(pixels: np.ndarray, options: ShardOptions) -> bytes:
    small = resize_short_side(pixels, options.short_side)
    return encode_jpeg(small, options.quality) if options.image_format == "jpg" else encode_png(small)


class _TarWriter:
    """Writes members with fixed headers and remembers where they lie: equal content gives an equal file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.offset = 0
        self.hash = hashlib.sha256()
        self.keys: list[str] = []
        self.suffixes: list[str] = []
        self.places: list[tuple[int, int, int, int]] = []

    def add(self, sample: Sample, suffix: str, image: bytes) -> None:
        self.keys.append(sample.key)
        self.suffixes.append(suffix)
        image_place = self._member(f"{sample.key}.{suffix}", image)
        meta_place = self._member(f"{sample.key}.json", sample_to_json(sample))
        self.places.append((*image_place, *meta_place))

    def index(self) -> Index:
        places = np.array(self.places, np.int64).reshape(-1, 4)
        return Index(tuple(self.keys), tuple(self.suffixes), places[:, :2], places[:, 2:])

    def close(self) -> None:
        self._write(bytes(2 * _BLOCK))

    def _member(self, name: str, data: bytes) -> tuple[int, int]:
        header = tarfile.TarInfo(name)  # its defaults: owner 0, time 0, mode 0644
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        place = (self.offset, len(data))
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return place

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.offset += len(data)
