"""Files of the leaderboard ReXrank: lists of studies, and predictions for them.

A list is a JSON object, study -> `image_path` (all images), `key_image_path`, `section_findings`,
`section_impression`, `context` and others. A missing section is the bare word NaN. A file of
predictions is the list with the field `model_prediction` in each study, "Findings: ... Impression:
...", or the text of one section.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.common.files import write_atomic
from medvl.common.text_files import read_text
from medvl.common.untrusted import parse_json
from medvl.data.loading.sources import FileSource
from medvl.data.reports.sentences import join_texts
from medvl.errors import EvaluationError
from medvl.eval.report_generation.protocol import GeneratedReport
from medvl.schema import Sample

PREDICTION = "model_prediction"
_SECTIONS = ("findings", "impression")
_HEADER = re.compile(r"(?:(?<=\s)|(?<=[.;])|^)(findings|impression)\s*:", re.IGNORECASE)
_CONTEXT = re.compile(r"(?:(?<=\s)|^)(age|gender|indication|comparison)\s*:", re.IGNORECASE)
_NOTHING = frozenset({"", "nan", "none", "xxxx", "___"})
"""Texts of sections and contexts that stand for no text."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RexrankStudy:
    """A study of a list."""

    study: str
    patient: str
    """`subject_id`, or what is before the last "/" of the study, or before its first "_"."""
    images: tuple[str, ...]
    """Paths of all images, relative to the root of the images."""
    key_image: str | None
    """Path of the image for models that read one."""
    sections: Mapping[str, str]
    """Findings and impression, of those that the study has."""
    views: tuple[str | None, ...]
    """View of each image; None: unknown."""
    context: Mapping[str, str]
    """Age, gender, indication and comparison, of those that the study has."""
    prediction: str | None
    """Predicted text; None in a list."""


def read_rexrank(path: Path | str) -> dict[str, RexrankStudy]:
    """Read a list of studies, or a file of predictions; study -> its fields.

    Raises EvaluationError where the file is damaged.
    """
    path = Path(path)
    return {study: _study(study, fields, path) for study, fields in _read(path).items()}


def write_rexrank(list_path: Path | str, out_path: Path | str, texts: Mapping[str, str]) -> Path:
    """Write predictions for the studies of a list as ReXrank's scripts read them; return the path.

    All fields of the list are kept in their order, missing sections as the word NaN.

    Args:
        list_path: the list.
        out_path: file to write.
        texts: study -> "Findings: ... Impression: ...", or the text of one section.

    Raises EvaluationError where the list is damaged, a study of it has no text, or a text is of
    another study.
    """
    listed = _read(Path(list_path))
    missing = [study for study in listed if study not in texts]
    if missing:
        message = f"expected a text for each study, got none for {len(missing)}: {missing[0]}, ..."
        raise EvaluationError(message, "missing", field="texts")
    unknown = [study for study in texts if study not in listed]
    if unknown:
        message = f"{list_path} lacks {len(unknown)} of the studies with texts: {unknown[0]}, ..."
        raise EvaluationError(message, "mismatch", field="texts")
    rows = {study: {**fields, PREDICTION: texts[study]} for study, fields in listed.items()}
    return write_atomic(Path(out_path), json.dumps(rows, indent=4, ensure_ascii=False) + "\n")


def list_source(studies: Mapping[str, RexrankStudy], root: Path) -> FileSource:
    """Return the images of a list below a folder, the key image of each study first, with findings,
    impression, and the context as sections.

    Raises EvaluationError where an image is missing or outside of the folder, and for a study
    without images or a list without studies.
    """
    if not studies:
        raise EvaluationError("expected a list of studies, got none", "empty", field="rexrank")
    samples = []
    for study in studies.values():
        if not study.images:
            message = f"expected one or more images of study {study.study}, got none"
            raise EvaluationError(message, "empty", field="image_path")
        for number, (path, view) in enumerate(zip(study.images, study.views, strict=True)):
            if ".." in Path(path).parts or not (root / path).is_file():
                message = f"image {path} of study {study.study} is not in {root}"
                raise EvaluationError(message, "not_found", field="images")
            sample = Sample(
                key=f"{study.study}#{number}",
                corpus="rexrank",
                split="test",
                patient=study.patient,
                study=study.study,
                image=root / path,
                sections={**study.context, **study.sections},
                view=view,
                extra={"image_number": 0 if path == study.key_image else number + 1},
            )
            samples.append(sample)
    return FileSource(samples, ())


