"""Judging predicted answers: accuracy with intervals, by question type and organ, with the baselines beside.

Shape letters: N questions that the protocol judges, K rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations.questions import Question
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure
from medvl.eval.core.results import Results, format_table
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary
from medvl.eval.vqa.baselines import QUESTION_ONLY, baselines
from medvl.eval.vqa.predictions import Predictions
from medvl.eval.vqa.protocol import PROTOCOL, VQAProtocol, get_protocol
from medvl.eval.vqa.question_set import VQAData

MODEL = "model"
"""The name of the judged predictions among the baselines."""
ACCURACY, GAIN, CEILING = "accuracy", "gain_over_question_only", "ceiling"
TYPES = ("overall", "closed", "open")
"""Targets of the rows over all questions, and over those of one answer type."""


@dataclasses.dataclass(frozen=True, slots=True)
class VQAResult:
    """What was found, and what it was found on."""

    results: Results
    data: VQAData
    """The judged questions."""
    systems: Mapping[str, Predictions]
    """The baselines, and the judged predictions where there are any."""
    credits: Mapping[str, NDArray[np.float64]]
    """System -> credit_N."""
    protocol: VQAProtocol

    def table(self) -> str:
        """A line a system, a column each for overall, closed and open; beneath it a line a question type and organ."""
        beside = [row for row in self.results.rows if row.metric in (CEILING, GAIN)]
        top = [
            dataclasses.replace(row, metric=row.target, target=system, subgroup="")
            for system in self.systems
            for row in (self.results.row(ACCURACY, target, subgroup_of(system)) for target in TYPES)
        ]
        top += [dataclasses.replace(row, metric=row.target, target=row.metric) for row in beside]
        below = [
            dataclasses.replace(row, metric=system, subgroup="")
            for system in (MODEL, QUESTION_ONLY)
            for row in self.results.rows
            if row.metric == ACCURACY and row.subgroup == subgroup_of(system) and row.target not in TYPES
        ]
        return "\n\n".join(format_table(rows) for rows in (top, below) if rows)

    def predictions(self) -> list[dict[str, Any]]:
        """One JSON object a judged question: what was asked, what is right, what each shown system said."""
        lines = []
        for number, question in enumerate(self.data.questions):
            line: dict[str, Any] = {**question.as_json(), "patient": self.data.groups[number]}
            for system in (MODEL, QUESTION_ONLY):
                if system in self.systems:
                    said = self.systems[system].get(question.id)
                    line[system] = None if said is None else said.answer
                    line[f"{system}_credit"] = float(self.credits[system][number])
            lines.append(line)
        return lines


def evaluate_answers(
    data: VQAData,
    predictions: Predictions | None = None,
    *,
    protocol: VQAProtocol | str = PROTOCOL,
    split: str = "test",
    vocabulary: AnswerVocabulary | None = None,
    resamples: int = 1000,
    seed: int = 0,
    inputs: Mapping[str, str | None] | None = None,
) -> VQAResult:
    """Judge answers to the questions of one split, beside baselines learnt from train; without answers, those alone.

    Args:
        data: all questions, those of train included.
        predictions: question id -> prediction. A question without one is wrong and counted.
        protocol: a protocol or its name.
        split: whose questions are judged.
        vocabulary: what a classifier chose from; default the protocol's own. It only decides the ceiling.
        resamples: of the bootstrap over images.
        seed: of the bootstrap.
        inputs: hashes of further things that went in (the checkpoint).

    Raises:
        EvaluationError: a prediction for a question that the data do not have, a split without questions, or a
            protocol that needs what the predictions do not say.
    """
    protocol = get_protocol(protocol) if isinstance(protocol, str) else protocol
    judged = data.part(split)
    judged = judged.choose([n for n, question in enumerate(judged.questions) if protocol.judges(question)])
    if not judged.questions:
        raise EvaluationError(f"{data.name}: protocol {protocol.name} judges no question of {split}")
    _check_ids(predictions, data)
    if vocabulary is None and protocol.vocabulary:
        vocabulary = AnswerVocabulary.build(data.questions, protocol)
    systems: dict[str, Predictions] = {} if predictions is None else {MODEL: predictions}
    systems |= baselines(data.part("train").questions, judged.questions, protocol)
    credits = {name: _credits(judged, said, protocol) for name, said in systems.items()}
    blocks = _blocks(judged, systems, credits, protocol, vocabulary)
    rows = measure(blocks, len(judged.questions), resamples=resamples, seed=seed, groups=judged.groups)
    results = Results(
        protocol="vqa",
        protocol_version=protocol.version,
        rows=rows,
        config=_config(data, protocol, vocabulary) | {"split": split, "resamples": resamples, "seed": seed},
        inputs={
            "questions": data.fingerprint,
            "vocabulary": None if vocabulary is None else vocabulary.fingerprint,
            **(inputs or {}),
        },
        details=_details(judged, predictions, protocol),
    )
    return VQAResult(results, judged, systems, credits, protocol)


def _config(data: VQAData, protocol: VQAProtocol, vocabulary: AnswerVocabulary | None) -> dict[str, Any]:
    return {
        "dataset": data.name,
        "split_id": data.split_id,
        "judging": dataclasses.asdict(protocol),
        "vocabulary_size": None if vocabulary is None else len(vocabulary),
    }


def _check_ids(predictions: Predictions | None, data: VQAData) -> None:
    known = {question.id for question in data.questions}
    strangers = [name for name in predictions or () if name not in known]
    if strangers:
        raise EvaluationError(
            f"{len(strangers)} predictions are for questions that {data.name} does not have, first {min(strangers)}"
        )


def _credits(judged: VQAData, said: Predictions, protocol: VQAProtocol) -> NDArray[np.float64]:
    return np.array(
        [
            protocol.credit(said[question.id].answer, question) if question.id in said else 0.0
            for question in judged.questions
        ]
    )


def _blocks(
    judged: VQAData,
    systems: Mapping[str, Predictions],
    credits: Mapping[str, NDArray[np.float64]],
    protocol: VQAProtocol,
    vocabulary: AnswerVocabulary | None,
) -> list[MetricGroup]:
    """Every row of the evaluation: all systems on the same questions and the same draws."""
    groups = _groups(judged)
    blocks = []
    for system, credit_N in credits.items():
        masks = _types(judged, systems[MODEL] if system == MODEL else None, protocol) | groups
        blocks.append(_masked_block(ACCURACY, credit_N, masks, subgroup_of(system)))
    shown = _types(judged, systems.get(MODEL), protocol)
    if MODEL in credits:
        blocks.append(_masked_block(GAIN, credits[MODEL] - credits[QUESTION_ONLY], shown))
    blocks.append(_masked_block(CEILING, _ceiling(judged, protocol, vocabulary), shown))
    return blocks


def _ceiling(judged: VQAData, protocol: VQAProtocol, vocabulary: AnswerVocabulary | None) -> NDArray[np.float64]:
    """The most that any answer of the vocabulary is worth: what a perfect classifier would score."""
    known = None if vocabulary is None else set(vocabulary.answers)
    credits = []
    for question in judged.questions:
        right = protocol.accepted(question)
        possible = right if known is None else right & known
        credits.append(max((protocol.credit(answer, question) for answer in possible), default=0.0))
    return np.array(credits)


def _masked_block(
    metric: str, values_N: NDArray[np.float64], masks: Mapping[str, NDArray[np.bool_]], subgroup: str = ""
) -> MetricGroup:
    values_NK = np.stack([np.where(mask_N, values_N, np.nan) for mask_N in masks.values()], axis=1)
    return mean_metrics(metric, values_NK, list(masks), subgroup=subgroup)


def _types(judged: VQAData, said: Predictions | None, protocol: VQAProtocol) -> dict[str, NDArray[np.bool_]]:
    """overall, closed and open. Where nobody says what it takes a question for, the dataset's field stands in."""

    def type_of(question: Question) -> str | None:
        prediction = None if said is None else said.get(question.id)
        return question.answer_type if prediction is None else prediction.answer_type

    closed_N = np.array([protocol.is_closed(question, type_of(question)) for question in judged.questions])
    return {"overall": np.ones(len(closed_N), np.bool_), "closed": closed_N, "open": ~closed_N}


