"""Statements from RadGraph's annotations of reports (Jain et al., arXiv 2106.14463), in place of the labeler's.

    write_statements(radgraph_statements(Path("MIMIC-CXR_graphs.json")), Path("statements.jsonl"))

The annotations are JSON, made elsewhere: name of a report -> entities with tokens, a label, and relations to other
entities. Labels of the released graphs (OBS-DP, OBS-DA, OBS-U, ANAT-DP) and of later models ("Observation::definitely
present") are read. An observation that modifies another one is part of its name; the anatomy where it is located, with
its modifiers, is its place:

    OBS-DP effusion <-modify- small, -located_at-> lung <-modify- left      "There is small effusion of the left lung."
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medvl.common.files import write_atomic
from medvl.common.text_files import read_json_objects, read_text
from medvl.common.untrusted import parse_json
from medvl.data.reports.statements import statement
from medvl.errors import ConfigError
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

_VALUES = {
    "OBS-DP": POSITIVE,
    "OBS-DA": NEGATIVE,
    "OBS-U": UNCERTAIN,
    "Observation::definitely present": POSITIVE,
    "Observation::definitely absent": NEGATIVE,
    "Observation::uncertain": UNCERTAIN,
}
_ANATOMY = ("ANAT-", "Anatomy::")
_DEPTH = 4
"""Longest chain of modifiers."""
_MIMIC = re.compile(r"(?:.*/)?p(\d+)/s(\d+)(?:\.txt)?")


def radgraph_statements(
    path: Path, study: Callable[[str, str], str] | None = None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the study and the statements of each report in a file.

    Args:
        path: JSON file of annotations, or one of JSON lines with the field "study" beside "entities".
        study: function from patient and study to the study's name in the shards, for names such as
            "p10/p10000032/s50414267.txt" (`Deidentifier.study`); None keeps names as they are.

    Raises ConfigError: "not_found", or "malformed" with the name of the report.
    """
    items = _reports_by_line(path) if path.name.endswith(".jsonl") else _reports_by_name(path)
    for number, (name, report) in enumerate(items, start=1):
        try:
            found = tuple(dict.fromkeys(_statements(report["entities"])))
        except (KeyError, TypeError, AttributeError, ValueError):
            message = f"{path}, report {number}: expected entities with tokens, label and relations to known entities"
            raise ConfigError(message, "malformed", field="file") from None
        yield (name if study is None else name_in_shards(name, study)), found


def _reports_by_name(path: Path) -> list[tuple[str, Any]]:
    what = "RadGraph's annotations as JSON"
    try:
        return list(parse_json(read_text(path, ConfigError, field="file", what=what)).items())
    except (ValueError, AttributeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        message = f"{path}: expected JSON of reports by name, such as RadGraph writes it{reason}"
        raise ConfigError(message, "malformed", field="file") from None


def _reports_by_line(path: Path) -> list[tuple[str, Any]]:
    reports: dict[str, Any] = {}
    for where, row in read_json_objects(path, ConfigError, {"study": str, "entities": object}, field="file"):
        if row["study"] in reports:
            raise ConfigError(f"{where}: the study occurs twice", "exists", field="file")
        reports[row["study"]] = row
    return list(reports.items())


def name_in_shards(name: str, study: Callable[[str, str], str]) -> str:
    """Return the name that the shards of MIMIC-CXR have for a study, such as "p10/p10000032/s50414267.txt".

    `study` makes it from patient and study. Names of another form are returned as they are.
    """
    match = _MIMIC.fullmatch(name)
    return name if match is None else study(*match.groups())


def write_statements(statements: Iterable[tuple[str, tuple[str, ...]]], out: Path) -> int:
    """Write statements by study as `Statements(source="file")` reads them, and return how many studies there are."""
    lines = [json.dumps({"study": study, "statements": list(texts)}) + "\n" for study, texts in statements]
    write_atomic(out, "".join(lines))
    return len(lines)


def _statements(entities: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the statement of each observation that modifies no other one."""
    modifiers: dict[str, list[str]] = {}
    for number, entity in entities.items():
        for kind, other in entity.get("relations") or ():
            if kind == "modify":
                modifiers.setdefault(str(other), []).append(number)
    for number, entity in entities.items():
        value = _VALUES.get(entity["label"])
        relations = [(kind, str(other)) for kind, other in entity.get("relations") or ()]
        modifies = any(kind == "modify" and entities[other]["label"] in _VALUES for kind, other in relations)
        if value is None or modifies:
            if value is None and not str(entity["label"]).startswith(_ANATOMY):
                raise ValueError("unknown label")
            continue
        place = next((_phrase(other, entities, modifiers) for kind, other in relations if kind == "located_at"), "")
        yield statement(_phrase(number, entities, modifiers), value, place)


def _phrase(
    number: str, entities: Mapping[str, Mapping[str, Any]], modifiers: Mapping[str, list[str]], depth: int = _DEPTH
) -> str:
    """Return an entity's tokens behind those of its modifiers, in the order of the text."""
    words = [_phrase(each, entities, modifiers, depth - 1) for each in modifiers.get(number, ()) if depth]
    return " ".join([*words, " ".join(str(entities[number]["tokens"]).lower().split())])
