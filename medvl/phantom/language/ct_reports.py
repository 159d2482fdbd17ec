"""Reports of chest CTs: findings by organ, and an impression."""

from collections.abc import Mapping

from medvl.phantom.population.volumes import CT_FINDINGS, ChestCT, CTFinding
from medvl.phantom.population.world import generator

_STREAM = 72
_PRESENT: Mapping[str, tuple[str, ...]] = {
    "Lung nodule": (
        "There is a {size} mm nodule in the {side} lung.",
        "A nodule of {size} mm is seen in the {side} lung.",
    ),
    "Pleural effusion": (
        "There is a {side} pleural effusion.",
        "Fluid is seen in the {side} pleural space.",
    ),
    "Consolidation": (
        "There is consolidation in the {side} lung.",
        "A consolidation is seen in the {side} lung.",
    ),
    "Emphysema": ("There is emphysema of the {side} upper lobe.",),
    "Cardiomegaly": ("The heart is enlarged.", "There is cardiomegaly."),
    "Pericardial effusion": ("There is a pericardial effusion.",),
    "Arterial wall calcification": (
        "Calcifications are seen in the wall of the aorta.",
        "The wall of the aorta is calcified.",
    ),
}
_ABSENT: Mapping[str, str] = {
    "Lung nodule": "No lung nodule is seen.",
    "Pleural effusion": "There is no pleural effusion.",
    "Consolidation": "There is no consolidation.",
    "Emphysema": "There is no emphysema.",
    "Cardiomegaly": "The heart is of normal size.",
    "Pericardial effusion": "There is no pericardial effusion.",
    "Arterial wall calcification": "There are no calcifications of the aorta.",
}


def compose_ct_report(chest: ChestCT) -> dict[str, str]:
    """Return the sections `findings` and `impression`. Some absent findings are not mentioned."""
    rng = generator(*chest.key, _STREAM)
    present = {finding.name: finding for finding in chest.findings}
    sentences = []
    for name in CT_FINDINGS:
        if name in present:
            forms = _PRESENT[name]
            sentences.append(_sentence(forms[int(rng.integers(len(forms)))], present[name]))
        elif rng.random() < 0.7:
            sentences.append(_ABSENT[name])
    main = [_sentence(_PRESENT[finding.name][0], finding) for finding in chest.findings]
    return {
        "findings": " ".join(sentences),
        "impression": " ".join(main) or "Normal CT of the chest.",
    }


def _sentence(form: str, finding: CTFinding) -> str:
    return form.format(side=finding.side, size=round(finding.diameter_mm))
