"""The phantom's invented ontology in the files of a UMLS release: concepts, relations, types,
definitions.
"""

from collections.abc import Iterator
from pathlib import Path

from medvl.common.files import write_atomic
from medvl.phantom.language.ontology import INVERSES, concepts

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
