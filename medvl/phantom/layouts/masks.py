"""The phantom corpus in the layout of QaTa-COV19 with LViT's texts, which name the places of the
masks.
"""

import dataclasses
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Surface
from medvl.phantom.layouts.kaggle import image_uid_hex, square_frontal_views
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.anatomy import SIDES
from medvl.phantom.population.findings import PART_SAMPLERS, Finding
from medvl.phantom.population.world import Patient, View, generator
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.findings import boxes, make_lung, masks
from medvl.phantom.rendering.scene import encode_png

INFECTIONS = ("Consolidation", "Lung Opacity")
"""Labels of the phantom whose masks are the infection."""
FOLDERS = ("Train", "Val", "Test")
_ZONES = ("upper", "middle", "lower")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_LEAST_SHARE = 0.1
"""Share of a lung's infected pixels below which a third of the lung is not named."""
_STREAM = 0x10A1
"""Last key of the random generator of distractors."""
_TRIES = 12
"""Places that are tried for each distractor."""


def write_qata(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 224,
    workers: int | None = None,
    distractors: int = 0,
) -> Path:
    """Write a phantom QaTa-COV19 in LViT's layout: images, masks, and a workbook of descriptions of
    each split.

    There is one frontal image of each study with a consolidation or opacity; as in the release,
    none has an empty mask. A description gives sides, number of areas and thirds of each lung:
    "Bilateral pulmonary infection, two infected areas, upper left lung and middle lower right
    lung." Sides are the patient's. Splits are by patient.

    There is about one image per two patients. `size` is the height and width of the images in
    pixels. `distractors` is the largest number of opacities in each image that look like infected
    areas, but are neither in the mask nor in the text (see `sample_distractors`): the image alone
    does not show which areas are infected. Their boxes are the field `distractors` of the ground
    truth. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    split = (0.62, 0.15, 0.23)
    options = Options(
        corpus="qata",
        patients=patients,
        seed=seed,
        size=size,
        split=split,
        reports=True,
        distractors=distractors,
    )
    tables = {_table(name): ("Image", "Description") for name in FOLDERS}
    return write_release(Path(out), options, _write_patient, tables, workers)


def _table(name: str) -> str:
    return f"{name}_Folder/{name}_text.xlsx"


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    name = FOLDERS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        mask_HW = infection(view, options.size)
        if mask_HW is None:
            continue
        extra = sample_distractors(view, mask_HW, options.distractors)
        shown = dataclasses.replace(view, findings=(*view.findings, *extra))
        file = f"{image_uid_hex(view)}.png"
        image = Path(f"{name}_Folder", "img", file)
        mask = Path(f"{name}_Folder", "labelcol", f"mask_{file}")
        if not (root / mask).exists():
            write_file(root / image, encode_png(draw(shown, options.size)))
            write_file(
                root / mask, cv2.imencode(".png", mask_HW.astype(np.uint8) * 255)[1].tobytes()
            )
        rows.append([mask.name, describe(view, mask_HW)])
        row = truth_row(
            view,
            study,
            options.size,
            path=image.as_posix(),
            subject_id=patient.subject_id,
            split=name,
        )
        if options.distractors:
            only = dataclasses.replace(view, findings=extra)
            row["distractors"] = [dataclasses.asdict(box) for box in boxes(only, options.size)]
        truth.append(row)
    return PatientRows(patient.index, {_table(name): rows}, truth)


def infection(view: View, size: int) -> NDArray[np.bool_] | None:
    """Return the mask (H, W) of the infected areas in pixels of `draw(view, size)`, None where
    there are none.
    """
    found = [mask for label, mask in masks(view, size).items() if label in INFECTIONS]
    return np.logical_or.reduce(found) if found else None


def sample_distractors(view: View, mask_HW: NDArray[np.bool_], count: int) -> tuple[Finding, ...]:
    """Return up to `count` findings that are drawn as infected areas are, each of one part.

    Each has the kind and the extent of an infected area, at a random place of this kind where it
    shares no pixel with the infection or another distractor, and where its own description would
    name no third of a lung that the description of the infection names. Images with large
    infections may have no such place.
    """
    rng = generator(*view.key, _STREAM)
    infected = [
        (each.label, part)
        for each in view.findings
        if each.label in INFECTIONS
        for part in each.parts
    ]
    named = set(named_zones(view, mask_HW))
    taken_HW = mask_HW
    chosen: list[Finding] = []
    for _ in range(count * _TRIES):
        label, part = infected[rng.integers(len(infected))]
        finding = Finding(label=label, parts=PART_SAMPLERS[label](rng, part.extent)[:1])
        other_HW = infection(dataclasses.replace(view, findings=(finding,)), len(mask_HW))
        if (
            other_HW is None
            or (other_HW & taken_HW).any()
            or named.intersection(named_zones(view, other_HW))
        ):
            continue
        taken_HW = taken_HW | other_HW
        chosen.append(finding)
        if len(chosen) == count:
            break
    return tuple(chosen)


def describe(view: View, mask_HW: NDArray[np.bool_]) -> str:
    """Return the description of an infection: sides, number of connected areas, thirds of each
    lung.
    """
    zones: dict[str, list[str]] = {}
    for side, zone in named_zones(view, mask_HW):
        zones.setdefault(side, []).append(zone)
    areas = cv2.connectedComponents(mask_HW.astype(np.uint8))[0] - 1
    number = _NUMBERS[areas] if areas < len(_NUMBERS) else "many"
    sides = "Bilateral" if len(zones) == 2 else "Unilateral"
    where = " and ".join(
        f"{'all' if len(named) == 3 else ' '.join(named)} {side} lung"
        for side, named in zones.items()
    )
    return f"{sides} pulmonary infection, {number} infected area{'s' * (areas != 1)}, {where}."


def named_zones(view: View, mask_HW: NDArray[np.bool_]) -> list[tuple[str, str]]:
    """Return side and third, by height, of the parts of the lungs that hold a share of a lung's
    infected pixels.
    """
    named = []
    for side in SIDES[::-1]:
        outline = make_lung(view.chest, view.lateral, side).outline()
        lung_HW = Surface(view.camera, (mask_HW.shape[0], mask_HW.shape[1])).fill([outline]) > 0
        infected_H = (mask_HW & lung_HW).sum(axis=1)
        if not infected_H.any():
            continue
        top, bottom = np.flatnonzero(lung_HW.any(axis=1))[[0, -1]]
        borders = np.linspace(top, bottom + 1, 4).round().astype(int)[1:3]
        shares = [part.sum() / infected_H.sum() for part in np.split(infected_H, borders)]
        named += [
            (side, zone)
            for zone, share in zip(_ZONES, shares, strict=True)
            if share >= _LEAST_SHARE
        ]
    return named
