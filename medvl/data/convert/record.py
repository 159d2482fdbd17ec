"""Conversion of records: read report and image, encode both as the members of a shard."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medvl.common.untrusted import InputFolders
from medvl.data.annotations.boxes import add_size, region_fields
from medvl.data.annotations.mask_rle import encode_runs
from medvl.data.convert.note import ShardNote, SkippedImage
from medvl.data.convert.options import ShardOptions
from medvl.data.corpora.common.tables import Record, read_record
from medvl.data.dicom.reader import DicomHeader
from medvl.data.images.codecs import encode_stored
from medvl.data.images.read import check_sides, read_pixels
from medvl.data.shards.format import NO_IMAGE, sample_to_json
from medvl.errors import DicomError, ImageError, ReportError
from medvl.schema import Sample


class EncodedSample(NamedTuple):
    """The members of a sample in a tar: image and JSON, or JSON alone."""

    key: str
    suffix: str
    """Suffix of the image; `NO_IMAGE` where there is none."""
    image: bytes
    meta: bytes
    """Content of `{key}.json`."""


def convert_records(
    records: Iterable[Record],
    options: ShardOptions,
    folders: InputFolders,
    note: ShardNote,
    tick: Callable[[], None],
) -> Iterator[EncodedSample]:
    """Yield the readable samples of a shard; note patients, warnings, and skipped and excluded images.

    `tick` is called after each record.
    """
    for record in records:
        encoded = _convert(record, options, folders, note)
        if encoded is not None:
            yield encoded
        tick()


def _convert(record: Record, options: ShardOptions, folders: InputFolders, note: ShardNote) -> EncodedSample | None:
    key = record.sample.key
    try:
        sample = read_record(record, note.warnings, folders)
        if not any(sample.sections.values()) and (sample.image is None or not options.keep_textless):
            note.excluded["no_text"] += 1
            return None
        if sample.image is None:
            note.patients.append(sample.patient)
            note.warnings["no_image"] += 1
            return EncodedSample(key, NO_IMAGE, b"", sample_to_json(sample))
        pixels, header = read_pixels(
            sample.image, color=options.color, frame=options.frame, warnings=note.warnings, folders=folders
        )
        check_sides(pixels, sample.image)
        sample = sample if header is None else _fill_in(sample, header)
        sample = _with_masks(_with_size(sample, pixels), pixels, record.masks, folders)
        image = encode_stored(pixels, options.short_side, options.image_format, options.quality)
    except (DicomError, ImageError) as error:
        skipped = error.code, str(error)
    except MemoryError:
        skipped = "too_large", f"{record.sample.image}: decoding exceeds a worker's memory limit"
    except FileNotFoundError as error:
        reason = "report_missing" if record.report and str(record.report) == error.filename else "image_missing"
        skipped = reason, str(error)
    except ReportError as error:
        skipped = "report_unreadable", str(error)
    except OSError as error:  # a failing disk or network file system; writing is outside of this block
        skipped = "unreadable", str(error)
    else:
        note.patients.append(sample.patient)
        return EncodedSample(key, options.image_format, image, sample_to_json(sample))
    note.skipped.append(SkippedImage(key, *skipped, tuple(map(str, record.files))))
    return None


def _with_size(sample: Sample, pixels: np.ndarray) -> Sample:
    try:
        return dataclasses.replace(sample, extra=add_size(sample.extra, pixels.shape))
    except ImageError as error:
        raise error.prefixed(f"{sample.image}: ") from None


def _with_masks(sample: Sample, pixels: np.ndarray, masks: Mapping[str, Path], folders: InputFolders) -> Sample:
    """Return the sample with the masks of its files: pixels above half of a file's maximum; empty ones are left out."""
    if not masks:
        return sample
    entries: list[dict[str, str]] = []
    for label, path in masks.items():
        plane_HW, _ = read_pixels(path, folders=folders)
        if plane_HW.shape[:2] != pixels.shape[:2]:
            message = f"{path}: expected a mask of {pixels.shape[0]} x {pixels.shape[1]} pixels as its image"
            raise ImageError(f"{message}, got {plane_HW.shape[0]} x {plane_HW.shape[1]}", "mismatch", field="masks")
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
