"""How files of volumes are read, and how volumes are stored. The command line imports this module,
so it imports nothing heavy.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

from medvl.errors import ConfigError

Gaps = Literal["refuse", "resample", "longest"]
Tilt = Literal["refuse", "correct"]
Stacks = Literal["refuse", "largest"]
OrganLabels = Literal["totalsegmentator2", "totalsegmentator1", "organs"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeFile:
    """What the tables of a corpus say about the file of a volume."""

    modality: str = "CT"
    """Modality of files that state none (NIfTI, NumPy, some DICOM); conversion refuses series of
    another one. Values of CT must be Hounsfield units.
    """
    orientation: str | None = None
    """Directions of the axes of a file that states none, such as "RAS"; with `spacing`, of any."""
    spacing: tuple[float, float, float] | None = None
    """Millimetres along the axes of the file, in place of those of its header."""
    rescale: tuple[float, float] | None = None
    """Slope and intercept of stored values that are not Hounsfield units yet; files that state a
    rescale of their own are refused.
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeOptions:
    """Storage of volumes."""

    spacing: tuple[float, float, float] | None = None
    """Millimetres along (z, y, x) that volumes are resampled to, such as 3 1 1; default: those of
    each file.
    """
    size: tuple[int, int, int] | None = None
    """Voxels along (z, y, x), cropped or padded around the centre, such as 112 336 336; default:
    all.
    """
    antialias: bool = True
    """Smooth before an axis is shrunk by more than 1.5; published code does not."""
    gaps: Gaps = "refuse"
    """DICOM series whose slices have uneven distances: refuse (they are skipped as `gap`), resample
    (where distances vary by less than 10 %), or longest (the longest run without a gap).
    """
    tilt: Tilt = "refuse"
    """DICOM series of a tilted gantry: refuse (they are skipped as `tilt`) or correct."""
    stacks: Stacks = "refuse"
    """Folders with several stacks of slices, such as two series or phases: refuse (they are skipped
    as `conflict`) or largest (the stack with most slices).
    """
    max_oblique: float = 20.0
    """Largest angle in degrees between an axis of a volume and the nearest one of the patient;
    others are skipped as `oblique`.
    """

    def stored(self) -> dict[str, Any]:
        """Return the options as a manifest stores them, newer ones only where they are not the
        defaults.
        """
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if field.name in ("stacks", "max_oblique") and values[field.name] == field.default:
                del values[field.name]
        return values

    def __post_init__(self) -> None:
        for name in ("spacing", "size"):
            sides = getattr(self, name)
            if sides is not None and (
                len(sides) != 3 or not all(0 < side < float("inf") for side in sides)
            ):
                raise ConfigError(
                    f"expected {name} as three numbers above 0, got {sides}",
                    "out_of_range",
                    field=name,
                )
        if self.stacks not in get_args(Stacks):
            raise ConfigError(
                f"expected stacks as one of {', '.join(get_args(Stacks))}, got {self.stacks!r}",
                "unknown_name",
                field="stacks",
            )
        if not 0 <= self.max_oblique <= 90:
            raise ConfigError(
                f"expected max_oblique from 0 to 90 degrees, got {self.max_oblique}",
                "out_of_range",
                field="max_oblique",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OrganOptions:
    """Organs of volumes: masks beside them, and their texts."""

    organ_masks: Path | None = None
    """Folder with masks of lung, heart, esophagus and aorta on the grid of each volume, as
    TotalSegmentator writes them: NAME.nii.gz, or a folder NAME with a file for each structure.
    """
    organ_labels: OrganLabels = "totalsegmentator2"
    """Numbers of a mask with all structures: those of TotalSegmentator 2 or 1, or organs, 1 to 4 in
    the order above.
    """
    organ_descriptions: Path | None = None
    """JSON file {NAME: {ORGAN: TEXT or {"text": TEXT, "normal": true or false}}} with the findings
    of each volume or scan by organ; default: sentences of the findings that name the organ.
    """
    organ_conclusions: Path | None = None
    """The same for the impressions."""

    def __post_init__(self) -> None:
        if self.organ_labels not in get_args(OrganLabels):
            raise ConfigError(
                f"expected organ_labels as one of {', '.join(get_args(OrganLabels))}, got "
                f"{self.organ_labels!r}",
                "unknown_name",
                field="organ_labels",
            )
        if not self.organ_masks and (self.organ_descriptions or self.organ_conclusions):
            raise ConfigError(
                "texts by organ are for volumes with masks; give organ_masks too",
                "missing",
                field="organ_masks",
            )

    def stored(self) -> dict[str, Any]:
        """Return the options as a manifest stores them, without paths; {} where none is used."""
        if self.organ_masks is None:
            return {}
        files = {
            "descriptions": self.organ_descriptions,
            "conclusions": self.organ_conclusions,
        }
        given = [name for name, path in files.items() if path is not None]
        return {"organs": {"labels": self.organ_labels, "files": given}}
