"""Conversion of records: read report and image, encode both as the members of a shard."""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from medvl.common.files import write_atomic
from medvl.common.untrusted import InputFolders, parse_json
from medvl.data.annotations import (
    add_size,
    box_edges,
    crop_regions,
    encode_runs,
    published_size,
    region_fields,
)
from medvl.data.convert.options import ShardOptions, VolumeShardOptions
from medvl.data.corpora.common.tables import Record, read_record
from medvl.data.dicom.reader import DicomHeader
from medvl.data.images.codecs import encode_stored
from medvl.data.images.read import check_sides, find_foreground, read_pixels
from medvl.data.shards.format import (
    NO_IMAGE,
    ORGAN_SUFFIX,
    VOLUME_SUFFIX,
    Index,
    Shard,
    TarWriter,
    new_tar,
    sample_to_json,
)
from medvl.data.storage.tars import Content, read_parts
from medvl.data.volumes.reading import encode_stored_volume
from medvl.errors import DicomError, ImageError, ReportError, VolumeError
from medvl.schema import FilePart, Sample

_GROUP_BYTES = 64 * 2**20
"""Bytes of images inside of larger files that are read at once."""

# The note of a finished shard: its manifest entry, and the images that were skipped or excluded.


class SkippedImage(NamedTuple):
    """An image that could not be converted."""

    key: str
    reason: str
    message: str
    files: tuple[str, ...]
    """Files of its record."""


@dataclasses.dataclass(slots=True)
class ShardNote:
    """Result of converting one shard; stored in OUT-private, where a resumed run finds it."""

    name: str
    split: str
    samples: int = 0
    size: int = 0
    """Bytes of the tar."""
    sha256: str = ""
    index_sha256: str = ""
    patients: list[str] = dataclasses.field(default_factory=list)
    skipped: list[SkippedImage] = dataclasses.field(default_factory=list)
    excluded: Counter[str] = dataclasses.field(default_factory=Counter)
    warnings: Counter[str] = dataclasses.field(default_factory=Counter)

    def to_json(self) -> str:
        """Return the content of the note's file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, data: bytes) -> "ShardNote":
        """Parse a note's file. Raises ValueError or TypeError when it is truncated or not a
        note.
        """
        note = cls(**parse_json(data))
        note.excluded = Counter(note.excluded)
        note.warnings = Counter(note.warnings)
        note.skipped = [
            SkippedImage(key, why, text, tuple(files)) for key, why, text, files in note.skipped
        ]
        return note

    def complete(self, shard: Shard) -> "ShardNote":
        """Add the entry of the written tar. Returns the note."""
        self.samples = shard.samples
        self.size = shard.bytes
        self.sha256 = shard.sha256
        self.index_sha256 = shard.index_sha256
        self.patients = sorted(set(self.patients))
        return self

    @property
    def shard(self) -> Shard:
        """Manifest entry of the shard."""
        return Shard(
            name=self.name,
            samples=self.samples,
            bytes=self.size,
            sha256=self.sha256,
            index_sha256=self.index_sha256,
        )


class EncodedSample(NamedTuple):
    """The members of a sample in a tar: image, organs and JSON, or some of them."""

    key: str
    suffix: str
    """Suffix of the image; `NO_IMAGE` where there is none."""
    image: bytes
    meta: bytes
    """Content of `{key}.json`."""
    organs: bytes = b""
    """Content of `{key}.organs`; empty where there is none."""


def convert_records(
    records: Iterable[Record],
    options: ShardOptions,
    folders: InputFolders,
    note: ShardNote,
    tick: Callable[[], None],
) -> Iterator[EncodedSample]:
    """Yield the readable samples of a shard; note patients, warnings, and skipped and excluded
    images.

    `tick` is called after each record.
    """
    for group in _groups(records):
        contents = read_parts(filter(None, map(_part_of, group)))
        for record in group:
            part = _part_of(record)
            content = None if part is None else contents.pop(part)
            encoded = _convert(record, content, options, folders, note)
            if encoded is not None:
                yield encoded
            tick()


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in groups, whose parts of files are read at once, from start to end of each
    file.
    """
    group: list[Record] = []
    size = 0
    for record in records:
        group.append(record)
        part = _part_of(record)
        if part is not None:
            size += part.size if part.page is None else part.page.size
        if size >= _GROUP_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _part_of(record: Record) -> FilePart | None:
    return record.sample.image if isinstance(record.sample.image, FilePart) else None


