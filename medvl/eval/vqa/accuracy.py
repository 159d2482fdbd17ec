"""Visual question answering: accuracy of predicted answers, by question type and organ, next to
baselines.

Protocol "vqa"; a `VQAProtocol` gives the rules for comparing answers and the version:

* Every question of the split that the protocol includes is evaluated; a question without a
  prediction is wrong.
* "accuracy" is the mean credit of the answers, for the model and for each baseline (`baselines`),
  over all questions, closed and open ones, by question type and organ, and by whether question or
  answer names a side. "gain_over_question_only" is the paired difference to the question-only
  baseline. "ceiling" is the accuracy of a classifier that always chooses the best answer of the
  vocabulary: the model's own, of predictions from a file the protocol's; 1 for a model that
  generates answers.
* Controls (`medvl.eval.vqa.controls`) are answers of the same model without the image, with another
  patient's, or to the question in other words. Their accuracy has the subgroup "control: ...", and
  "gain_over_text_only" is the headline. Of a model that also reads the patient's earlier image,
  "gain_over_one_image" is the gain over the answers without it.
* Answers to questions about the difference between two images are texts as well: "corpus_bleu_4",
  "mean_rouge_l" and the other metrics of `medvl.eval.report_generation.metrics`, of the model, its
  controls and the question-only baseline, have the target "difference".
* Answers of a model's vocabulary that only the evaluated split has are stated as a flaw: they are
  not from training.
* Intervals: the bootstrap resamples images, with all their questions. All rows share the resamples.

Shape letters: N evaluated questions, K rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations import DIFFERENCE, Question
from medvl.data.reports.cleaning import swap_laterality
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure
from medvl.eval.core.results import Results, at_items, format_table, format_value
from medvl.eval.report_generation.metrics import overlap_metrics
from medvl.eval.vqa.controls import CONTROLS, GAINS, control_of
from medvl.eval.vqa.predictions import QUESTION_ONLY, Predictions, VQAData, baselines
from medvl.eval.vqa.protocol import (
    PROTOCOL,
    PROTOCOLS,
    PUBLISHED_PROTOCOLS,
    AnswerVocabulary,
    VQAProtocol,
    get_protocol,
)

MODEL = "model"
"""Name of the evaluated predictions among the baselines."""
ACCURACY = "accuracy"
GAIN = "gain_over_question_only"
CEILING = "ceiling"
TYPES = ("overall", "closed", "open")
"""Targets of the rows over all questions, and over those of each answer type."""


_SHOWN_TEXT_METRICS = ("corpus_bleu_1", "corpus_bleu_4", "mean_rouge_l", "mean_cider")


@dataclasses.dataclass(frozen=True, slots=True)
class VQAResult:
    """Results, with the evaluated questions and predictions."""

    results: Results
    data: VQAData
    """The evaluated questions."""
    systems: Mapping[str, Predictions]
    """The evaluated predictions, if any, and the baselines."""
    credits: Mapping[str, NDArray[np.float64]]
    """System -> credit_N."""
    protocol: VQAProtocol

    def table(self) -> str:
        """Return a text table of the systems by overall, closed and open, and one by question
        type and organ.
        """
        metrics = (CEILING, GAIN, *GAINS.values())
        others = [row for row in self.results.rows if row.metric in metrics and row.target in TYPES]
        top = [
            dataclasses.replace(row, metric=row.target, target=system, subgroup="")
            for system in self.systems
            for row in (self.results.row(ACCURACY, target, subgroup_of(system)) for target in TYPES)
        ]
        top += [dataclasses.replace(row, metric=row.target, target=row.metric) for row in others]
        below = [
            dataclasses.replace(row, metric=system, subgroup="")
            for system in (MODEL, QUESTION_ONLY)
            for row in self.results.rows
            if row.metric == ACCURACY
            and row.subgroup == subgroup_of(system)
            and row.target not in TYPES
        ]
        texts = [
            dataclasses.replace(row, target=subgroup_of(system) or MODEL, subgroup="")
            for system in self.systems
            for row in self.results.rows
            if row.target == DIFFERENCE
            and row.metric in _SHOWN_TEXT_METRICS
            and row.subgroup == subgroup_of(system)
        ]
        return "\n\n".join(format_table(rows) for rows in (top, below, texts) if rows)

    def predictions(self) -> list[dict[str, Any]]:
        """Return one JSON object per question, with the answers and credits of the model, its
        controls and the question-only baseline.
        """
        lines = []
        types = _predicted_types(self.systems)
        closed_N = self.protocol.closed_questions(self.data.questions, types)
        for index, question in enumerate(self.data.questions):
            line: dict[str, Any] = {**question.as_json(), "patient": self.data.groups[index]}
            groups = self.data.subgroups[index] if self.data.subgroups else {}
            line |= {"subgroups": groups, "closed": bool(closed_N[index])}
            for system in (MODEL, *CONTROLS, QUESTION_ONLY):
                if system in self.systems:
                    prediction = self.systems[system].get(question.id)
                    line[system] = None if prediction is None else prediction.answer
                    line[f"{system}_credit"] = float(self.credits[system][index])
            lines.append(line)
        return lines


def evaluate_answers(
    data: VQAData,
    predictions: Predictions | None = None,
    *,
    protocol: VQAProtocol | str = PROTOCOL,
    split: str = "test",
    vocabulary: AnswerVocabulary | Literal["protocol"] | None = "protocol",
    elsewhere: Sequence[Question] = (),
    controls: Mapping[str, Predictions] | None = None,
    resamples: int = 1000,
    seed: int = 0,
    inputs: Mapping[str, str | None] | None = None,
) -> VQAResult:
    """Evaluate answers to the questions of one split; the module docstring describes the protocol.

    Args:
        data: all questions, including those of train, on which the baselines are fitted.
        predictions: question id -> prediction; None evaluates the baselines alone.
        protocol: a protocol or its name.
        split: split of the evaluated questions.
        vocabulary: answers of the model, for the ceiling (`model_vocabulary`); None for a model
            that generates them; default the protocol's own.
        elsewhere: questions of further splits, whose answers a model's vocabulary may have too.
        controls: name -> predictions of the same model under that control.
        resamples, seed: number and seed of the bootstrap resamples.
        inputs: further hashes for the results (the checkpoint).

    Raises:
        EvaluationError: a prediction has an unknown question id, the split has no questions, or the
            predictions lack a field that the protocol needs.
    """
    protocol = get_protocol(protocol) if isinstance(protocol, str) else protocol
    evaluated = data.part(split)
    data.check_ids(predictions or {})
    evaluated = evaluated.choose(
        [n for n, question in enumerate(evaluated.questions) if protocol.includes(question)]
    )
    if not evaluated.questions:
        raise EvaluationError(
            f"{data.name}: protocol {protocol.name} includes no question of {split}", "empty"
        )
    if vocabulary == "protocol":
        vocabulary = (
            AnswerVocabulary.build(data.questions, protocol) if protocol.vocabulary else None
        )
    elif vocabulary is not None:
        others = [question for question in elsewhere if question.split != split]
        leaked = vocabulary.leaked([*data.questions, *others], split, protocol)
        protocol = protocol.with_leak(leaked, split)
    questions = evaluated.questions
    systems: dict[str, Predictions] = {} if predictions is None else {MODEL: predictions}
    systems |= controls or {}
    systems |= baselines(data.part("train").questions, questions, protocol)
    credits = {
        system: protocol.credits(questions, {name: one.answer for name, one in answers.items()})
        for system, answers in systems.items()
    }
    details = _details(evaluated, predictions, protocol) | {"vocabulary_of": _origin(vocabulary)}
    config = _config(data, protocol, vocabulary)
    groups = _metric_groups(questions, systems, credits, protocol, vocabulary)
    rows = measure(groups, len(questions), resamples=resamples, seed=seed, groups=evaluated.groups)
    results = Results(
        protocol="vqa",
        protocol_version=protocol.version,
        rows=rows,
        config=config | {"split": split, "resamples": resamples, "seed": seed},
        inputs={
            "questions": data.fingerprint,
            "vocabulary": None if vocabulary is None else vocabulary.fingerprint,
            **(inputs or {}),
        },
        details=details,
    )
    return VQAResult(results, evaluated, systems, credits, protocol)


def _config(
    data: VQAData, protocol: VQAProtocol, vocabulary: AnswerVocabulary | None
) -> dict[str, Any]:
    return {
        "dataset": data.name,
        "split_id": data.split_id,
        "rules": dataclasses.asdict(protocol),
        "vocabulary_size": None if vocabulary is None else len(vocabulary),
    }


def _origin(vocabulary: AnswerVocabulary | None) -> str | None:
    return None if vocabulary is None else ", ".join(vocabulary.splits) or "the model"


def _predicted_types(systems: Mapping[str, Predictions]) -> dict[str, str | None]:
    """Return the answer types that the model predicts, by question id."""
    return {name: one.answer_type for name, one in systems.get(MODEL, {}).items()}


def _metric_groups(
    questions: Sequence[Question],
    systems: Mapping[str, Predictions],
    credits: Mapping[str, NDArray[np.float64]],
    protocol: VQAProtocol,
    vocabulary: AnswerVocabulary | None,
) -> list[MetricGroup]:
    """Return accuracy of the systems, the gain of the model and the ceiling."""
    predicted = _predicted_types(systems)
    by_attribute = attribute_masks(questions)
    known = None if vocabulary is None else vocabulary.answers
    ceiling_N = protocol.highest_credits(questions, known)
    types = type_masks(protocol.closed_questions(questions, predicted))
    types_by_field = type_masks(protocol.closed_questions(questions, {}))
    values = [
        (
            ACCURACY,
            credit_N,
            (types if system == MODEL else types_by_field) | by_attribute,
            subgroup_of(system),
        )
        for system, credit_N in credits.items()
    ]
    if MODEL in credits:
        values.append((GAIN, credits[MODEL] - credits[QUESTION_ONLY], types, ""))
        for control, gain in GAINS.items():
            if control in credits:
                gain_N = credits[MODEL] - credits[control]
                values.append((gain, gain_N, types | by_attribute, ""))
    values.append((CEILING, ceiling_N, types, ""))
    groups = [masked_means(*one) for one in values]
    for system in (MODEL, *CONTROLS, QUESTION_ONLY):
        if system in systems:
            answer_of = systems[system]
            answers = [
                answer_of[each.id].answer if each.id in answer_of else "" for each in questions
            ]
            groups += difference_metrics(questions, answers, subgroup_of(system))
    return groups


def difference_metrics(
    questions: Sequence[Question], answers: Sequence[str], subgroup: str = ""
) -> list[MetricGroup]:
    """Return the text metrics of the answers to questions about a difference; none without such
    questions.
    """
    index = [place for place, each in enumerate(questions) if each.kind == DIFFERENCE]
    if not index:
        return []
    groups = overlap_metrics(
        [answers[place] for place in index],
        [questions[place].answer for place in index],
        subgroup=subgroup,
    )
    named = [
        MetricGroup(
            [dataclasses.replace(row, target=DIFFERENCE) for row in group.rows], group.statistic
        )
        for group in groups
    ]
    return [at_items(group, index) for group in named]


def masked_means(
    metric: str,
    values_N: NDArray[np.float64],
    masks: Mapping[str, NDArray[np.bool_]],
    subgroup: str = "",
) -> MetricGroup:
    """Return the mean of the values within each mask."""
    values_NK = np.stack([np.where(mask_N, values_N, np.nan) for mask_N in masks.values()], axis=1)
    return mean_metrics(metric, values_NK, list(masks), subgroup=subgroup)


def type_masks(closed_N: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Return masks for overall, closed and open."""
    return dict(zip(TYPES, (np.ones(len(closed_N), np.bool_), closed_N, ~closed_N), strict=True))


