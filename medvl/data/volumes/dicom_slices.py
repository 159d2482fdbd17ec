"""Slices of DICOM files: where each lies in the patient, and its values.

A file has one slice, or is enhanced (PS3.3 C.7.6.16): its frames are the slices, in any order. The
functional groups of a frame, or those that all frames share, then hold what the header of a file
with one slice holds.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np

from medvl.data.dicom.parser import DicomFile, Elements, damaged
from medvl.data.dicom.pixels import Frame, PixelLayout, decode_frames
from medvl.data.dicom.reader import listed_modality
from medvl.data.dicom.rendering import modality_transform
from medvl.data.dicom.tags import Tag

_SAME_DIRECTION = 2e-3  # of direction cosines
_SAME_SPACING = 1e-3  # share of the pixel spacing
_DERIVED = ("MPR", "REFORMATTED", "PROJECTION IMAGE", "MIP", "MINIP", "MAXIP", "CPR", "CURVED")
"""Values of ImageType of slices that were computed from others."""
_NO_SCANS = ("SEG", "RTDOSE")
"""Modalities of files with places in the patient that are no images."""
_FRAME_TYPES = (Tag.CT_FRAME_TYPES, Tag.MR_FRAME_TYPES, Tag.PET_FRAME_TYPES)
_PLACES = (Tag.STACK, Tag.PLACE_IN_STACK, Tag.POSITION, Tag.PLANE_POSITION)
"""Dimensions of frames that do not part several scans of one place."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """One slice of a series, without its pixels."""

    path: Path
    frame: int
    """Index of its frame in the file."""
    stack: Hashable
    """Equal for slices that may be stacked, where directions and spacing are near too."""
    shape: tuple[int, int]
    directions: np.ndarray
    """(2, 3): directions of a row and of a column."""
    spacing: tuple[float, float]
    """Millimetres between rows and between columns."""
    position: np.ndarray
    phases: tuple[bytes | None, ...]
    """What differs between several scans of one place, most telling first."""
    modality: str | None
    is_hounsfield: bool

    @property
    def normal(self) -> np.ndarray:
        """Direction in which slices are stacked."""
        return np.cross(self.directions[0], self.directions[1])

    @property
    def place(self) -> float:
        """Position along the normal in mm."""
        return float(self.normal @ self.position)

    def fits(self, other: "Slice") -> bool:
        """Return whether two slices have one stack, direction and spacing; writers of slices round
        the numbers differently.
        """
        return (
            self.stack == other.stack
            and abs(self.spacing[0] - other.spacing[0]) <= _SAME_SPACING * self.spacing[0]
            and abs(self.spacing[1] - other.spacing[1]) <= _SAME_SPACING * self.spacing[1]
            and bool((abs(self.directions - other.directions) <= _SAME_DIRECTION).all())
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Groups:
    """Elements of one frame: of its functional groups, of those that all frames share, and of the
    file, first found.
    """

    groups: tuple[Elements, ...]
    file: Elements

    def holder(self, sequence: Tag, tag: Tag) -> Elements | None:
        """Return the first group whose `sequence` has `tag`."""
        for group in self.groups:
            item = group.item(sequence)
            if item is not None and item.vr(tag) is not None:
                return item
        return None

    def find(self, sequence: Tag, tag: Tag) -> Elements:
        """Return `holder`, else the elements of the file."""
        return self.holder(sequence, tag) or self.file

    def values(self) -> Elements:
        """Return the elements of the frame's modality LUT or rescale."""
        scaled = self.holder(Tag.FRAME_VALUES, Tag.INTERCEPT)
        return scaled or self.find(Tag.FRAME_VALUES, Tag.SLOPE)


def slices_of(path: Path, file: DicomFile, *, derived: bool) -> list[Slice | str]:
    """Return the slices of a file; in place of others, the kind of an image that is none
    (`Volume.dropped`).

    Args:
        path: of the file.
        file: parsed.
        derived: return reformatted slices too.

    Raises:
        DicomError: as `PixelLayout.from_file`; "malformed" for a damaged place, and for another
            number of functional groups than frames.
    """
    elements = file.elements
    layout = PixelLayout.from_file(file)
    kind = _other_kind(elements.raw(Tag.IMAGE_TYPE), derived=derived)
    if kind is not None:
        return [kind]
    if layout.samples > 1:
        return ["color"]
    if elements.text(Tag.MODALITY) in _NO_SCANS:
        return ["no_scan"]
    is_enhanced = elements.vr(Tag.FRAME_GROUPS) is not None
    if layout.frames > 1 and not is_enhanced:  # a film, or rotating views
        return ["multi_frame"]
    dimensions = _dimensions(elements)
    slices = [
        _slice(path, index, groups, layout, derived=derived, dimensions=dimensions)
        for index, groups in enumerate(_groups(file))
    ]
    if len(slices) != layout.frames:
        raise damaged(Tag.FRAME_GROUPS, f"has {len(slices)} items for {layout.frames} frames")
    return slices


def slice_values(
    file: DicomFile, frames: Sequence[int]
) -> Generator[tuple[int, np.ndarray], None, None]:
    """Yield the index and the values of frames after their own rescale: float32 (H, W), NaN where
    they are padding.

    Raises DicomError as `decode_frames`.
    """
    layout = PixelLayout.from_file(file)
    indices = set(frames)
    transforms: dict[int, Callable[[Frame], np.ndarray]] = {
        index: modality_transform(file.elements, layout, groups.values())
        for index, groups in enumerate(_groups(file))
        if index in indices
    }
    decoded = decode_frames(file, layout, transforms)
    for (index, transform), frame in zip(transforms.items(), decoded, strict=True):
        yield index, transform(frame)