def _convert(
    record: Record,
    content: Content | None,
    options: ShardOptions,
    folders: InputFolders,
    note: ShardNote,
) -> EncodedSample | None:
    key = record.sample.key
    try:
        sample = read_record(record, note.warnings, folders)
        if not any(sample.sections.values()) and (
            sample.image is None or not options.keep_textless
        ):
            note.excluded["no_text"] += 1
            return None
        if sample.image is None:
            note.patients.append(sample.patient)
            note.warnings["no_image"] += 1
            return EncodedSample(key, NO_IMAGE, b"", sample_to_json(sample))
        if isinstance(content, Exception):
            raise content
        if record.volume is not None:
            given = options if isinstance(options, VolumeShardOptions) else VolumeShardOptions()
            encoded = _encode_volume(sample, record, given, folders, note.warnings)
            note.patients.append(sample.patient)
            return encoded
        pixels, header = read_pixels(
            sample.image,
            content=content,
            color=options.color,
            frame=options.frame,
            warnings=note.warnings,
            folders=folders,
        )
        check_sides(pixels, sample.image)
        sample = sample if header is None else _fill_in(sample, header)
        sample = _with_masks(_with_size(sample, pixels), pixels, record.masks, folders)
        if options.crop_background:
            sample, pixels = _crop_background(sample, pixels, note.warnings)
        image = encode_stored(pixels, options.short_side, options.image_format, options.quality)
    except (DicomError, ImageError, VolumeError) as error:
        skipped = error.code, str(error)
    except MemoryError:
        skipped = "too_large", f"{record.sample.image}: decoding exceeds a worker's memory limit"
    except FileNotFoundError as error:
        reason = (
            "report_missing"
            if record.report and str(record.report) == error.filename
            else "image_missing"
        )
        skipped = reason, f"{error.filename} does not exist"
    except ReportError as error:
        skipped = "report_unreadable", str(error)
    except (
        OSError
    ) as error:  # a failing disk or network file system; writing is outside of this block
        skipped = "unreadable", str(error)
    else:
        note.patients.append(sample.patient)
        return EncodedSample(key, options.image_format, image, sample_to_json(sample))
    note.skipped.append(SkippedImage(key, *skipped, tuple(map(str, record.files))))
    return None


def _encode_volume(
    sample: Sample,
    record: Record,
    options: VolumeShardOptions,
    folders: InputFolders,
    warnings: Counter[str],
) -> EncodedSample:
    if not isinstance(sample.image, Path) or record.volume is None:
        raise ImageError("expected a file or a folder of a volume, got a part", "unsupported")
    labels = options.organs.organ_labels
    stored = encode_stored_volume(
        sample.image, record.volume, options.volume, folders, record.masks, labels
    )
    for kind, count in stored.dropped.items():
        warnings[f"files_{kind}"] += count
    extra = {**sample.extra, **stored.fields}
    if stored.box is not None:
        organs = extra.get("organs")
        extra["organs"] = {**(organs if isinstance(organs, dict) else {}), "box": stored.box}
    meta = sample_to_json(dataclasses.replace(sample, extra=extra))
    return EncodedSample(sample.key, VOLUME_SUFFIX, stored.volume, meta, stored.organs)


def _crop_background(
    sample: Sample, pixels: np.ndarray, warnings: Counter[str]
) -> tuple[Sample, np.ndarray]:
    """Return the sample and the pixels of the foreground and of all boxes, or those of the whole
    image where no foreground is found.
    """
    box = find_foreground(pixels)
    if box is None:
        warnings["no_foreground"] += 1
        return sample, pixels
    height, width = pixels.shape[:2]
    size = (width, height)
    if "image_width" in sample.extra:  # masks may refer to a larger copy
        published_height, published_width = published_size(sample)
        size = (published_width, published_height)
    across, down = size[0] / width, size[1] / height
    edges = [(box[0], box[1], box[0] + box[2], box[1] + box[3])]
    edges += [
        (left / across, top / down, right / across, bottom / down)
        for left, top, right, bottom in box_edges(sample.extra)
    ]
    lefts, tops, rights, bottoms = zip(*edges, strict=True)
    left, top = max(0, math.floor(min(lefts))), max(0, math.floor(min(tops)))
    right, bottom = min(width, math.ceil(max(rights))), min(height, math.ceil(max(bottoms)))
    area = (
        round(left * across),
        round(top * down),
        round((right - left) * across),
        round((bottom - top) * down),
    )
    extra = crop_regions(sample.extra, area, size)
    return dataclasses.replace(sample, extra=extra), pixels[top:bottom, left:right]


def _with_size(sample: Sample, pixels: np.ndarray) -> Sample:
    try:
        return dataclasses.replace(sample, extra=add_size(sample.extra, pixels.shape))
    except ImageError as error:
        raise error.prefixed(f"{sample.image}: ") from None


