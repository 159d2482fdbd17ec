"""Changes of a chest's shape by breathing, projection and findings."""

import dataclasses
from collections.abc import Iterable

from medvl.phantom.population.findings import Finding
from medvl.phantom.population.frontal_anatomy import Chest, sign


def pose_chest(chest: Chest, position: str, breath: float, findings: Iterable[Finding]) -> Chest:
    """Return the chest, given at rest, in the pose of a view, with the shape changed by the findings.

    In AP views the heart is farther from the detector and magnified, and the patient inhales less. `breath` is the
    number of centimetres by which breathing lowers the diaphragms.
    """
    if position == "AP":
        chest = dataclasses.replace(chest, heart_ratio=1.06 * chest.heart_ratio)
        breath -= 0.9
    chest = dataclasses.replace(chest, dome_right=chest.dome_right + breath, dome_left=chest.dome_left + breath)
    for finding in findings:
        chest = _deform(chest, finding)
    return chest


def _deform(chest: Chest, finding: Finding) -> Chest:
    extent = finding.extent
    if finding.label == "Cardiomegaly":
        ratio = 0.498 + 0.165 * extent + (chest.heart_ratio - 0.45) / 2
        return dataclasses.replace(chest, heart_ratio=ratio, heart_right=chest.heart_right + 0.02 * extent)
    if finding.label == "Enlarged Cardiomediastinum":
        width_factor, knob = 1.22 + 0.55 * extent, 1.15 + 0.55 * extent
        return dataclasses.replace(chest, mediastinum=chest.mediastinum * width_factor, knob=chest.knob * knob)
    for part in finding.parts:
        if finding.label == "Atelectasis":  # volume loss pulls the diaphragm and the heart to its side
            lift, pull = (2.4, 1.5) if part.kind == "collapse" else (0.5 + 1.6 * part.extent, 0.0)
            chest = _shift_side(chest, part.side, lift * (0.3 if "upper" in part.zone else 1.0), pull)
        elif finding.label == "Pleural Effusion" and finding.side != "bilateral":
            chest = _shift_side(chest, part.side, 0.0, -1.6 * max(0.0, part.extent - 0.6) / 0.4)
        elif finding.label == "Pneumothorax":
            excess = max(0.0, part.extent - 0.5) / 0.5
            chest = _shift_side(chest, part.side, -1.2 * excess, -2.4 * excess)
    return chest


def _shift_side(chest: Chest, side: str, lift: float, pull: float) -> Chest:
    """Return the chest with one diaphragm raised by `lift` and the mediastinum moved to its side by `pull` cm."""
    shift = chest.shift + sign(side) * pull
    if side == "right":
        return dataclasses.replace(chest, dome_right=chest.dome_right - lift, shift=shift)
    return dataclasses.replace(chest, dome_left=chest.dome_left - lift, shift=shift)
