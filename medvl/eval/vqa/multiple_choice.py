"""Multiple choice: the option that a system scores highest, beside controls without the image.

`medvl.eval.vqa.choice_metrics` defines the protocol, `medvl.eval.vqa.option_scores` the scores of
each kind of system.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medvl.common.config_io import check_choice
from medvl.data.annotations import Question
from medvl.data.loading.sources import color_for
from medvl.data.loading.studies import QuestionSource
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import check_disjoint_patients
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, subgroups_of
from medvl.eval.core.open import Setup
from medvl.eval.core.results import LineFields, Lines, Results
from medvl.eval.evaluation import Column, LineResult, ModelEvaluation, Task, Trial
from medvl.eval.html.page import Section
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.vqa.choice_metrics import (
    ACCURACY,
    BASELINES,
    BRIER,
    ECE,
    LENGTHS,
    MAIN,
    SCALED,
    SEVERAL,
    SHUFFLED,
    Length,
    choice_metrics,
    choose_option_threshold,
    final_scores,
    fit_temperature,
    share_of_right,
)
from medvl.eval.vqa.controls import (
    CONTROLS,
    GAIN_OVER_ONE_IMAGE,
    GAIN_OVER_TEXT_ONLY,
    SWAPPED,
    TEXT_ONLY,
    TITLES,
    check_controls,
    control_of,
    control_sources,
)
from medvl.eval.vqa.option_scores import (
    OptionScorer,
    OptionScores,
    Score,
    Templates,
    option_scorer,
)
from medvl.eval.vqa.predictions import question_data
from medvl.eval.vqa.protocol import get_protocol
from medvl.models import VQA, DualEncoder, FusionModel, ReportGenerator
from medvl.models.base import System, evaluating
from medvl.models.report_generators.causal_lm import CausalLM
from medvl.schema import Inputs

PROTOCOL = "multiple_choice"
PROTOCOL_VERSION = 1
_Scores = Mapping[str, Mapping[str, OptionScores]]
"""Main or a control -> question id -> scores."""


def baseline_credits(train: Sequence[Question], test: Sequence[Question]) -> list[dict[str, float]]:
    """Return the credits of the most frequent right text and letter of train, by kind, of each
    question; of ties, 1/n.
    """
    texts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    letters: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for question in train:
        for place in question.right:
            texts[question.kind][question.options[place]] += 1
            letters[question.kind][place] += 1
    credits = []
    for question in test:
        of_text = [float(texts[question.kind][option]) for option in question.options]
        of_letter = [float(letters[question.kind][n]) for n in range(len(question.options))]
        values = [share_of_right(counts, question.right) for counts in (of_text, of_letter)]
        credits.append(dict(zip(BASELINES, values, strict=True)))
    return credits


@torch.no_grad()
def score_questions(
    scorer: OptionScorer, model: System, loader: Any, options: Mapping[str, Sequence[str]]
) -> dict[str, OptionScores]:
    """Return question id -> scores of its options, in the order given; unreadable images have none.

    Args:
        scorer: scores the options of a batch.
        model: its model.
        loader: questions, each once.
        options: question id -> options in the order in which they are shown.
    """
    source = loader.source
    asked = {source.key(n): each.question for n, each in enumerate(source.questions)}
    scores: dict[str, OptionScores] = {}
    with evaluating(model):
        for batch in loader:
            questions = [
                dataclasses.replace(asked[key], options=tuple(options[asked[key].id]))
                for key in batch.keys
            ]
            batch_scores = scorer.score(batch.to(model.device), questions)
            scores |= {one.id: each for one, each in zip(questions, batch_scores, strict=True)}
    return scores


def _reordered(
    options: Mapping[str, Sequence[str]], order: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    return {name: [options[name][n] for n in places] for name, places in order.items()}


def _in_order(
    scores: Mapping[str, OptionScores], order: Mapping[str, Sequence[int]]
) -> dict[str, OptionScores]:
    """Return the scores of reordered options in the order of the question."""
    return {
        name: OptionScores(*([part[n] for n in np.argsort(order[name])] if part else []
                             for part in each))
        for name, each in scores.items()
    }  # fmt: skip


def cyclic_scores(
    score: Callable[[Mapping[str, Sequence[str]]], Mapping[str, OptionScores]],
    options: Mapping[str, Sequence[str]],
) -> dict[str, OptionScores]:
    """Return question id -> the logarithm of each option's probability among the options, its mean
    over their cyclic orders.

    Each option then has had every letter, so that a preference for a letter counts for all equally.

    Args:
        score: function from the options of the questions, in an order, to their scores.
        options: question id -> options.
    """
    totals: dict[str, Any] = {}
    for turn in range(max(map(len, options.values()))):
        order = {
            name: [(place + turn) % len(several) for place in range(len(several))]
            for name, several in options.items()
        }
        turn_scores = _in_order(score(_reordered(options, order)), order)
        for name, each in turn_scores.items():
            if turn < len(options[name]):
                values_O = np.asarray(each.scores, np.float64)
                log_O = values_O - np.logaddexp.reduce(values_O)
                totals[name] = totals.get(name, 0.0) + log_O / len(values_O)
    return {name: OptionScores(total_O.tolist()) for name, total_O in totals.items()}


def _entry(scores: OptionScores) -> dict[str, Any]:
    """Return scores for JSON, null where there is none."""
    values = [None if np.isnan(score) else score for score in scores.scores]
    sizes = {"tokens": scores.tokens, "characters": scores.characters}
    return {"scores": values, **{name: size for name, size in sizes.items() if size}}


def _training_questions(source: ShardSource, split: str) -> list[Question]:
    """Return the questions of train, or of folders of one split those of another one."""
    questions = question_data([source]).questions
    known = [q for q in questions if q.split == "train" and q.split != split]
    return [q for q in known if is_item(q) and len(q.right) == 1]


def is_item(question: Question) -> bool:
    """Return whether a question has several options, of which some are right."""
    return len(question.options) > 1 and len(question.right) > 0


class ChoiceSource(QuestionSource):
    """The questions of a split with several options, of which some are right."""

    def __init__(self, source: ShardSource, split: str, *, earlier: bool = False) -> None:
        super().__init__(source, split, (), str, earlier=earlier)
        every = self.questions
        self.questions = tuple(each for each in every if is_item(each.question))
        if not self.questions:
            message = f"{source.folder}: no question of {split} has options and a right one"
            raise EvaluationError(message, "empty", field="data")
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        self.left_out = len(every) - len(self.questions)
        """Number of questions without options."""


@register_evaluation("multiple-choice")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoice(ModelEvaluation):
    """Evaluate multiple-choice questions: accuracy by type, beside text only, swapped images,
    shuffled options and questions in other words.

    The checkpoint is a dual-encoder, a fusion-encoder, a model that was fine-tuned on questions, or
    a report generator.
    """

    protocols = (PROTOCOL,)
    lines = LineFields(item=("id",), needs=("right", "scores"))
    title = "Multiple choice"
    tasks = (
        Task(
            fits=(DualEncoder, FusionModel, ReportGenerator),
            needs=("choices",),
            data="choices",
            columns=(
                Column(title="choices", metric=ACCURACY, targets=("overall",)),
                Column(
                    title="choices, gain over text only",
                    metric=GAIN_OVER_TEXT_ONLY,
                    targets=("overall",),
                ),
                Column(
                    title="choices, most frequent text",
                    metric=ACCURACY,
                    targets=("overall",),
                    subgroup=f"baseline: {BASELINES[0]}",
                ),
                Column(
                    title="choices, calibration error",
                    metric=ECE,
                    targets=("overall",),
                    higher_is_better=False,
                ),
            ),
        ),
    )

    train: Path | None = None
    """folder of shards with the training questions, of which the mean image and the baselines are
    made; default --data
    """
    split: str = "test"
    """split of the questions"""
    score: Score = "auto"
    """statement (dual-encoders), matching (fusion-encoders), answers (fine-tuned on questions),
    likelihood or letter (writers of text); auto takes the first that the system has
    """
    templates: Path | None = None
    """JSON file of question type -> list of statements such as "{option}." or "{question}
    {option}"; "" has those of all other types
    """
    length: Length = "token"
    """compare log-probabilities as sums, by token or by character"""
    less_text_only: bool = False
    """subtract the score of each option with the mean image"""
    cyclic: bool = False
    """average the score letter over the cyclic orders of the options, so that preferences for a
    letter cancel; takes as many times as long as there are options
    """
    controls: tuple[str, ...] = CONTROLS
    """controls to run: text_only, noise, image_swapped, question_reworded and, of models of two
    images, earlier_removed and earlier_swapped. Each takes as long as the questions themselves;
    none for no control
    """
    valid: Path | None = None
    """folder of shards of other patients with questions, on which the temperature of the
    probabilities and the threshold for several right options are chosen
    """
    valid_split: str = "validate"
    """split of those questions"""
    shuffles: int = 5
    """orders of the options, for scores that see all options"""
    seed: int = 0
    """seed of swapped images, noise and orders"""

    def evaluate(self, model: System, source: ShardSource, setup: Setup) -> LineResult:
        """Return the metrics of the chosen options."""
        check_choice(self.length, LENGTHS, "length")
        names = check_controls(self.controls)
        templates = Templates() if self.templates is None else Templates.read(self.templates)
        scorer = option_scorer(model, templates, get_protocol("medvl"), self.score)
        if self.cyclic and not scorer.sees_all_options:
            message = f"--cyclic is for the score letter; {scorer.name} does not depend on orders"
            raise ConfigError(message, "conflict", field="cyclic")
        earlier = isinstance(model, VQA | CausalLM) and model.inputs.prior_image
        train = source if self.train is None else ShardSource(self.train)
        color = color_for(source, model.transform)

        def run(
            of: Any, questions: ChoiceSource, order: Mapping[str, Sequence[int]] | None = None
        ) -> dict[str, OptionScores]:
            options: Mapping[str, Sequence[str]] = {
                each.question.id: each.question.options for each in questions.questions
            }
            if order is not None:
                options = _reordered(options, order)
            inputs = Inputs(prior_image=earlier)

            def score(options: Mapping[str, Sequence[str]]) -> dict[str, OptionScores]:
                loader = setup.loader(of, model, sections=("question",), inputs=inputs)
                return score_questions(scorer, model, loader, options)

            return cyclic_scores(score, options) if self.cyclic else score(options)

        def control_scores(questions: ChoiceSource, names: Sequence[str]) -> _Scores:
            controls = control_sources(questions, train, color=color, seed=self.seed, names=names)
            if self.less_text_only and TEXT_ONLY not in controls:
                message = (
                    "--less-text-only needs the control text_only, whose mean image regions lack"
                )
                raise EvaluationError(message, "unsupported", field="less_text_only")
            main = {MAIN: run(questions, questions)}
            return main | {name: run(each, questions) for name, each in controls.items()}

        questions = ChoiceSource(source, self.split, earlier=earlier)
        config: dict[str, Any] = {
            "score": scorer.name,
            "length": self.length,
            "less_text_only": self.less_text_only,
            "cyclic": self.cyclic,
            "templates": templates.by_kind if scorer.name in ("statement", "matching") else None,
            "split": self.split,
            "scale": scorer.scale,
            "left_out": questions.left_out,
        }
        if self.valid is not None:
            valid_source = setup.source(self.valid, self.checkpoint)
            valid = ChoiceSource(valid_source, self.valid_split, earlier=earlier)
            check_disjoint_patients(_patients(valid), _patients(questions))
            needed = (TEXT_ONLY,) if self.less_text_only else ()
            lines = _lines(valid, control_scores(valid, needed))
            config["temperature"] = fit_temperature(lines, config)
            config["threshold"] = choose_option_threshold(lines, config)
        scores = control_scores(questions, names)
        asked = [each.question for each in questions.questions]
        orders = self._orders(asked) if scorer.sees_all_options else []
        shuffled = [_in_order(run(questions, questions, order), order) for order in orders]
        config["shuffles"] = len(orders)
        lines = _lines(questions, scores, shuffled)
        known = _training_questions(train, self.split)
        if known:
            baselines = baseline_credits(known, asked)
            lines = [line | credit for line, credit in zip(lines, baselines, strict=True)]
        for line in lines:
            option_scores = final_scores(line, MAIN, self.length, self.less_text_only)
            if not np.isnan(option_scores).any():
                line["chosen"] = line["options"][int(np.argmax(option_scores))]
        return self.score_lines(
            lines, setup, source, version=PROTOCOL_VERSION, config=config, seed=self.seed
        )

    def _orders(self, questions: Sequence[Question]) -> list[dict[str, list[int]]]:
        rng = np.random.default_rng(self.seed)
        return [
            {question.id: rng.permutation(len(question.options)).tolist() for question in questions}
            for _ in range(self.shuffles)
        ]

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "MultipleChoice":
        """Return the evaluation with two controls; raises EvaluationError "unsupported" for a
        system that scores no options.
        """
        try:
            option_scorer(trial.model(), Templates(), get_protocol("medvl"))
        except ConfigError as error:
            raise EvaluationError(str(error), "unsupported", field="score") from None
        return cls(
            checkpoint=trial.checkpoint,
            data=trial.data,
            train=trial.data.parent / "train",
            controls=(TEXT_ONLY, SWAPPED),
        )

    def main_rows(self, results: Results) -> list[tuple[str, MetricRow]]:
        named = {
            "Gain over text only": (GAIN_OVER_TEXT_ONLY, "overall"),
            "Gain over one image": (GAIN_OVER_ONE_IMAGE, "overall"),
            "Accuracy": (ACCURACY, "overall"),
            "Exact, of several right options": (SEVERAL, "exact_count"),
        }
        known = {(row.metric, row.target) for row in results.rows}
        return [(title, results.row(*name)) for title, name in named.items() if name in known]

    def page_sections(self, result: LineResult, source: ShardSource) -> list[Section]:
        results = result.results
        known = {row.metric for row in results.rows}
        single = [_controls_table(results), _parts_table(results)] if ACCURACY in known else []
        return [*single, *([_several_table(results)] if SEVERAL in known else [])]

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of lines."""
        return choice_metrics(lines, results.config)


