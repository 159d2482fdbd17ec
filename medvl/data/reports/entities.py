"""Descriptions of findings and classes of places, for systems with a query for each entity of a
list.

    describe("Pneumothorax")      # "Air between the lung and the chest wall ..."
    positions_of(text, FINDINGS)  # class of the place of each finding, of PLACES; -1 for none

A place is a side and a zone, as in `medvl.data.reports.statements`. Mirrored images exchange the
classes of sides (`mirrored_positions`).
"""

import itertools
from collections.abc import Sequence

from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.labeler import CHEXPERT, Conventions, find_mentions
from medvl.data.reports.statements import SIDES, ZONES, place_of, places_of, statement
from medvl.schema import POSITIVE

_DESCRIPTIONS = {
    "Atelectasis": "Part of a lung has lost air and volume: linear or triangular opacities, "
    "displaced fissures.",
    "Cardiomegaly": "The heart is enlarged: its shadow is wider than half of the chest.",
    "Consolidation": "Airspaces are filled with fluid, pus or cells: a dense opacity with air "
    "bronchograms.",
    "Edema": "Fluid in the interstitium and airspaces of the lungs: hazy vessels, septal lines, "
    "perihilar opacity.",
    "Enlarged "
    "Cardiomediastinum": "The shadow of the heart and great vessels in the middle of the chest "
    "is widened.",
    "Fracture": "A break in a bone such as a rib, a clavicle or a vertebra.",
    "Lung Lesion": "A nodule or mass: a round opacity in a lung with distinct borders.",
    "Lung Opacity": "An area of a lung that is whiter than normal, of any cause.",
    "No Finding": "The heart, the lungs and the pleura are normal, without any disease.",
    "Pleural "
    "Effusion": "Fluid between the lung and the chest wall, which blunts the costophrenic angle.",
    "Pleural Other": "Thickening, scars or plaques of the pleura.",
    "Pneumonia": "An infection of a lung, seen as a patchy or lobar opacity.",
    "Pneumothorax": "Air between the lung and the chest wall: a thin pleural line without "
    "vessels beyond it.",
    "Support Devices": "Tubes, lines, wires, pacemakers and other equipment in or on the patient.",
}
PLACES: tuple[str, ...] = tuple(
    name
    for side, zone in itertools.product(("", *SIDES), ("", *ZONES))
    if (name := place_of([side] if side else [], [zone] if zone else []))
)
"""Names of the classes of places: sides alone, zones alone, and zones of a side."""
_MIRRORED = [PLACES.index(swap_laterality(name)) for name in PLACES]


def describe(finding: str) -> str:
    """Return a sentence that describes a finding; of an unknown one, the statement that it is
    there.
    """
    return _DESCRIPTIONS.get(finding, statement(finding))


def positions_of(
    text: str, findings: Sequence[str], conventions: Conventions = CHEXPERT
) -> list[int]:
    """Return the class of the place of each finding that is positive in a text and whose clause
    names a place, else -1.

    Of several places of a finding the first one counts; of several zones, the first one.
    """
    found: dict[str, int] = {}
    mentions = find_mentions(text, conventions)
    for mention, (sides, zones) in zip(mentions, places_of(mentions), strict=True):
        if mention.value == POSITIVE and (sides or zones):
            found.setdefault(mention.finding, PLACES.index(place_of(sides, zones[:1])))
    return [found.get(name, -1) for name in findings]


def mirrored_positions(positions: Sequence[int]) -> list[int]:
    """Return the classes in a mirrored image: left and right are exchanged."""
    return [position if position < 0 else _MIRRORED[position] for position in positions]


# Descriptions of findings by visual aspects, for systems with a query for each aspect of an
# entity (MAVL).
#
#     describe_aspects("Pneumothorax")     # (description, "The opacity is ...", "The shape is
#     ...", ...), 8 sentences
#
# In MAVL, a language model writes a sentence for each aspect of an entity. These sentences are
# written by hand.

ASPECTS = ("opacity", "shape", "texture", "pattern", "border", "location", "fluid")
"""Visual aspects; an entity's description comes before them."""
_VALUES = {
    "Atelectasis": "increased|linear, plate-like or triangular|homogeneous|focal|straight, "
    "along a fissure|often the "
    "lung base|absent",
    "Cardiomegaly": "that of soft tissue|globular and wide|homogeneous|single|smooth|the middle "
    "and left of the lower "
    "chest|sometimes present around the heart",
    "Consolidation": "white|lobar or patchy|homogeneous with dark air "
    "bronchograms|confluent|ill-defined, sharp at a "
    "fissure|a lobe or a segment|present in the airspaces",
    "Edema": "hazy|like bat wings|ground glass with fine lines|diffuse and on both "
    "sides|ill-defined|perihilar and at "
    "the bases|present in the interstitium and the airspaces",
    "Enlarged "
    "Cardiomediastinum": "that of soft tissue|wide|homogeneous|single|smooth or lobulated|the "
    "middle of the "
    "chest|absent",
    "Fracture": "a dark line through white bone|a break or a step|sharp|focal, sometimes in a "
    "row|an interrupted "
    "cortex|ribs, clavicles or vertebrae|absent",
    "Lung Lesion": "white|round or oval|homogeneous, sometimes with calcium or a cavity|single or "
    "several|distinct, "
    "smooth or spiculated|anywhere in a lung|absent",
    "Lung Opacity": "increased|of any form|hazy or dense|focal or diffuse|ill-defined or "
    "sharp|anywhere in a lung|"
    "sometimes present",
    "No Finding": "dark in both lungs|normal|fine vessels|symmetric|sharp at heart and "
    "diaphragm|none|absent",
    "Pleural "
    "Effusion": "white|a meniscus|homogeneous|layered|curved and sharp above|the costophrenic "
    "angle and the "
    "lung base|present in the pleural space",
    "Pleural "
    "Other": "increased, sometimes calcified|a band or a plaque|homogeneous|focal or along the "
    "chest wall|sharp"
    "|the pleura, often the apex|absent",
    "Pneumonia": "increased|patchy or lobar|heterogeneous with air bronchograms|focal or in "
    "several places|ill-defined|"
    "one lobe, often a lower one|present in the airspaces",
    "Pneumothorax": "dark|a crescent|without any lung markings|along the chest wall|a thin "
    "white pleural line|the apex "
    "and the side of a lung|absent",
    "Support "
    "Devices": "very white|thin tubes, lines or wires|uniform|continuous|very sharp|the neck, "
    "the chest or the "
    "upper abdomen|absent",
}
"""Finding -> values of the aspects, in their order, separated by `|`."""


def describe_aspects(finding: str) -> tuple[str, ...]:
    """Return the description of a finding and a sentence for each aspect; of an unknown finding,
    repeat the first.
    """
    if finding not in _VALUES:
        return (describe(finding),) * (1 + len(ASPECTS))
    values = _VALUES[finding].split("|")
    sentences = [
        f"The {aspect} of {finding.lower()} is {value}."
        for aspect, value in zip(ASPECTS, values, strict=True)
    ]
    return describe(finding), *sentences
