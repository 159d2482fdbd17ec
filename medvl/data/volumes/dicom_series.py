"""DICOM series to volumes: folders of slices, and enhanced files with many.

    volume = read_dicom_series("study/series")
    volume.hu_DHW   # int16, z to the head, y to the back, x to the left
    volume.spacing  # (z, y, x) in mm
    volume.dropped  # {"localizer": 1}

Slices belong together by series, orientation, size and pixel spacing, never by folder, file name or
InstanceNumber, which is optional and often reversed. Their order and distance are those of their
positions along the normal, never SliceThickness. Each slice has its own rescale. Of the header,
only numbers and the modality are returned.
"""

import contextlib
import hashlib
import io
import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, get_args

import numpy as np

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.dicom.parser import DicomFile, DicomLimits, open_dicom
from medvl.data.volumes.dicom_slices import Slice, slice_values, slices_of
from medvl.data.volumes.options import Gaps, Tilt
from medvl.data.volumes.volume import (
    AIR,
    DEFAULT_LIMITS,
    MAX_OBLIQUE,
    MAX_TILT,
    Volume,
    VolumeBuilder,
    VolumeLimits,
    padding_of,
    tilted,
    to_canonical,
    to_int16,
)
from medvl.errors import ConfigError, DicomError, VolumeError

_DICOM_LIMITS = DicomLimits(elements=1_000_000)  # enhanced files have over 100 a frame
_SAME_PLACE = 0.01  # mm
_GAP = 0.01  # share of the median distance
_MOST_STACKS = 1000  # each file is compared with each stack
_UNEVEN = 0.1  # the same, for distances that are resampled
_LEAST_OF_STACK = 3


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
    """Read one volume from the slices below a folder, or of an enhanced file.

    Args:
        folder: DICOM files with one slice each, or enhanced ones, whose frames are slices; other
            files are counted and skipped. Or one enhanced file.
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
        folders: folders that the files must be in, links resolved; default `folder`, for one file
            any.

    Raises:
        FileNotFoundError: the folder or file does not exist.
        VolumeError: "gap": slices are missing or uneven; "conflict": several stacks, or different
            slices at one place; "tilt", "oblique": see `Volume`; "empty" or "too_small": fewer than
            two slices; "too_large"; "unsupported": values that int16 would lose; "not_found": no
            such stack; "mismatch": a file changed meanwhile.
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
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"{folder} does not exist")
    inside = folders if folders.real or not path.is_dir() else InputFolders.of(folder)
    try:
        paths = _files_below(path, limits) if path.is_dir() else [path]
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


def _chosen(stacks: Sequence[list[Slice]], stack: int | None, dropped: Counter[str]) -> list[Slice]:
    if not stacks:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(dropped.items()))
        raise VolumeError(f"expected slices of a volume, got {counts or 'no files'}", "empty")
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
        self._hashes: dict[tuple[Path, int], bytes] = {}
        self.dropped: Counter[str] = Counter()

    def stacks(self, *, derived: bool) -> list[list[Slice]]:
        """Return the stacks of slices in the order of their places, most slices first."""
        groups: list[list[Slice]] = []
        for item in self._slices(derived=derived):
            group = next((group for group in groups if group[0].fits(item)), None)
            if group is None and len(groups) == _MOST_STACKS:
                raise VolumeError(
                    f"the folder has over {_MOST_STACKS} stacks; name that of one series",
                    "conflict",
                    field="stack",
                )
            if group is None:
                groups.append([item])
            else:
                group.append(item)
        if any(len(group) >= _LEAST_OF_STACK for group in groups):
            few = [group for group in groups if len(group) < _LEAST_OF_STACK]
            groups = [group for group in groups if len(group) >= _LEAST_OF_STACK]
            self.dropped["localizer"] += sum(map(len, few))  # an orientation of their own
            self.dropped += Counter()  # drop a count of 0
        parts = [part for group in groups for part in self._parts(group)]
        return sorted(parts, key=len, reverse=True)

    def _slices(self, *, derived: bool) -> Iterator[Slice]:
        """Yield the slices of all files; count what is none."""
        total = 0
        for path in self._paths:
            slices: list[Slice | str]
            try:
                with self._file(path) as file:
                    slices = slices_of(path, file, derived=derived)
            except DicomError as error:
                if error.code not in ("not_dicom", "no_pixels"):
                    raise
                slices = [error.code]
            for each in slices:
                if isinstance(each, str):
                    self.dropped[each] += 1
                    continue
                total += 1
                if total > self._limits.files:
                    raise VolumeError(
                        f"the series has more than {self._limits.files} slices",
                        "too_large",
                        field="files",
                    )
                yield each

    def read(self, slices: Sequence[Slice], gaps: Gaps, tilt: Tilt, max_oblique: float) -> Volume:
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
        builder = VolumeBuilder((len(slices), *first.shape), first.modality)
        for index, values_HW in self._pixels(slices):
            builder.put(index, _shifted(values_HW, shifts[index], first.modality))
        hu_DHW = builder.volume()
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
        canonical = to_canonical(hu_DHW, axes, max_oblique, first.position)
        return Volume(
            hu_DHW=canonical.array,
            spacing=canonical.spacing,
            origin=canonical.origin,
            modality=first.modality,
            is_hounsfield=first.is_hounsfield,
            angle=canonical.angle,
            dropped=MappingProxyType(dict(self.dropped)),
        )

    @contextlib.contextmanager
    def _file(self, path: Path) -> Iterator[DicomFile]:
        """Open a file, whose name precedes the errors."""
        with self._opener(path) as stream:
            try:
                yield open_dicom(stream, _DICOM_LIMITS)
            except DicomError as error:
                raise error.prefixed(f"{path}: ") from error
            except OSError as error:
                message = f"{path} cannot be read ({error.strerror})"
                raise DicomError(message, "unreadable") from error

    def _pixels(self, slices: Sequence[Slice]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the place in `slices` and the values of each slice, NaN where they are padding,
        file by file.
        """
        files: defaultdict[Path, dict[int, int]] = defaultdict(dict)
        for index, each in enumerate(slices):
            files[each.path][each.frame] = index
        for path, places in files.items():
            count = 0
            with self._file(path) as file:
                for frame, values_HW in slice_values(file, [*places]):
                    index = places[frame]
                    if values_HW.shape != slices[index].shape:
                        break
                    count += 1
                    yield index, values_HW
            if count != len(places):
                raise VolumeError(f"{path} changed while it was read", "mismatch")

    def _parts(self, group: list[Slice]) -> list[list[Slice]]:
        """Sort a stack by place; drop copies of a slice, and part several scans of one place."""
        group = sorted(group, key=lambda each: each.place)
        of_file: defaultdict[Path, list[Slice]] = defaultdict(list)
        for each in group:
            of_file[each.path].append(each)
        unique = [group[0]]
        copies = 0
        for each in group[1:]:
            last = unique[-1]
            if not _is_same_place(last, each):
                unique.append(each)
            elif last.path != each.path and self._hash(last, of_file) == self._hash(each, of_file):
                copies += 1
            else:
                return _by_phase(group)
        self.dropped["duplicate"] += copies
        self.dropped += Counter()  # drop a count of 0
        return [unique]

    def _hash(self, chosen: Slice, of_file: Mapping[Path, Sequence[Slice]]) -> bytes:
        """Return the hash of a slice's values, made for all slices of its file at once."""
        if (chosen.path, chosen.frame) not in self._hashes:
            slices = of_file[chosen.path]
            for index, values_HW in self._pixels(slices):
                key = slices[index].path, slices[index].frame
                self._hashes[key] = hashlib.blake2b(to_int16(values_HW).tobytes()).digest()
        return self._hashes[chosen.path, chosen.frame]


