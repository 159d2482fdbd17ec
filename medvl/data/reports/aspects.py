"""Descriptions of findings by visual aspects, for systems with a query for each aspect of an entity (MAVL).

    describe_aspects("Pneumothorax")     # (description, "The opacity is ...", "The shape is ...", ...), 8 sentences

In MAVL, a language model writes a sentence for each aspect of an entity. These sentences are written by hand.
"""

from medvl.data.reports.entities import describe

ASPECTS = ("opacity", "shape", "texture", "pattern", "border", "location", "fluid")
"""Visual aspects; an entity's description comes before them."""
_VALUES = {
    "Atelectasis": "increased|linear, plate-like or triangular|homogeneous|focal|straight, along a fissure|often the "
    "lung base|absent",
    "Cardiomegaly": "that of soft tissue|globular and wide|homogeneous|single|smooth|the middle and left of the lower "
    "chest|sometimes present around the heart",
    "Consolidation": "white|lobar or patchy|homogeneous with dark air bronchograms|confluent|ill-defined, sharp at a "
    "fissure|a lobe or a segment|present in the airspaces",
    "Edema": "hazy|like bat wings|ground glass with fine lines|diffuse and on both sides|ill-defined|perihilar and at "
    "the bases|present in the interstitium and the airspaces",
    "Enlarged Cardiomediastinum": "that of soft tissue|wide|homogeneous|single|smooth or lobulated|the middle of the "
    "chest|absent",
    "Fracture": "a dark line through white bone|a break or a step|sharp|focal, sometimes in a row|an interrupted "
    "cortex|ribs, clavicles or vertebrae|absent",
    "Lung Lesion": "white|round or oval|homogeneous, sometimes with calcium or a cavity|single or several|distinct, "
    "smooth or spiculated|anywhere in a lung|absent",
    "Lung Opacity": "increased|of any form|hazy or dense|focal or diffuse|ill-defined or sharp|anywhere in a lung|"
    "sometimes present",
    "No Finding": "dark in both lungs|normal|fine vessels|symmetric|sharp at heart and diaphragm|none|absent",
    "Pleural Effusion": "white|a meniscus|homogeneous|layered|curved and sharp above|the costophrenic angle and the "
    "lung base|present in the pleural space",
    "Pleural Other": "increased, sometimes calcified|a band or a plaque|homogeneous|focal or along the chest wall|sharp"
    "|the pleura, often the apex|absent",
    "Pneumonia": "increased|patchy or lobar|heterogeneous with air bronchograms|focal or in several places|ill-defined|"
    "one lobe, often a lower one|present in the airspaces",
    "Pneumothorax": "dark|a crescent|without any lung markings|along the chest wall|a thin white pleural line|the apex "
    "and the side of a lung|absent",
    "Support Devices": "very white|thin tubes, lines or wires|uniform|continuous|very sharp|the neck, the chest or the "
    "upper abdomen|absent",
}
"""Finding -> values of the aspects, in their order, separated by `|`."""


def describe_aspects(finding: str) -> tuple[str, ...]:
    """Return the description of a finding and a sentence for each aspect; of an unknown finding, repeat the first."""
    if finding not in _VALUES:
        return (describe(finding),) * (1 + len(ASPECTS))
    values = _VALUES[finding].split("|")
    sentences = [
        f"The {aspect} of {finding.lower()} is {value}." for aspect, value in zip(ASPECTS, values, strict=True)
    ]
    return describe(finding), *sentences