def _groups(file: DicomFile) -> Iterator[_Groups]:
    """Yield the elements of each frame."""
    shared = file.elements.item(Tag.SHARED_GROUPS)
    common = () if shared is None else (shared,)
    if file.elements.vr(Tag.FRAME_GROUPS) is None:
        yield _Groups(common, file.elements)
        return
    for group in file.elements.items(Tag.FRAME_GROUPS):
        yield _Groups((group, *common), file.elements)


def _other_kind(image_type: bytes | None, *, derived: bool) -> str | None:
    """Return the kind of an image that is no slice of a scan, by its type."""
    values = (image_type or b"").decode("ascii", "replace").upper().split("\\")
    kinds = {value.strip(" \0") for value in values}
    if "LOCALIZER" in kinds:
        return "localizer"
    if not derived and kinds.intersection(_DERIVED):
        return "derived"
    return None


def _slice(
    path: Path,
    index: int,
    groups: _Groups,
    layout: PixelLayout,
    *,
    derived: bool,
    dimensions: Sequence[int],
) -> Slice | str:
    """Return the geometry of a slice, or the kind of an image that is none."""
    types = next(
        (
            item
            for sequence in _FRAME_TYPES
            if (item := groups.holder(sequence, Tag.FRAME_TYPE)) is not None
        ),
        None,
    )
    frame_type = None if types is None else types.raw(Tag.FRAME_TYPE)
    kind = _other_kind(frame_type, derived=derived)
    if kind is not None:
        return kind
    placed = groups.holder(Tag.PLANE_POSITION, Tag.POSITION)
    if placed is None and layout.frames == 1:
        placed = groups.file
    position = [] if placed is None else placed.numbers(Tag.POSITION)
    orientation = groups.find(Tag.PLANE_ORIENTATION, Tag.ORIENTATION).numbers(Tag.ORIENTATION)
    if not position or not orientation:
        return "no_position"
    directions = _vector(orientation, 6, Tag.ORIENTATION).reshape(2, 3)
    if not np.allclose(directions @ directions.T, np.eye(2), atol=1e-2):
        raise damaged(Tag.ORIENTATION, "is not of two directions at a right angle")
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    measures = groups.find(Tag.PIXEL_MEASURES, Tag.PIXEL_SPACING)
    spacing = _vector(measures.numbers(Tag.PIXEL_SPACING), 2, Tag.PIXEL_SPACING)
    if not (spacing > 0).all():
        raise damaged(Tag.PIXEL_SPACING, "is not above 0")
    values = groups.values()
    content = groups.find(Tag.FRAME_CONTENT, Tag.DIMENSION_VALUES)
    stack = groups.find(Tag.FRAME_CONTENT, Tag.STACK)
    modality = listed_modality(groups.file)
    shape = (layout.rows, layout.columns)
    return Slice(
        path=path,
        frame=index,
        stack=(groups.file.raw(Tag.SERIES), shape, modality, stack.raw(Tag.STACK)),
        shape=shape,
        directions=directions,
        spacing=(float(spacing[0]), float(spacing[1])),
        position=_vector(position, 3, Tag.POSITION),
        phases=(
            groups.find(Tag.FRAME_CONTENT, Tag.FRAME_ACQUISITION).raw(Tag.FRAME_ACQUISITION)
            or groups.file.raw(Tag.ACQUISITION),
            groups.find(Tag.FRAME_CONTENT, Tag.TEMPORAL_INDEX).raw(Tag.TEMPORAL_INDEX)
            or groups.file.raw(Tag.TEMPORAL_POSITION),
            groups.file.raw(Tag.CONTENT_TIME),
            groups.file.raw(Tag.ECHO),
            frame_type or groups.file.raw(Tag.IMAGE_TYPE),
            None if types is None else types.raw(Tag.COMPLEX_COMPONENT),
            _other_dimensions(content, dimensions),
        ),
        modality=modality,
        is_hounsfield=modality == "CT"
        and values.text(Tag.RESCALE_TYPE) in (None, "HU")
        and values.vr(Tag.INTERCEPT) is not None,
    )


def _dimensions(elements: Elements) -> list[int]:
    """Return the elements that the dimensions of frames stand for, in their order."""
    pointers = []
    for item in elements.items(Tag.DIMENSIONS):
        data = item.raw(Tag.DIMENSION_POINTER) or b""
        group, element = struct.unpack(f"{item.encoding.endian}HH", data[:4].ljust(4, b"\0"))
        pointers.append(group << 16 | element)
    return pointers


def _other_dimensions(content: Elements, dimensions: Sequence[int]) -> bytes | None:
    """Return a frame's place along the dimensions that are no places in the patient, such as time
    or echo; None without them.
    """
    values = content.raw(Tag.DIMENSION_VALUES)
    if values is None or len(values) != 4 * len(dimensions):
        return None
    words = [values[start : start + 4] for start in range(0, len(values), 4)]
    named = zip(words, dimensions, strict=True)
    return b"".join(word for word, dimension in named if dimension not in _PLACES)


def _vector(numbers: Sequence[float | None], size: int, tag: Tag) -> np.ndarray:
    """Return finite numbers of an element; DicomError ("malformed") for others."""
    vector = np.array([math.nan if number is None else number for number in numbers])
    if vector.shape != (size,) or not np.isfinite(vector).all():
        raise damaged(tag, f"is not of {size} numbers")
    return vector
