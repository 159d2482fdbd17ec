"""Generated reports of any system, read from JSON lines."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from medvl.common.text_files import read_json_objects
from medvl.data.loading.sources import Source
from medvl.data.reports.sentences import join_texts
from medvl.data.transforms.text import choose_sections
from medvl.errors import EvaluationError
from medvl.eval.core.subgroups import subgroups_of
from medvl.eval.report_generation.evaluate import GeneratedReport


class Reference(NamedTuple):
    """The complete report of an image."""

    patient: str
    text: str
    subgroups: Mapping[str, str] = {}
    """Attribute -> group of the image."""


def read_reports(path: Path, references: Mapping[str, Reference] | None = None) -> list[GeneratedReport]:
    """Read lines with `key`, `generated`, and without `references` also `reference`.

    Lines may also have `ended`, and without `references` `patient` and `subgroups`.

    predictions.jsonl of an evaluation is such a file. A reference must be the complete text, as it was before any model
    truncated or tokenized it.

    Args:
        path: the file.
        references: key -> reference, of every report that is evaluated; one without a line is empty.

    Raises EvaluationError where a line is malformed, a key is repeated, or one is not in `references`.
    """
    found: dict[str, GeneratedReport] = {}
    texts = {"generated": str} if references is not None else {"generated": str, "reference": str}
    for where, row in read_json_objects(path, EvaluationError, {"key": object, **texts}, field="predictions"):
        key, generated = str(row["key"]), row["generated"]
        if references is None:
            subgroups = row.get("subgroups") or {}
            if not isinstance(subgroups, dict):
                raise EvaluationError(f"{where}: subgroups must be an object", "wrong_type", field="subgroups")
            patient, reference = str(row.get("patient", key)), row["reference"]
        elif key in references:
            patient, reference, subgroups = references[key]
        else:
            message = f"{where}: the key is of a report that is not in the data"
            raise EvaluationError(message, "malformed", field="key")
        if key in found:
            raise EvaluationError(f"{where}: {key} has a second report", "conflict", field="key")
        ended = bool(row.get("ended", True))
        found[key] = GeneratedReport(
            key=key,
            patient=patient,
            reference=reference,
            generated=generated,
            ended=ended,
            labels=row.get("labels"),
            subgroups=subgroups,
        )
    for key, (patient, reference, subgroups) in (references or {}).items():
        missing = GeneratedReport(key=key, patient=patient, reference=reference, generated="", subgroups=subgroups)
        found.setdefault(key, missing)
    return list(found.values())


def references_of(source: Source, sections: tuple[str, ...]) -> dict[str, Reference]:
    """Return key -> complete reference of the samples that have one."""
    references = {}
    for position in range(len(source)):
        sample = source.sample(position)
        text = join_texts(choose_sections(sample.sections, sections))
        if text:
            references[sample.key] = Reference(sample.patient, text, subgroups_of(sample))
    return references
