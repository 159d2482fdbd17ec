"""The phantom corpus in the layout of QaTa-COV19 with LViT's texts, which name the places of the masks."""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Surface
from medvl.phantom.layouts.boxes_and_masks.kaggle import image_uid_hex, square_frontal_views
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.frontal_anatomy import SIDES
from medvl.phantom.population.world import Patient, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_png
from medvl.phantom.rendering.findings import make_lung
from medvl.phantom.rendering.ground_truth import masks

INFECTIONS = ("Consolidation", "Lung Opacity")
"""Labels of the phantom whose masks are the infection."""
FOLDERS = ("Train", "Val", "Test")
_ZONES = ("upper", "middle", "lower")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_LEAST_SHARE = 0.1
"""Share of a lung's infected pixels below which a third of the lung is not named."""


def write_qata(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 224, workers: int | None = None
) -> Path:
    """Write a phantom QaTa-COV19 in LViT's layout: images, masks, and a workbook of descriptions of each split.

    There is one frontal image of each study with a consolidation or opacity; as in the release, none has an empty mask.
    A description gives sides, number of areas and thirds of each lung: "Bilateral pulmonary infection, two infected
    areas, upper left lung and middle lower right lung." Sides are the patient's. Splits are by patient.

    There is about one image per two patients. `size` is the height and width of the images in pixels. The other
    arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    split = (0.62, 0.15, 0.23)
    options = Options(corpus="qata", patients=patients, seed=seed, size=size, split=split, reports=True)
    tables = {_table(name): ("Image", "Description") for name in FOLDERS}
    return write_release(Path(out), options, _write_patient, tables, workers)


def _table(name: str) -> str:
    return f"{name}_Folder/{name}_text.xlsx"


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    name = FOLDERS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        found = [mask for label, mask in masks(view, options.size).items() if label in INFECTIONS]
        if not found:
            continue
        mask_HW = np.logical_or.reduce(found)
        file = f"{image_uid_hex(view)}.png"
        image, mask = Path(f"{name}_Folder", "img", file), Path(f"{name}_Folder", "labelcol", f"mask_{file}")
        if not (root / mask).exists():
            write_file(root / image, encode_png(draw(view, options.size)))
            write_file(root / mask, cv2.imencode(".png", mask_HW.astype(np.uint8) * 255)[1].tobytes())
        rows.append([mask.name, describe(view, mask_HW)])
        ids = {"path": image.as_posix(), "subject_id": patient.subject_id, "split": name}
        truth.append(truth_row(view, study, options.size, **ids))
    return PatientRows(patient.index, {_table(name): rows}, truth)


def describe(view: View, mask_HW: NDArray[np.bool_]) -> str:
    """Return the description of an infection: sides, number of connected areas, thirds of each lung."""
    places = {side: text for side in ("left", "right") if (text := _zones(view, mask_HW, side))}
    areas = cv2.connectedComponents(mask_HW.astype(np.uint8))[0] - 1
    number = _NUMBERS[areas] if areas < len(_NUMBERS) else "many"
    sides = "Bilateral" if len(places) == 2 else "Unilateral"
    where = " and ".join(f"{text} {side} lung" for side, text in places.items())
    return f"{sides} pulmonary infection, {number} infected area{'s' * (areas != 1)}, {where}."


def _zones(view: View, mask_HW: NDArray[np.bool_], side: str) -> str:
    """Return the thirds of a lung, by height, that hold a share of its infected pixels; empty where there are none."""
    assert side in SIDES
    lung_HW = Surface(view.camera, (mask_HW.shape[0], mask_HW.shape[1])).fill(
        [make_lung(view.chest, view.lateral, side).outline()]
    )
    height_H, infected_H = (lung_HW > 0).any(axis=1), (mask_HW & (lung_HW > 0)).sum(axis=1)
    if not infected_H.any():
        return ""
    top, bottom = np.flatnonzero(height_H)[[0, -1]]
    borders = np.linspace(top, bottom + 1, 4).round().astype(int)[1:3]
    shares = [part.sum() / infected_H.sum() for part in np.split(infected_H, borders)]
    named = [zone for zone, share in zip(_ZONES, shares, strict=True) if share >= _LEAST_SHARE]
    return "all" if len(named) == 3 else " ".join(named)