def attribute_masks(questions: Sequence[Question]) -> dict[str, NDArray[np.bool_]]:
    """Return masks by question type (a question may have several) and by organ, if there is more
    than one, and by side.

    The masks by side are of the questions that name one, in question or answer, and of the others,
    if there are both.
    """
    kinds = [set(question.kind.split(", ")) for question in questions]
    organs = [{question.organ} for question in questions]
    masks: dict[str, NDArray[np.bool_]] = {}
    for attribute, values in (("kind", kinds), ("organ", organs)):
        names = sorted({name for value in values for name in value} - {""})
        if len(names) > 1:
            masks |= {
                f"{attribute}: {name}": np.array([name in value for value in values])
                for name in names
            }
    texts = [f"{question.question} {question.answer}" for question in questions]
    side_N = np.array([swap_laterality(text) != text for text in texts])
    return masks | (
        {"side: named": side_N, "side: not named": ~side_N}
        if 0 < side_N.sum() < len(side_N)
        else {}
    )


def subgroup_of(system: str) -> str:
    """Return the subgroup of a system's rows: "" for the evaluated predictions, else the control or
    the baseline.
    """
    if system in CONTROLS:
        return control_of(system)
    return "" if system == MODEL else f"baseline: {system}"


def _details(
    evaluated: VQAData, predictions: Predictions | None, protocol: VQAProtocol
) -> dict[str, Any]:
    questions = evaluated.questions
    return {
        "questions": len(questions),
        "images": len(set(evaluated.groups)),
        "closed_by_field": sum(question.answer_type == "closed" for question in questions),
        "yes_no": sum(
            protocol.normalize(question.answer) in ("yes", "no") for question in questions
        ),
        "without_answer": sum(not question.answer for question in questions),
        "not_predicted": None
        if predictions is None
        else sum(q.id not in predictions for q in questions),
    }


