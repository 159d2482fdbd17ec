"""Folders of DICOM slices to volumes.

    volume = read_dicom_series("study/series")
    volume.hu_DHW   # int16, z to the head, y to the back, x to the left
    volume.spacing  # (z, y, x) in mm
    volume.dropped  # {"localizer": 1}

Slices belong together by series, orientation, size and pixel spacing, never by folder, file name or
InstanceNumber, which is optional and often reversed. Their order and distance are those of their
positions along the normal, never SliceThickness. Each slice has its own rescale. Of the header,
only numbers and the modality are returned.
"""

import dataclasses
import functools
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, TypeVar, get_args

import numpy as np

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.dicom.parser import DicomFile, DicomLimits, damaged, open_dicom
from medvl.data.dicom.pixels import PixelLayout, decode_frame
from medvl.data.dicom.reader import listed_modality
from medvl.data.dicom.rendering import modality_transform
from medvl.data.dicom.tags import Tag
from medvl.data.volumes.options import Gaps, Tilt
from medvl.data.volumes.volume import (
    DEFAULT_LIMITS,
    MAX_OBLIQUE,
    MAX_TILT,
    Volume,
    VolumeLimits,
    padding_of,
    tilted,
    to_canonical,
    to_int16,
)
from medvl.errors import ConfigError, DicomError, VolumeError