def _patients(source: ChoiceSource) -> list[str]:
    return [source.source.sample(each.image).patient for each in source.questions]


def _lines(
    source: ChoiceSource, scores: _Scores, shuffled: Sequence[Mapping[str, OptionScores]] = ()
) -> list[dict[str, Any]]:
    """Return one line for each question, with the scores of its options by name."""
    lines = []
    for image, question in source.questions:
        sample = source.source.sample(image)
        empty = OptionScores([float("nan")] * len(question.options))
        line: dict[str, Any] = {
            **question.as_json(),
            "key": sample.key,
            "patient": sample.patient,
            "subgroups": subgroups_of(sample),
            "scores": {
                name: _entry(of_questions.get(question.id, empty))
                for name, of_questions in scores.items()
            },
        }
        if shuffled:
            line["shuffled"] = [_entry(each.get(question.id, empty)) for each in shuffled]
        lines.append(line)
    return lines


def _controls(results: Results) -> list[str]:
    """Return the controls that results have."""
    known = {row.subgroup for row in results.rows}
    return [name for name in CONTROLS if control_of(name) in known]


def _controls_table(results: Results) -> Table:
    named = {
        "Model": (ACCURACY, "overall", ""),
        **{TITLES[n]: (ACCURACY, "overall", control_of(n)) for n in _controls(results)},
        "Options in other orders": (SHUFFLED, ACCURACY, ""),
        "Same option in all orders": (SHUFFLED, "agreement", ""),
        "Most frequent text of train": (ACCURACY, "overall", f"baseline: {BASELINES[0]}"),
        "Most frequent letter of train": (ACCURACY, "overall", f"baseline: {BASELINES[1]}"),
        "Corrected for chance": ("chance_corrected", "overall", ""),
        "Calibration error": (ECE, "overall", ""),
        "Calibration error, temperature of validation": (ECE, "overall", SCALED),
        "Brier score": (BRIER, "overall", ""),
        **{f"Log-probabilities by {n}": (ACCURACY, "overall", f"length: {n}") for n in LENGTHS},
    }
    rows = {(row.metric, row.target, row.subgroup): row for row in results.rows}
    return Table(
        title="Accuracy with and without the image",
        columns=("", "Accuracy", "Questions"),
        rows=[
            (title, metric_cell(rows[name], bar=True), f"{rows[name].n:,}")
            for title, name in named.items()
            if name in rows
        ],
        strong_rows=1,
        caption="With 95% intervals. A model that ignores the image has the same accuracy with the "
        "mean image and with that of another patient.",
    )