def _groups(judged: VQAData) -> dict[str, NDArray[np.bool_]]:
    """Masks by question type (a question of two types is in both) and by organ, where there is more than one."""
    kinds = [set(question.kind.split(", ")) for question in judged.questions]
    organs = [{question.organ} for question in judged.questions]
    found: dict[str, NDArray[np.bool_]] = {}
    for attribute, values in (("kind", kinds), ("organ", organs)):
        names = sorted({name for value in values for name in value} - {""})
        if len(names) > 1:
            found |= {f"{attribute}: {name}": np.array([name in value for value in values]) for name in names}
    return found


def subgroup_of(system: str) -> str:
    """Of a system's rows: none for the judged predictions, a name for a baseline."""
    return "" if system == MODEL else f"baseline: {system}"


def _details(judged: VQAData, predictions: Predictions | None, protocol: VQAProtocol) -> dict[str, Any]:
    questions = judged.questions
    return {
        "questions": len(questions),
        "images": len(set(judged.groups)),
        "closed_by_field": sum(question.answer_type == "closed" for question in questions),
        "yes_no": sum(protocol.normalize(question.answer) in ("yes", "no") for question in questions),
        "without_answer": sum(not question.answer for question in questions),
        "not_predicted": None if predictions is None else sum(q.id not in predictions for q in questions),
    }