_T = TypeVar("_T")
_DICOM_LIMITS = DicomLimits()
_SAME_PLACE = 0.01  # mm
_GAP = 0.01  # share of the median distance
_SAME_DIRECTION = 2e-3  # of direction cosines
_SAME_SPACING = 1e-3  # share of the pixel spacing
_MOST_STACKS = 1000  # each file is compared with each stack
_UNEVEN = 0.1  # the same, for distances that are resampled
_LEAST_OF_STACK = 3
_DERIVED = ("MPR", "REFORMATTED", "PROJECTION IMAGE", "MIP", "MINIP", "MAXIP", "CPR", "CURVED")
"""Values of ImageType of slices that were computed from others."""
_PHASES = (Tag.ACQUISITION, Tag.TEMPORAL_POSITION, Tag.CONTENT_TIME, Tag.ECHO)
"""What differs between several scans of one place, most telling first."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Slice:
    path: Path
    stack: Hashable
    """Equal for slices that may be stacked, where directions and spacing are near too."""
    shape: tuple[int, int]
    directions: np.ndarray
    """(2, 3): directions of a row and of a column."""
    spacing: tuple[float, float]
    """Millimetres between rows and between columns."""
    position: np.ndarray
    phases: tuple[bytes | None, ...]
    modality: str | None
    is_hounsfield: bool

    @property
    def normal(self) -> np.ndarray:
        return np.cross(self.directions[0], self.directions[1])

    @property
    def place(self) -> float:
        """Position along the normal in mm."""
        return float(self.normal @ self.position)

    def fits(self, other: "_Slice") -> bool:
        """Return whether two slices have one stack, direction and spacing; writers of slices round
        the numbers differently.
        """
        return (
            self.stack == other.stack
            and abs(self.spacing[0] - other.spacing[0]) <= _SAME_SPACING * self.spacing[0]
            and abs(self.spacing[1] - other.spacing[1]) <= _SAME_SPACING * self.spacing[1]
            and bool((abs(self.directions - other.directions) <= _SAME_DIRECTION).all())
        )


def read_dicom_series(
    folder: Path | str,
    *,
    stack: int | None = None,
    derived: bool = False,
    gaps: Gaps = "refuse",
    tilt: Tilt = "refuse",
    max_oblique: float = MAX_OBLIQUE,
    limits: VolumeLimits = DEFAULT_LIMITS,
    folders: InputFolders = ANYWHERE,
) -> Volume:
    """Read one volume from the slices below a folder.

    Args:
        folder: DICOM files with one slice each; other files are counted and skipped.
        stack: index of the stack to read where the folder has several, the one with most slices
            first. With None, such folders raise VolumeError ("conflict").
        derived: read reformatted slices (MPR, projections) too.
        gaps: "resample" interpolates slices whose distances vary by less than 10 % to even ones;
            "longest" keeps the longest run of slices at even distances (`Volume.dropped` counts the
            others as beyond_gap).
        tilt: "correct" shifts the slices of a tilted gantry within their planes, so that they are
            stacked along their normal; what moves out of the image is lost.
        max_oblique: largest angle between an axis and the patient's nearest one, in degrees.
        limits: limits for untrusted files.
        folders: folders that the files must be in, links resolved; default `folder`.

    Raises:
        FileNotFoundError: the folder does not exist.
        VolumeError: "gap": slices are missing or uneven; "conflict": several stacks, or different
            slices at one place; "tilt", "oblique": see `Volume`; "empty" or "too_small": fewer than
            two slices; "too_large"; "not_found": no such stack.
        DicomError: a slice cannot be read; codes as in `read_dicom`.
        ConfigError: "out_of_range" for `gaps` or `tilt`.
    """
    for field, value, kinds in (("gaps", gaps, get_args(Gaps)), ("tilt", tilt, get_args(Tilt))):
        if value not in kinds:
            raise ConfigError(
                f"expected {field} to be one of {', '.join(kinds)}, got {value!r}",
                "out_of_range",
                field=field,
            )
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    inside = folders if folders.real else InputFolders.of(folder)
    try:
        paths = _files_below(Path(folder), limits)
        reader = _Reader(paths, lambda path: inside.open(path, DicomError), limits)
        slices = _chosen(reader.stacks(derived=derived), stack, reader.dropped)
        return reader.read(slices, gaps, tilt, max_oblique)
    except VolumeError as error:
        raise error.prefixed(f"{folder}: ") from error
    except MemoryError as error:
        raise VolumeError(f"{folder}: not enough memory for the volume", "too_large") from error


def decode_dicom_series(files: Sequence[bytes], *, limits: VolumeLimits = DEFAULT_LIMITS) -> Volume:
    """Read one volume from the content of the files of a series, as `read_dicom_series`.

    Raises VolumeError and DicomError as `read_dicom_series`; their messages number the files.
    """
    if len(files) > limits.files:
        raise VolumeError(f"more than {limits.files} files", "too_large", field="files")
    content = {Path(f"file {number}"): data for number, data in enumerate(files, 1)}
    reader = _Reader([*content], lambda path: io.BytesIO(content[path]), limits)
    try:
        slices = _chosen(reader.stacks(derived=False), None, reader.dropped)
        return reader.read(slices, "refuse", "refuse", MAX_OBLIQUE)
    except MemoryError as error:
        raise VolumeError("not enough memory for the volume", "too_large") from error


def _files_below(folder: Path, limits: VolumeLimits) -> list[Path]:
    paths: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # a link to a folder that is read already
            folders.clear()
            continue
        seen.add(real)
        paths += [Path(root) / name for name in names]
        if len(paths) > limits.files:
            raise VolumeError(
                f"the folder has more than {limits.files} files; name that of one series",
                "too_large",
                field="files",
            )
    return sorted(paths)


def _chosen(
    stacks: Sequence[list[_Slice]], stack: int | None, dropped: Counter[str]
) -> list[_Slice]:
    if not stacks:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(dropped.items()))
        raise VolumeError(f"expected slices of a volume, got {found or 'no files'}", "empty")
    sizes = ", ".join(str(len(slices)) for slices in stacks)
    if stack is None and len(stacks) > 1:
        raise VolumeError(
            f"expected one stack of slices, got {len(stacks)} (of {sizes} slices); choose one with "
            "the option stack, or convert with --stacks largest",
            "conflict",
            field="stack",
        )
    if not 0 <= (stack or 0) < len(stacks):
        raise VolumeError(
            f"expected stack from 0 to {len(stacks) - 1}, got {stack}", "not_found", field="stack"
        )
    if len(stacks) > 1:
        dropped["other_stack"] += sum(map(len, stacks)) - len(stacks[stack or 0])
    return stacks[stack or 0]


class _Reader:
    """Reads the files of one series twice: all headers first, then the chosen pixels."""

    def __init__(
        self, paths: Sequence[Path], opener: Callable[[Path], BinaryIO], limits: VolumeLimits
    ) -> None:
        self._paths = paths
        self._opener = opener
        self._limits = limits
        self.dropped: Counter[str] = Counter()

    def stacks(self, *, derived: bool) -> list[list[_Slice]]:
        """Return the stacks of slices in the order of their places, most slices first."""
        groups: list[list[_Slice]] = []
        for path in self._paths:
            found = self._open(path, functools.partial(_slice, path, derived=derived))
            if isinstance(found, str):
                self.dropped[found] += 1
                continue
            group = next((group for group in groups if group[0].fits(found)), None)
            if group is None and len(groups) == _MOST_STACKS:
                raise VolumeError(
                    f"the folder has over {_MOST_STACKS} stacks; name that of one series",
                    "conflict",
                    field="stack",
                )
            if group is None:
                groups.append([found])
            else:
                group.append(found)
        if any(len(group) >= _LEAST_OF_STACK for group in groups):
            few = [group for group in groups if len(group) < _LEAST_OF_STACK]
            groups = [group for group in groups if len(group) >= _LEAST_OF_STACK]
            self.dropped["localizer"] += sum(map(len, few))  # an orientation of their own
            self.dropped += Counter()  # drop a count of 0
        parts = [part for group in groups for part in self._parts(group)]
        return sorted(parts, key=len, reverse=True)

    def read(self, slices: Sequence[_Slice], gaps: Gaps, tilt: Tilt, max_oblique: float) -> Volume:
        """Stack slices, which are in the order of their places."""
        if gaps == "longest":
            kept = _longest_run(slices)
            self.dropped["beyond_gap"] += len(slices) - len(kept)
            self.dropped += Counter()  # drop a count of 0
            slices = kept
        first = slices[0]
        if len(slices) < 2:
            raise VolumeError("expected at least two slices, got one", "too_small")
        if len(slices) * math.prod(first.shape) > self._limits.voxels:
            raise VolumeError(
                f"{len(slices)} slices of {first.shape} are over the limit of "
                f"{self._limits.voxels} voxels",
                "too_large",
                field="voxels",
            )
        places = np.array([each.place for each in slices])
        shifts = _shifts(slices, places, tilt)
        distances = np.diff(places)
        median = float(np.median(distances))
        off = np.abs(distances - median)
        is_even = bool((off <= max(_SAME_PLACE, _GAP * median)).all())
        if not is_even and not (gaps == "resample" and (off < _UNEVEN * median).all()):
            worst = int(off.argmax())
            raise VolumeError(
                f"slices {worst} and {worst + 1} are {distances[worst]:.2f} mm apart, expected "
                f"{median:.2f} mm; complete the series, or keep its longest part (the option gaps)",
                "gap",
                field="gaps",
            )
        hu_DHW = np.empty((len(slices), *first.shape), np.int16)
        for slice_HW, each, shift in zip(hu_DHW, slices, shifts, strict=True):
            slice_HW[:] = _shifted(self._pixels(each), shift, padding_of(first.modality))
        step = float(places[-1] - places[0]) / (len(slices) - 1)
        if not is_even:
            hu_DHW = _at_even_places(hu_DHW, (places - places[0]) / step)
        axes = np.stack(
            [
                first.normal * step,
                first.directions[1] * first.spacing[0],
                first.directions[0] * first.spacing[1],
            ],
            axis=1,
        )
        found = to_canonical(hu_DHW, axes, max_oblique, first.position)
        return Volume(
            hu_DHW=found.array,
            spacing=found.spacing,
            origin=found.origin,
            modality=first.modality,
            is_hounsfield=first.is_hounsfield,
            angle=found.angle,
            dropped=MappingProxyType(dict(self.dropped)),
        )

    def _open(self, path: Path, function: Callable[[DicomFile], _T]) -> _T | str:
        """Return what `function` makes of a file, or why it is no image."""
        with self._opener(path) as stream:
            try:
                return function(open_dicom(stream, _DICOM_LIMITS))
            except DicomError as error:
                if error.code in ("not_dicom", "no_pixels"):
                    return error.code
                raise error.prefixed(f"{path}: ") from error
            except OSError as error:
                message = f"{path} cannot be read ({error.strerror})"
                raise DicomError(message, "unreadable") from error

    def _pixels(self, chosen: _Slice) -> np.ndarray:
        """Return the values of one slice as int16."""

        def decode(file: DicomFile) -> np.ndarray:
            layout = PixelLayout.from_file(file)
            transform = modality_transform(file.elements, layout)
            values_HW = transform(decode_frame(file, layout, 0))
            padding = padding_of(chosen.modality)
            return to_int16(np.where(np.isfinite(values_HW), values_HW, padding))

        values = self._open(chosen.path, decode)
        if isinstance(values, str):
            raise VolumeError(f"{chosen.path} changed while it was read", "mismatch")
        return values

    def _parts(self, group: list[_Slice]) -> list[list[_Slice]]:
        """Sort a stack by place; drop copies of a slice, and part several scans of one place."""
        group = sorted(group, key=lambda each: each.place)
        unique = [group[0]]
        copies = 0
        for each in group[1:]:
            if not _is_same_place(unique[-1], each):
                unique.append(each)
            elif np.array_equal(self._pixels(unique[-1]), self._pixels(each)):
                copies += 1
            else:
                return _by_phase(group)
        self.dropped["duplicate"] += copies
        self.dropped += Counter()  # drop a count of 0
        return [unique]


def _is_same_place(one: _Slice, other: _Slice) -> bool:
    return abs(one.place - other.place) <= _SAME_PLACE


def _by_phase(group: list[_Slice]) -> list[list[_Slice]]:
    """Part a stack with several slices at one place by the first element that tells them apart."""
    for index in range(len(_PHASES)):
        parts: dict[bytes | None, list[_Slice]] = {}
        for each in group:
            parts.setdefault(each.phases[index], []).append(each)
        if len(parts) > 1 and all(map(_is_plain, parts.values())):
            return list(parts.values())
    raise VolumeError(
        "different slices are at one place, and neither acquisition, time nor echo tells them "
        "apart; leave one set of them out",
        "conflict",
    )


def _is_plain(part: list[_Slice]) -> bool:
    pairs = itertools.pairwise(part)
    return len(part) > 1 and not any(_is_same_place(one, other) for one, other in pairs)


def _longest_run(slices: Sequence[_Slice]) -> Sequence[_Slice]:
    """Return the longest run of slices at even distances; the first of equal ones."""
    distances = np.diff([each.place for each in slices])
    best = (0, min(2, len(slices)))
    start = 0
    for end in range(1, len(distances) + 1):
        run = distances[start:end]
        if abs(run[-1] - run[0]) > max(_SAME_PLACE, _GAP * run[0]):
            start = end - 1
        if end + 1 - start > best[1] - best[0]:
            best = (start, end + 1)
    return slices[best[0] : best[1]]


def _shifts(slices: Sequence[_Slice], places: np.ndarray, tilt: Tilt) -> np.ndarray:
    """Return (N, 2): pixels by which each slice lies further along its columns and rows than the
    first one; 0 where all are stacked along their normal.

    Raises VolumeError ("tilt") for others, unless they are to be corrected.
    """
    first = slices[0]
    steps = np.array([each.position - first.position for each in slices])
    aside = steps - np.outer(steps @ first.normal, first.normal)
    most = np.linalg.norm(aside, axis=1).max()
    extent = places[-1] - places[0]
    if most <= _SAME_PLACE + extent * math.tan(math.radians(MAX_TILT)):
        return np.zeros((len(slices), 2))
    if tilt == "refuse":
        raise tilted(math.degrees(math.atan2(most, extent)))
    shifts: np.ndarray = aside @ first.directions[::-1].T / np.array(first.spacing)
    return np.round(shifts, 6)  # whole pixels stay whole


def _shifted(values_HW: np.ndarray, shift: np.ndarray, padding: int) -> np.ndarray:
    """Return a slice with its content moved by pixels along (y, x); padding moves in."""
    if not shift.any():
        return values_HW
    from scipy import ndimage

    moved = ndimage.shift(
        values_HW.astype(np.float32), shift, order=1, mode="grid-constant", cval=padding
    )
    return to_int16(moved)


def _at_even_places(hu_DHW: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Interpolate slices at increasing places, in units of the even distance, to 0, 1, 2, ..."""
    out_DHW = np.empty_like(hu_DHW)
    for index in range(len(hu_DHW)):
        upper = int(np.clip(np.searchsorted(places, index), 1, len(hu_DHW) - 1))
        low, high = places[upper - 1], places[upper]
        share = np.clip((index - low) / (high - low), 0, 1)
        out_DHW[index] = to_int16(hu_DHW[upper - 1] * (1 - share) + hu_DHW[upper] * share)
    return out_DHW