# Evaluation of the same answers by the protocols of published numbers.

_COLUMNS = ("protocol", "n", "closed n", "overall", "closed", "open", "ceiling")


def published_protocols_table(
    data: VQAData, predictions: Predictions | None = None, *, split: str = "test"
) -> str:
    """Return a text table with one line per protocol, medvl's first; without predictions, of the
    question-only model.

    It has no intervals, because these numbers are only comparable to published ones, not to each
    other.
    """
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for name in (PROTOCOL, *PUBLISHED_PROTOCOLS):
        try:
            lines.append(_line(data, predictions, name, split))
        except EvaluationError as error:
            lines.append((name, *["-"] * (len(_COLUMNS) - 2), f"-  ({error})"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
    system = MODEL if predictions is not None else QUESTION_ONLY
    return "\n".join([f"{system}, by protocol:", *(_aligned(line, widths) for line in lines)])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers, last = line
    cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([name.ljust(widths[0]), *cells, last])


def _line(data: VQAData, predictions: Predictions | None, name: str, split: str) -> tuple[str, ...]:
    result = evaluate_answers(data, predictions, protocol=name, split=split, resamples=0).results
    subgroup = "" if predictions is not None else f"baseline: {QUESTION_ONLY}"
    rows = {
        target: result.row(ACCURACY, target, subgroup) for target in ("overall", "closed", "open")
    }
    sizes = str(rows["overall"].n), str(rows["closed"].n)
    ceiling = format_value(result.row(CEILING, "overall"))
    flaw = PROTOCOLS[name].flaw
    return (
        name,
        *sizes,
        *(format_value(row) for row in rows.values()),
        ceiling + (f"  {flaw}" if flaw else ""),
    )
