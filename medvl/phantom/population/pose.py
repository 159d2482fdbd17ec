"""How breath, projection and findings change the shape of a chest."""

import dataclasses
from collections.abc import Iterable

from medvl.phantom.population.findings import Finding
from medvl.phantom.population.frontal_anatomy import Chest, sign


def posed(chest: Chest, position: str, breath: float, findings: Iterable[Finding]) -> Chest:
    """The chest as one view shows it.

    `position` is PA, AP or LATERAL: in AP the heart lies away from the detector and is magnified, and the patient
    breathes in less. `breath` moves the diaphragms down (centimetres).
    """
    if position == "AP":
        chest = dataclasses.replace(chest, heart_ratio=1.06 * chest.heart_ratio)
        breath -= 0.9
    chest = dataclasses.replace(chest, dome_right=chest.dome_right + breath, dome_left=chest.dome_left + breath)
    for finding in findings:
        chest = _deformed(chest, finding)
    return chest


def _deformed(chest: Chest, finding: Finding) -> Chest:
    extent = finding.extent
    if finding.label == "Cardiomegaly":
        ratio = 0.498 + 0.165 * extent + (chest.heart_ratio - 0.45) / 2
        return dataclasses.replace(chest, heart_ratio=ratio, heart_right=chest.heart_right + 0.02 * extent)
    if finding.label == "Enlarged Cardiomediastinum":
        wider, knob = 1.22 + 0.55 * extent, 1.15 + 0.55 * extent
        return dataclasses.replace(chest, mediastinum=chest.mediastinum * wider, knob=chest.knob * knob)
    for part in finding.parts:
        if finding.label == "Atelectasis":  # lost volume draws the diaphragm and the heart towards it
            lift, pull = (2.4, 1.5) if part.kind == "collapse" else (0.5 + 1.6 * part.extent, 0.0)
            chest = _moved(chest, part.side, lift * (0.3 if "upper" in part.zone else 1.0), pull)
        elif finding.label == "Pleural Effusion" and finding.side != "bilateral":
            chest = _moved(chest, part.side, 0.0, -1.6 * max(0.0, part.extent - 0.6) / 0.4)
        elif finding.label == "Pneumothorax":
            much = max(0.0, part.extent - 0.5) / 0.5
            chest = _moved(chest, part.side, -1.2 * much, -2.4 * much)
    return chest


def _moved(chest: Chest, side: str, lift: float, pull: float) -> Chest:
    """Raise one diaphragm by `lift` and draw the mediastinum towards that side by `pull` centimetres."""
    shift = chest.shift + sign(side) * pull
    if side == "right":
        return dataclasses.replace(chest, dome_right=chest.dome_right - lift, shift=shift)
    return dataclasses.replace(chest, dome_left=chest.dome_left - lift, shift=shift)