def _slice(path: Path, file: DicomFile, *, derived: bool) -> _Slice | str:
    """Return the geometry of a slice, or the kind of an image that is none."""
    elements = file.elements
    layout = PixelLayout.from_file(file)
    image_type = (elements.raw(Tag.IMAGE_TYPE) or b"").decode("ascii", "replace").upper()
    kinds = {kind.strip(" \0") for kind in image_type.split("\\")}
    if "LOCALIZER" in kinds:
        return "localizer"
    if not derived and kinds.intersection(_DERIVED):
        return "derived"
    position = elements.numbers(Tag.POSITION)
    orientation = elements.numbers(Tag.ORIENTATION)
    if layout.samples > 1:
        return "color"
    if layout.frames > 1:
        if not position and not elements.vr(Tag.FRAME_GROUPS):  # a film, or rotating views
            return "multi_frame"
        raise DicomError(
            "enhanced files with several frames are not read as a series; convert the file to one "
            "slice a file",
            "multi_frame",
        )
    if not position or not orientation:
        return "no_position"
    directions = _vector(orientation, 6, Tag.ORIENTATION).reshape(2, 3)
    if not np.allclose(directions @ directions.T, np.eye(2), atol=1e-2):
        raise damaged(Tag.ORIENTATION, "is not of two directions at a right angle")
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    spacing = _vector(elements.numbers(Tag.PIXEL_SPACING), 2, Tag.PIXEL_SPACING)
    if not (spacing > 0).all():
        raise damaged(Tag.PIXEL_SPACING, "is not above 0")
    modality = listed_modality(elements)
    rescale_type = elements.text(Tag.RESCALE_TYPE)
    shape = (layout.rows, layout.columns)
    return _Slice(
        path=path,
        stack=(
            elements.raw(Tag.SERIES),
            shape,
            modality,
        ),
        shape=shape,
        directions=directions,
        spacing=(float(spacing[0]), float(spacing[1])),
        position=_vector(position, 3, Tag.POSITION),
        phases=tuple(elements.raw(tag) for tag in _PHASES),
        modality=modality,
        is_hounsfield=modality == "CT"
        and rescale_type in (None, "HU")
        and elements.vr(Tag.INTERCEPT) is not None,
    )


def _vector(numbers: Sequence[float | None], size: int, tag: Tag) -> np.ndarray:
    """Return finite numbers of an element; DicomError ("malformed") for others."""
    vector = np.array([math.nan if number is None else number for number in numbers])
    if vector.shape != (size,) or not np.isfinite(vector).all():
        raise damaged(tag, f"is not of {size} numbers")
    return vector