def _parts_table(results: Results) -> Table:
    controls = ["", *map(control_of, _controls(results))]
    rows = {(row.metric, row.target, row.subgroup): row for row in results.rows}
    targets = [row.target for row in results.rows if (row.metric, row.subgroup) == (ACCURACY, "")]
    text_only = control_of(TEXT_ONLY)
    columns = [each for each in ("", text_only) if each in controls]
    return Table(
        title="By type of question",
        columns=("", "Accuracy", *(["Text only"] if text_only in columns else []), "Questions"),
        rows=[
            (
                target,
                *(
                    metric_cell(rows[ACCURACY, target, each], bar=True)
                    if (ACCURACY, target, each) in rows
                    else ""
                    for each in columns
                ),
                f"{rows[ACCURACY, target, ''].n:,}",
            )
            for target in targets
        ],
        one_axis=True,
    )


def _several_table(results: Results) -> Table:
    rows = [row for row in results.rows if row.metric == SEVERAL]
    titles = {
        "exact_count": "All right, their number known",
        "option_auroc": "Right above wrong",
        "exact": "All right",
        "f1": "F1",
    }
    targets = list(dict.fromkeys(row.target for row in rows))
    names = {"": "Model", **{control_of(name): title for name, title in TITLES.items()}}
    return Table(
        title="Questions with several right options",
        columns=("", *(titles[target] for target in targets), "Questions"),
        rows=[
            (
                title,
                *(metric_cell(row, bar=True) for row in rows if row.subgroup == subgroup),
                f"{rows[0].n:,}",
            )
            for subgroup, title in names.items()
            if any(row.subgroup == subgroup for row in rows)
        ],
        strong_rows=1,
        caption="With 95% intervals. Where their number is not known, a threshold of validation "
        "questions decides.",
    )
