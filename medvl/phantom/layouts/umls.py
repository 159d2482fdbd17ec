"""The concepts that phantom texts name, and relations between them: a small ontology of the chest
and of images, in the files of a UMLS release (concepts, relations, types, definitions).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from medvl.common.files import write_atomic

ANATOMY = "T023"
DISEASE = "T047"
SIGN = "T033"
DEVICE = "T074"
PROCEDURE = "T060"
PLACE = "T082"
"""Semantic types of UMLS: body part, disease, finding, medical device, diagnostic procedure,
spatial concept.
"""

INVERSES = {
    "isa": "inverse_isa",
    "part_of": "has_part",
    "has_finding_site": "finding_site_of",
    "cause_of": "due_to",
    "manifestation_of": "has_manifestation",
    "has_laterality": "laterality_of",
    "placed_in": "place_of",
    "images": "imaged_by",
}
"""Relation -> its inverse."""


@dataclasses.dataclass(frozen=True, slots=True)
class Concept:
    """A concept: its names, the preferred one first, its semantic type, and its relations to
    other concepts.
    """

    names: tuple[str, ...]
    kind: str
    relations: tuple[tuple[str, str], ...] = ()
    """(relation, preferred name of the other concept)."""


def _concept(kind: str, names: str, *relations: str) -> Concept:
    """Return a concept from its names separated by `|` and relations such as "isa lung disease"."""
    pairs = [relation.split(" ", 1) for relation in relations]
    return Concept(
        tuple(names.split("|")), kind, tuple((relation, other) for relation, other in pairs)
    )


_SIDES = ("right", "left")
_LOBES = (
    "right upper lobe",
    "right middle lobe",
    "right lower lobe",
    "left upper lobe",
    "lingula",
    "left lower lobe",
)


def concepts() -> tuple[Concept, ...]:
    """Return all concepts; the numbers of their identifiers are their places."""
    return (*_PLACES, *_anatomy(), *_DISEASES, *_SIGNS, *_DEVICES, *_PROCEDURES)


_PLACES = (
    _concept(PLACE, "right|right-sided", "part_of bilateral"),
    _concept(PLACE, "left|left-sided", "part_of bilateral"),
    _concept(PLACE, "bilateral|both"),
)


def _anatomy() -> tuple[Concept, ...]:
    sided = []
    for side in _SIDES:
        laterality = f"has_laterality {side}"
        sided += [
            _concept(ANATOMY, f"{side} lung", "part_of lung", laterality),
            _concept(
                ANATOMY,
                f"{side} base|{side} basilar|{side} lung base",
                f"part_of {side} lung",
                laterality,
            ),
            _concept(ANATOMY, f"{side} apex|{side} apical", f"part_of {side} lung", laterality),
            _concept(ANATOMY, f"{side} costophrenic angle", "part_of pleura", laterality),
            _concept(ANATOMY, f"{side} hemidiaphragm", "part_of diaphragm", laterality),
            _concept(ANATOMY, f"{side} clavicle|{side} clavicular", "part_of thorax", laterality),
        ]
    lobes = [
        _concept(ANATOMY, lobe, f"part_of {'right' if 'right' in lobe else 'left'} lung")
        for lobe in _LOBES
    ]
    return (
        _concept(ANATOMY, "thorax|chest|intrathoracic"),
        _concept(ANATOMY, "lung|lungs|pulmonary", "part_of thorax"),
        _concept(ANATOMY, "pleura|pleural|pleural surfaces", "part_of thorax"),
        _concept(ANATOMY, "heart|cardiac|cardiac silhouette", "part_of mediastinum"),
        _concept(
            ANATOMY, "mediastinum|mediastinal|cardiomediastinal|upper mediastinum", "part_of thorax"
        ),
        _concept(ANATOMY, "hilum|hila|hilar|perihilar", "part_of lung"),
        _concept(ANATOMY, "aorta", "part_of mediastinum"),
        _concept(ANATOMY, "trachea", "part_of mediastinum"),
        _concept(ANATOMY, "carina", "part_of trachea"),
        _concept(ANATOMY, "superior vena cava|SVC", "part_of mediastinum"),
        _concept(ANATOMY, "rib|ribs", "part_of thorax"),
        _concept(ANATOMY, "thoracic spine", "part_of thorax"),
        _concept(ANATOMY, "diaphragm", "part_of thorax"),
        _concept(ANATOMY, "abdomen|upper abdomen"),
        _concept(ANATOMY, "stomach", "part_of abdomen"),
        _concept(ANATOMY, "brain|head"),
        *sided,
        *lobes,
    )


_DISEASES = (
    _concept(DISEASE, "lung disease|pulmonary disease", "has_finding_site lung"),
    _concept(DISEASE, "pleural disease", "has_finding_site pleura"),
    _concept(DISEASE, "heart disease|cardiopulmonary disease", "has_finding_site heart"),
    _concept(
        DISEASE,
        "atelectasis|collapse|subsegmental atelectasis",
        "isa lung disease",
        "has_finding_site lung",
    ),
    _concept(
        DISEASE,
        "pneumonia|bronchopneumonia|aspiration pneumonia",
        "isa lung disease",
        "has_finding_site lung",
    ),
    _concept(
        DISEASE,
        "pulmonary edema|edema|interstitial edema",
        "isa lung disease",
        "has_finding_site lung",
    ),
    _concept(
        DISEASE,
        "pulmonary nodule|nodule|pulmonary nodules|nodules",
        "isa lung disease",
        "has_finding_site lung",
    ),
    _concept(DISEASE, "mass|masses|focal lesion", "isa lung disease"),
    _concept(DISEASE, "cardiomegaly|enlarged heart", "isa heart disease", "has_finding_site heart"),
    _concept(
        DISEASE, "pleural effusion|effusion|pleural effusions|effusions", "isa pleural disease"
    ),
    _concept(
        DISEASE,
        "pneumothorax|apical pneumothorax",
        "isa pleural disease",
        "has_finding_site pleura",
    ),
    _concept(DISEASE, "tension pneumothorax", "isa pneumothorax", "cause_of mediastinal shift"),
    _concept(
        DISEASE,
        "pleural thickening|apical pleural thickening",
        "isa pleural disease",
        "has_finding_site pleura",
    ),
    _concept(
        DISEASE,
        "pleural plaque|pleural plaques|pleural cap|pleural scarring",
        "isa pleural thickening",
    ),
    _concept(DISEASE, "fracture|fractures"),
    _concept(DISEASE, "rib fracture|rib fractures", "isa fracture", "has_finding_site rib"),
    _concept(DISEASE, "clavicular fracture", "isa fracture"),
    _concept(DISEASE, "mediastinal widening|widened mediastinum", "has_finding_site mediastinum"),
)
_SIGNS = (
    _concept(
        SIGN,
        "opacity|opacities|lung opacity|opacification|density|densities",
        "has_finding_site lung",
    ),
    _concept(
        SIGN, "consolidation|airspace consolidation", "isa opacity", "manifestation_of pneumonia"
    ),
    _concept(SIGN, "air bronchograms", "manifestation_of pneumonia"),
    _concept(
        SIGN, "patchy opacities|airspace opacities", "isa opacity", "manifestation_of pneumonia"
    ),
    _concept(SIGN, "ground-glass opacity", "isa opacity"),
    _concept(
        SIGN,
        "interstitial opacities|Kerley B lines",
        "isa opacity",
        "manifestation_of pulmonary edema",
    ),
    _concept(
        SIGN,
        "vascular congestion|pulmonary vascular congestion",
        "manifestation_of pulmonary edema",
    ),
    _concept(
        SIGN,
        "linear opacities|streaky opacities|linear densities",
        "isa opacity",
        "manifestation_of atelectasis",
    ),
    _concept(
        SIGN,
        "volume loss|low lung volumes",
        "manifestation_of atelectasis",
        "has_finding_site lung",
    ),
    _concept(SIGN, "blunting", "manifestation_of pleural effusion", "has_finding_site pleura"),
    _concept(SIGN, "meniscus", "manifestation_of pleural effusion"),
    _concept(SIGN, "pleural line", "manifestation_of pneumothorax", "has_finding_site pleura"),
    _concept(SIGN, "mediastinal shift|shift of the mediastinum", "has_finding_site mediastinum"),
    _concept(
        SIGN,
        "cardiac enlargement|enlargement",
        "manifestation_of cardiomegaly",
        "has_finding_site heart",
    ),
    _concept(SIGN, "degenerative changes", "has_finding_site thoracic spine"),
)
_DEVICES = (
    _concept(DEVICE, "medical device|device"),
    _concept(DEVICE, "endotracheal tube|ET tube", "isa medical device", "placed_in trachea"),
    _concept(
        DEVICE,
        "enteric tube|nasogastric tube|orogastric tube",
        "isa medical device",
        "placed_in stomach",
    ),
    _concept(
        DEVICE,
        "central venous catheter|central line|PICC",
        "isa medical device",
        "placed_in superior vena cava",
    ),
    _concept(DEVICE, "pacemaker|pacer|pacing device|ICD", "isa medical device", "placed_in heart"),
    _concept(DEVICE, "chest tube|pleural drain", "isa medical device", "placed_in pleura"),
    _concept(
        DEVICE, "sternotomy wires|median sternotomy", "isa medical device", "placed_in thorax"
    ),
    _concept(DEVICE, "surgical clips", "isa medical device", "placed_in abdomen"),
)
_PROCEDURES = (
    _concept(PROCEDURE, "chest radiograph|chest X-ray|radiograph", "images thorax"),
    _concept(PROCEDURE, "computed tomography|CT", "images abdomen", "images thorax"),
    _concept(PROCEDURE, "magnetic resonance imaging|MRI|magnetic resonance image", "images brain"),
)


SOURCE = "PHANTOM"
_FIRST_CUI = 9_000_000  # UMLS has no concepts with these numbers


def write_umls(out: Path | str) -> Path:
    """Write `MRCONSO.RRF`, `MRREL.RRF`, `MRSTY.RRF` and `MRDEF.RRF` into `META`, and return the
    folder above it.

    Nothing in it is from UMLS. As in UMLS, every relation is there with its inverse.
    """
    meta = Path(out) / "META"
    meta.mkdir(parents=True, exist_ok=True)
    files = {"MRCONSO": _names(), "MRREL": _relations(), "MRSTY": _types(), "MRDEF": _definitions()}
    for name, rows in files.items():
        write_atomic(meta / f"{name}.RRF", "".join("|".join(row) + "|\n" for row in rows))
    return Path(out)


def _cui(place: int) -> str:
    return f"C{_FIRST_CUI + place:07d}"


def _names() -> Iterator[list[str]]:
    atom = 0
    for place, concept in enumerate(concepts()):
        for rank, name in enumerate(concept.names):
            atom += 1
            status, kind = ("P", "PT") if rank == 0 else ("S", "SY")
            ids = [f"L{atom:07d}", "PF", f"S{atom:07d}", "Y", f"A{atom:07d}", "", "", ""]
            yield [
                _cui(place),
                "ENG",
                status,
                *ids,
                SOURCE,
                kind,
                f"P{place:04d}",
                name,
                "0",
                "N",
                "",
            ]


def _relations() -> Iterator[list[str]]:
    places = {concept.names[0]: place for place, concept in enumerate(concepts())}
    number = 0
    for head, concept in enumerate(concepts()):
        for relation, other in concept.relations:
            codes = ("CHD", "PAR") if relation == "isa" else ("RO", "RO")
            pairs = ((head, relation, places[other]), (places[other], INVERSES[relation], head))
            for (second, name, first), code in zip(pairs, codes, strict=True):
                number += 1
                yield [
                    *(_cui(first), "", "CUI", code, _cui(second), "", "CUI", name),
                    *(f"R{number:08d}", "", SOURCE, SOURCE, "", "", "N", ""),
                ]


def _types() -> Iterator[list[str]]:
    names = {
        "T023": ("A1.2.3.1", "Body Part, Organ, or Organ Component"),
        "T047": ("B2.2.1.2.1", "Disease or Syndrome"),
        "T033": ("A2.2", "Finding"),
        "T074": ("A1.3.1", "Medical Device"),
        "T060": ("B1.3.1.2", "Diagnostic Procedure"),
        "T082": ("A2.1.5", "Spatial Concept"),
    }
    for place, concept in enumerate(concepts()):
        yield [_cui(place), concept.kind, *names[concept.kind], f"AT{place:08d}", ""]


def _definitions() -> Iterator[list[str]]:
    for place, concept in enumerate(concepts()):
        if concept.relations:
            facts = " and ".join(
                f"{relation.replace('_', ' ')} {other}" for relation, other in concept.relations
            )
            text = f"Something that {facts}, also known as {', '.join(concept.names)}."
            yield [_cui(place), "", f"AT9{place:07d}", "", SOURCE, text, "N", ""]
