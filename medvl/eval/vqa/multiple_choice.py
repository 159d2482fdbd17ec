"""Multiple choice: the option that a system scores highest, beside controls without the image.

Protocol "multiple_choice", version 1:

* Every question of the split with options and exactly one right one is an item. The chosen option
  has the highest score (`medvl.eval.vqa.option_scores`); n options with the highest score share it,
  so that each counts 1/n. A question with an option without a score is wrong ("unanswered").
* Log-probabilities are compared as they are ("sum"), for each token or for each character: `length`
  names the choice, and the accuracy of all three is reported. With `less_text_only`, the score of
  an option with the mean image is subtracted, which removes how common its words are.
* "accuracy" is the mean over all questions, over the means of question types ("macro"), by type,
  category and number of options; "chance_corrected" is (accuracy - 1/n) / (1 - 1/n);
  "accuracy_by_letter" has the mean over the right letters, and each of them.
* The rows of `medvl.eval.vqa.controls` follow, with the same resamples, and "gain_over_text_only",
  the headline. "options_shuffled" is the mean accuracy of seeded orders of the options, and
  "agreement" the share of questions whose chosen option is the same in all orders. A score that
  sees one option at a time does not depend on their order.
* Baselines: the most frequent right text and letter of train, by type of question.
* Intervals: the bootstrap resamples patients (of literature, articles; else images).

Shape letters: N questions.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.common.config_io import check_choice
from medvl.data.annotations import Question
from medvl.data.corpora.common.questions import LETTERS
from medvl.data.loading.sources import color_for
from medvl.data.loading.studies import QuestionSource
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    label_mean_metrics,
    mean_metrics,
    subgroups_of,
)
from medvl.eval.core.results import LineFields, Lines, Results, number
from medvl.eval.evaluation import LineResult, ModelEvaluation, Setup
from medvl.eval.html.page import Section
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.vqa.accuracy import masked_means
from medvl.eval.vqa.controls import (
    CONTROLS,
    GAIN_OVER_TEXT_ONLY,
    TEXT_ONLY,
    TITLES,
    control_metrics,
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
from medvl.models import VQA
from medvl.models.base import System, evaluating

PROTOCOL = "multiple_choice"
PROTOCOL_VERSION = 1
Length = Literal["sum", "token", "character"]
LENGTHS = get_args(Length)
ACCURACY = "accuracy"
SHUFFLED = "options_shuffled"
MAIN = "main"
"""Name of the scores without a control, in lines."""
_BASELINES = ("most_frequent_text", "most_frequent_letter")


def share_of_right(scores: Sequence[float], right: int) -> float:
    """Return the credit of the highest score: 1/n if the right option is among n highest, else 0.

    A score that is NaN makes the question unanswered: 0.
    """
    values = np.asarray(scores, np.float64)
    if np.isnan(values).any():
        return 0.0
    highest = values == values.max()
    return float(highest[right] / highest.sum())


def normalized_scores(entry: Mapping[str, Any], length: str) -> list[float]:
    """Return scores for a length: log-probabilities as they are, by token or by character."""
    scores = [number(score) for score in entry["scores"]]
    if length == "sum" or not entry.get("tokens"):
        return scores
    sizes = entry["tokens" if length == "token" else "characters"]
    return [score / max(size, 1) for score, size in zip(scores, sizes, strict=True)]


def final_scores(line: Mapping[str, Any], name: str, length: str, less: bool) -> list[float]:
    """Return the scores of a line that are compared.

    Args:
        line: a line of the predictions.
        name: main or a control.
        length: see `normalized_scores`.
        less: subtract the scores of the text only.
    """
    scores = normalized_scores(line["scores"][name], length)
    if not less:
        return scores
    return [
        a - b for a, b in zip(scores, final_scores(line, TEXT_ONLY, length, False), strict=True)
    ]


def choice_metrics(lines: Lines, config: Mapping[str, Any]) -> list[MetricGroup]:
    """Return all metrics of lines of questions.

    Args:
        lines: predictions of `MultipleChoice`.
        config: `length` and `less_text_only`.
    """
    length, less = config["length"], config["less_text_only"]
    right = [line["right"][0] for line in lines]

    def credits(name: str, length: str = length) -> NDArray[np.float64]:
        return np.array(
            [
                share_of_right(final_scores(line, name, length, less), place)
                for line, place in zip(lines, right, strict=True)
            ]
        )

    main_N = credits(MAIN)
    size_N = np.array([len(line["options"]) for line in lines])
    overall = {"overall": np.ones(len(lines), np.bool_)}
    masks = _masks(lines)
    kinds = [line.get("kind") or "other" for line in lines]
    of_kind = {name: np.array([kind == name for kind in kinds]) for name in sorted(set(kinds))}
    groups = [
        label_mean_metrics(ACCURACY, main_N, kinds),
        *([masked_means(ACCURACY, main_N, masks)] if masks else []),
        masked_means("chance_corrected", (main_N - 1 / size_N) / (1 - 1 / size_N), overall),
        _without_first(
            label_mean_metrics("accuracy_by_letter", main_N, [LETTERS[place] for place in right])
        ),
        *control_metrics(
            ACCURACY,
            main_N,
            {name: credits(name) for name in CONTROLS if name in lines[0]["scores"]},
            overall | of_kind | masks,
        ),
        _shuffle_metrics(lines, main_N, length, less),
        masked_means(
            "unanswered",
            np.array([float(None in line["scores"][MAIN]["scores"]) for line in lines]),
            overall,
        ),
    ]
    if any(line["scores"][MAIN].get("tokens") for line in lines):
        groups += [
            masked_means(ACCURACY, credits(MAIN, each), overall, f"length: {each}")
            for each in LENGTHS
        ]
    for name in _BASELINES:
        if name in lines[0]:
            credit_N = np.array([line[name] for line in lines], np.float64)
            groups.append(masked_means(ACCURACY, credit_N, overall, f"baseline: {name}"))
    return groups


def _masks(lines: Lines) -> dict[str, NDArray[np.bool_]]:
    """Return the questions of each category and number of options, where there are several."""
    values = {
        "category": [line.get("category", "") for line in lines],
        "options": [str(len(line["options"])) for line in lines],
    }
    return {
        f"{attribute}: {name}": np.array([each == name for each in of_lines])
        for attribute, of_lines in values.items()
        if len(set(of_lines)) > 1
        for name in sorted(set(of_lines) - {""})
    }


def _without_first(group: MetricGroup) -> MetricGroup:
    return MetricGroup(group.rows[1:], lambda counts_NR: group.statistic(counts_NR)[:, 1:])


def _shuffle_metrics(
    lines: Lines, main_N: NDArray[np.float64], length: str, less: bool
) -> MetricGroup:
    """Return the accuracy and the agreement over orders of the options."""
    credit_N = main_N.copy()
    agree_N = np.ones(len(lines))
    for place, line in enumerate(lines):
        shuffled = line.get("shuffled", [])
        if shuffled:
            every = [normalized_scores(entry, length) for entry in shuffled]
            credit_N[place] = np.mean([share_of_right(s, line["right"][0]) for s in every])
            chosen = {int(np.argmax(np.nan_to_num(s, nan=-np.inf))) for s in every}
            chosen.add(int(np.argmax(np.nan_to_num(final_scores(line, MAIN, length, less)))))
            agree_N[place] = float(len(chosen) == 1)
    return mean_metrics(SHUFFLED, np.stack([credit_N, agree_N], axis=1), [ACCURACY, "agreement"])


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
        values = [share_of_right(counts, question.right[0]) for counts in (of_text, of_letter)]
        credits.append(dict(zip(_BASELINES, values, strict=True)))
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
            found = scorer.score(batch.to(model.device), questions)
            scores |= {one.id: each for one, each in zip(questions, found, strict=True)}
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


def _entry(scores: OptionScores) -> dict[str, Any]:
    """Return scores for JSON, null where there is none."""
    values = [None if np.isnan(score) else score for score in scores.scores]
    sizes = {"tokens": scores.tokens, "characters": scores.characters}
    return {"scores": values, **{name: size for name, size in sizes.items() if size}}


def _training_questions(source: ShardSource, split: str) -> list[Question]:
    """Return the questions of train, or of folders of one split those of another one."""
    questions = question_data([source]).questions
    return [q for q in questions if q.split == "train" and q.split != split and is_item(q)]


def is_item(question: Question) -> bool:
    """Return whether a question has several options, of which one is right."""
    return len(question.options) > 1 and len(question.right) == 1


class ChoiceSource(QuestionSource):
    """The questions of a split with several options, of which one is right."""

    def __init__(self, source: ShardSource, split: str, *, earlier: bool = False) -> None:
        super().__init__(source, split, (), str, earlier=earlier)
        every = self.questions
        self.questions = tuple(each for each in every if is_item(each.question))
        if not self.questions:
            message = f"{source.folder}: no question of {split} has options and one right one"
            raise EvaluationError(message, "empty", field="data")
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        several = sum(len(each.question.right) > 1 for each in every)
        self.left_out = {
            "several_right": several,
            "without_options": len(every) - len(self.questions) - several,
        }


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
    shuffles: int = 5
    """orders of the options, for scores that see all options"""
    seed: int = 0
    """seed of swapped images, noise and orders"""

    def evaluate(self, model: System, source: ShardSource, setup: Setup) -> LineResult:
        """Return the metrics of the chosen options."""
        check_choice(self.length, LENGTHS, "length")
        templates = Templates() if self.templates is None else Templates.read(self.templates)
        scorer = option_scorer(model, templates, get_protocol("medvl"), self.score)
        earlier = isinstance(model, VQA) and model.config.earlier_image
        questions = ChoiceSource(source, self.split, earlier=earlier)
        train = source if self.train is None else ShardSource(self.train)
        asked = [each.question for each in questions.questions]
        options = {question.id: question.options for question in asked}
        color = color_for(source, model.transform)
        controls = control_sources(questions, train, color=color, seed=self.seed)
        if self.less_text_only and TEXT_ONLY not in controls:
            message = "--less-text-only needs a mean image, which regions do not have"
            raise EvaluationError(message, "unsupported", field="less_text_only")

        def run(of: Any, options: Mapping[str, Sequence[str]] = options) -> dict[str, OptionScores]:
            loader = setup.loader(of, model, sections=("question",))
            return score_questions(scorer, model, loader, options)

        scores = {MAIN: run(questions), **{name: run(each) for name, each in controls.items()}}
        orders = self._orders(asked) if scorer.sees_all_options else []
        shuffled = [
            _in_order(run(questions, _reordered(options, order)), order) for order in orders
        ]
        known = _training_questions(train, self.split)
        baselines = baseline_credits(known, asked) if known else [{} for _ in asked]
        lines = [
            self._line(questions, place, scores, shuffled) | baseline
            for place, baseline in enumerate(baselines)
        ]
        config = {
            "score": scorer.name,
            "length": self.length,
            "less_text_only": self.less_text_only,
            "templates": templates.by_kind if scorer.name in ("statement", "matching") else None,
            "split": self.split,
            "shuffles": len(orders),
            "left_out": questions.left_out,
        }
        return self.score_lines(
            lines, setup, source, version=PROTOCOL_VERSION, config=config, seed=self.seed
        )

    def _orders(self, questions: Sequence[Question]) -> list[dict[str, list[int]]]:
        rng = np.random.default_rng(self.seed)
        return [
            {question.id: rng.permutation(len(question.options)).tolist() for question in questions}
            for _ in range(self.shuffles)
        ]

    def _line(
        self,
        source: ChoiceSource,
        place: int,
        scores: Mapping[str, Mapping[str, OptionScores]],
        shuffled: Sequence[Mapping[str, OptionScores]],
    ) -> dict[str, Any]:
        image, question = source.questions[place]
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
        chosen = final_scores(line, MAIN, self.length, self.less_text_only)
        if not np.isnan(chosen).any():
            line["chosen"] = question.options[int(np.argmax(chosen))]
        return line

    def main_rows(self, results: Results) -> list[tuple[str, MetricRow]]:
        return [
            ("Gain over text only", results.row(GAIN_OVER_TEXT_ONLY, "overall")),
            ("Accuracy", results.row(ACCURACY, "overall")),
        ][TEXT_ONLY not in _controls(results) :]

    def page_sections(self, result: LineResult, source: ShardSource) -> list[Section]:
        results = result.results
        return [_controls_table(results), _parts_table(results)]

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of lines."""
        return choice_metrics(lines, results.config)


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
        "Most frequent text of train": (ACCURACY, "overall", f"baseline: {_BASELINES[0]}"),
        "Most frequent letter of train": (ACCURACY, "overall", f"baseline: {_BASELINES[1]}"),
        "Corrected for chance": ("chance_corrected", "overall", ""),
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