def _is_same_place(one: Slice, other: Slice) -> bool:
    return abs(one.place - other.place) <= _SAME_PLACE


def _by_phase(group: list[Slice]) -> list[list[Slice]]:
    """Part a stack with several slices at one place by the first elements that tell them apart."""
    parts = _parted(group, 0)
    if parts is not None:
        return parts
    raise VolumeError(
        "different slices are at one place, and neither acquisition, time nor echo tells them "
        "apart; leave one set of them out",
        "conflict",
    )


def _parted(group: list[Slice], first: int) -> list[list[Slice]] | None:
    """Return a stack in parts with one slice at each place, by its phases from `first` on; None
    where they do not tell its slices apart.
    """
    for index in range(first, len(group[0].phases)):
        values: dict[bytes | None, list[Slice]] = {}
        for each in group:
            values.setdefault(each.phases[index], []).append(each)
        if len(values) == 1:
            continue
        parts = [
            [part] if _is_plain(part) else _parted(part, index + 1) for part in values.values()
        ]
        if all(parts):
            return [part for several in parts if several for part in several]
    return None


def _is_plain(part: list[Slice]) -> bool:
    pairs = itertools.pairwise(part)
    return len(part) > 1 and not any(_is_same_place(one, other) for one, other in pairs)


def _longest_run(slices: Sequence[Slice]) -> Sequence[Slice]:
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


def _shifts(slices: Sequence[Slice], places: np.ndarray, tilt: Tilt) -> np.ndarray:
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


def _shifted(values_HW: np.ndarray, shift: np.ndarray, modality: str | None) -> np.ndarray:
    """Return a slice with its content moved by pixels along (y, x); padding moves in."""
    if not shift.any():
        return values_HW
    from scipy import ndimage

    is_finite_HW = np.isfinite(values_HW)
    padding = padding_of(modality, values_HW[is_finite_HW]) if is_finite_HW.any() else AIR
    filled_HW = to_int16(np.where(is_finite_HW, values_HW, padding)).astype(np.float32)
    moved_HW: np.ndarray = ndimage.shift(
        filled_HW, shift, order=1, mode="grid-constant", cval=padding
    )
    return moved_HW


def _at_even_places(hu_DHW: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Interpolate slices at increasing places, in units of the even distance, to 0, 1, 2, ..."""
    out_DHW = np.empty_like(hu_DHW)
    for index in range(len(hu_DHW)):
        upper = int(np.clip(np.searchsorted(places, index), 1, len(hu_DHW) - 1))
        low, high = places[upper - 1], places[upper]
        share = np.clip((index - low) / (high - low), 0, 1)
        out_DHW[index] = to_int16(hu_DHW[upper - 1] * (1 - share) + hu_DHW[upper] * share)
    return out_DHW