def study_reports(
    studies: Mapping[str, RexrankStudy], sections: Sequence[str]
) -> list[GeneratedReport]:
    """Return one report for each study that has one of the sections; others are left out.

    Where a prediction names its sections, the same sections are compared; else all of it is.
    Raises EvaluationError for a study without a prediction, and for other sections.
    """
    for name in sections:
        if name not in _SECTIONS:
            message = f"expected the sections {', '.join(_SECTIONS)}, got {name}"
            raise EvaluationError(message, "unknown", field="sections")
    reports = []
    for study in studies.values():
        reference = join_texts(study.sections[name] for name in sections if name in study.sections)
        if not reference:
            continue
        if study.prediction is None:
            message = f"study {study.study} has no {PREDICTION}; give a file of predictions"
            raise EvaluationError(message, "missing", field="rexrank")
        report = GeneratedReport(
            key=study.study,
            patient=study.patient,
            reference=reference,
            generated=predicted_sections(study.prediction, sections),
        )
        reports.append(report)
    return reports


def predicted_sections(text: str, sections: Sequence[str]) -> str:
    """Return the text of some sections of a prediction; all of it where it names none.

    Text before the first heading is of the findings.
    """
    parts = _divide(text, _HEADER)
    if len(parts) == 1:
        return text.strip()
    texts = {"findings": parts[0][1]} if parts[0][1] else {}
    for name, part in parts[1:]:
        texts[name] = join_texts([texts.get(name, ""), part])
    return " ".join(texts[name] for name in sections if texts.get(name))


def _divide(text: str, header: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return ("", text before the first heading) and (heading, text) of each part."""
    marks = list(header.finditer(text))
    starts = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(text)]
    names = ["", *(mark[1].lower() for mark in marks)]
    parts = (_text(text[start:end]) for start, end in zip(starts, ends, strict=True))
    return list(zip(names, parts, strict=True))


def _text(value: object) -> str:
    """Return the text of a field; "" where it is missing."""
    if not isinstance(value, str):
        return ""
    return "" if value.strip().lower() in _NOTHING else value.strip()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    text = read_text(path, EvaluationError, field="rexrank", what="a list of ReXrank")
    try:
        rows = parse_json(text, nan=True)
    except ValueError as error:
        message = f"{path} is not a JSON object of studies ({type(error).__name__})"
        raise EvaluationError(message, "malformed", field="rexrank") from error
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        message = f"{path}: expected a JSON object with an object for each study"
        raise EvaluationError(message, "malformed", field="rexrank")
    return rows


def _study(study: str, fields: Mapping[str, Any], path: Path) -> RexrankStudy:
    images = fields.get("image_path")
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        message = f"{path}: image_path of a study must be a list of paths"
        raise EvaluationError(message, "malformed", field="image_path")
    key_image = fields.get("key_image_path")
    sections = {name: _text(fields.get(f"section_{name}")) for name in _SECTIONS}
    context = dict(_divide(str(fields.get("context", "")), _CONTEXT)[1:])
    prediction = fields.get(PREDICTION)
    return RexrankStudy(
        study=study,
        patient=_patient(study, fields.get("subject_id")),
        # A path that begins with "/" would replace the root that it is joined to.
        images=tuple(image.lstrip("/") for image in images),
        views=_views(fields.get("frontal_lateral"), len(images)),
        key_image=key_image.lstrip("/") if isinstance(key_image, str) else None,
        sections={name: text for name, text in sections.items() if text},
        context={name: text for name, text in context.items() if text},
        prediction=prediction if isinstance(prediction, str) else None,
    )


def _views(listed: object, images: int) -> tuple[str | None, ...]:
    """Return the view of each image; lists of another length, which exist, tell nothing."""
    if not isinstance(listed, list) or len(listed) != images:
        return (None,) * images
    return tuple(view if isinstance(view, str) else None for view in listed)


def _patient(study: str, subject: object) -> str:
    if isinstance(subject, float) and (math.isnan(subject) or not subject.is_integer()):
        subject = None
    if subject is not None and str(subject).strip():
        return str(int(subject) if isinstance(subject, float) else subject)
    return study.rsplit("/", 1)[0] if "/" in study else study.split("_", 1)[0]