def _with_masks(
    sample: Sample, pixels: np.ndarray, masks: Mapping[str, Path], folders: InputFolders
) -> Sample:
    """Return the sample with the masks of its files: pixels above half of a file's maximum;
    empty ones are left out.
    """
    if not masks:
        return sample
    entries: list[dict[str, str]] = []
    for label, path in masks.items():
        plane_HW, _ = read_pixels(path, folders=folders)
        if plane_HW.shape[:2] != pixels.shape[:2]:
            message = (
                f"{path}: expected a mask of {pixels.shape[0]} x {pixels.shape[1]} pixels "
                f"as its image"
            )
            raise ImageError(
                f"{message}, got {plane_HW.shape[0]} x {plane_HW.shape[1]}",
                "mismatch",
                field="masks",
            )
        if plane_HW.any():
            entries.append({"label": label, "runs": encode_runs(plane_HW > plane_HW.max() // 2)})
    fields = region_fields((pixels.shape[1], pixels.shape[0]), {"masks": entries})
    return dataclasses.replace(sample, extra={**sample.extra, **fields})


def _fill_in(sample: Sample, header: DicomHeader) -> Sample:
    """Return `sample` with missing fields filled in from the allow-listed header fields."""
    return dataclasses.replace(
        sample,
        view=sample.view or header.view_position,
        sex=sample.sex or (header.patient_sex if header.patient_sex in ("F", "M") else None),
        age=sample.age if sample.age is not None else header.patient_age,
    )


# The shard writer: one tar and its index, written atomically.


def write_shard(folder: Path, name: str, samples: Iterable[EncodedSample]) -> Shard:
    """Write `{name}.tar` and `{name}.index`. Returns the manifest entry.

    Raises OSError when writing fails. No partial tar is left then, or when the process is
    interrupted.
    """
    tar = folder / f"{name}.tar"
    with new_tar(tar) as writer:
        index = _write_members(writer, samples)
        writer.close()
        index_text = index.to_text()
        write_atomic(tar.with_suffix(".index"), index_text)
    return Shard(
        name=name,
        samples=len(index.keys),
        bytes=writer.offset,
        sha256=writer.hash.hexdigest(),
        index_sha256=hashlib.sha256(index_text.encode()).hexdigest(),
    )


def _write_members(writer: TarWriter, samples: Iterable[EncodedSample]) -> Index:
    keys = []
    suffixes = []
    places: list[tuple[int, int, int, int]] = []
    organs: dict[int, tuple[int, int]] = {}
    for sample in samples:
        keys.append(sample.key)
        suffixes.append(sample.suffix)
        has_image = sample.suffix != NO_IMAGE
        image_place = (
            writer.member(f"{sample.key}.{sample.suffix}", sample.image) if has_image else (0, 0)
        )
        if sample.organs:
            name = f"{sample.key}.{ORGAN_SUFFIX}"
            organs[len(places)] = writer.member(name, sample.organs)
        places.append((*image_place, *writer.member(f"{sample.key}.json", sample.meta)))
    places_N4 = np.array(places, np.int64).reshape(-1, 4)
    return Index(tuple(keys), tuple(suffixes), places_N4[:, :2], places_N4[:, 2:], organs)


# The unit of work of a conversion: one shard, built by any process that can read the same files.


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTask:
    """Work of one worker: the records of a shard, and where to write it."""

    name: str
    split: str
    folder: Path
    records: tuple[Record, ...]
    options: ShardOptions
    folders: InputFolders
    """Folders that images and reports must be in."""


def build_shard(task: ShardTask, tick: Callable[[], None]) -> ShardNote:
    """Convert and write one shard; unreadable images are noted, not raised. `tick` is called after
    each record.

    Raises OSError when writing fails.
    """
    note = ShardNote(task.name, task.split)
    samples = convert_records(task.records, task.options, task.folders, note, tick)
    return note.complete(write_shard(task.folder, task.name, samples))


# Interface of the engines: where the shards of a conversion are built. All of them write the same
# bytes.
#
# `local_engine.LocalEngine` uses the processes of this machine, `ray_engine.RayEngine` those of a
# Ray cluster. An engine does not affect the content: a `ShardTask` has the records, the options
# and the file to write.

Progress = Generator[tuple[ShardNote | None, int], None, None]
"""Notes of finished shards, or None about every half second, with the number of converted images
so far.
"""


class Engine(Protocol):
    """Interface of the engines."""

    def run(self, tasks: Iterable[ShardTask]) -> Progress:
        """Build shards; a limited number of tasks is queued. Closing the generator stops the
        workers.

        Raises ShardError when a worker died, and the error of a task that failed.
        """
