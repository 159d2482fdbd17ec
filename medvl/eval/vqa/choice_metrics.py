"""Metrics of multiple-choice questions, from the scores of their options.

Protocol "multiple_choice", version 1. A question of the split with several options is an item.

Questions with one right option:

* The chosen option has the highest score (`medvl.eval.vqa.option_scores`); n options with the
  highest score share it, so that each counts 1/n. A question with an option without a score is
  wrong ("unanswered").
* Log-probabilities are compared as they are ("sum"), for each token or for each character: `length`
  names the choice, and the accuracy of all three is reported. With `less_text_only`, the score of
  an option with the mean image is subtracted, which removes how common its words are.
* "accuracy" is the mean over all questions, over the means of question types ("macro"), by type,
  category and number of options; "chance_corrected" is (accuracy - 1/n) / (1 - 1/n);
  "accuracy_by_letter" has the mean over the right letters, and each of them.
* The rows of `medvl.eval.vqa.controls` follow, with the same resamples, and "gain_over_text_only",
  the headline. "options_shuffled" is the mean accuracy of seeded orders of the options, and
  "agreement" the share of questions whose chosen option is the same in all orders, both without
  the subtraction. A score that sees one option at a time does not depend on their order.
* Calibration of p, the softmax of an item's scores times the model's own scale: "choice_ece" is the
  expected calibration error of the highest p over 15 bins, "choice_brier" the mean of the sum of
  (p - right)^2 over the options. With validation questions, the subgroup "temperature scaled" has
  both with scores over the temperature of the lowest negative log-likelihood there.

Questions with several right options, "several_right":

* "exact_count": the k highest scores are those of the k right options, as if k were known; ties
  as above.
* "option_auroc": share of the pairs of a right and a wrong option in which the right one has the
  higher score, a tie counting one half; the mean over questions.
* "exact" and "f1": of the options whose score, less the mean of the question's options, reaches a
  threshold; it is the one with most exact matches, then the highest F1, on validation questions.
  Without those, neither is reported. GEMeX's answers to such questions are sets of letters.

Baselines: the most frequent right text and letter of train, by type of question. Intervals: the
bootstrap resamples patients (of literature, articles; else images).

Shape letters: N questions, O options of a question, C candidates, R resamples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from medvl.data.annotations import LETTERS
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, label_mean_metrics, mean_metrics
from medvl.eval.core.metrics import ECE_BINS
from medvl.eval.core.results import Lines, at_items, number
from medvl.eval.vqa.accuracy import masked_means
from medvl.eval.vqa.controls import CONTROLS, TEXT_ONLY, control_metrics, control_of

Length = Literal["sum", "token", "character"]
LENGTHS = get_args(Length)
ACCURACY = "accuracy"
SHUFFLED = "options_shuffled"
SEVERAL = "several_right"
ECE = "choice_ece"
BRIER = "choice_brier"
SCALED = "temperature scaled"
MAIN = "main"
"""Name of the scores without a control, in lines."""
BASELINES = ("most_frequent_text", "most_frequent_letter")
_TEMPERATURES = (-6.0, 6.0)  # range of the natural logarithm
_CANDIDATES = 400

Array = NDArray[np.float64]


def share_of_right(scores: Sequence[float], right: Sequence[int]) -> float:
    """Return the chance that the k highest scores are those of the k right options, where ties are
    broken at random: with one right option among n highest, 1/n.

    A score that is NaN makes the question unanswered: 0.
    """
    values = np.asarray(scores, np.float64)
    if np.isnan(values).any():
        return 0.0
    is_right = np.isin(np.arange(len(values)), right)
    least = np.sort(values)[-len(right)]
    above, tied = values > least, values == least
    left = len(right) - int(above.sum())  # places for the tied ones
    if not is_right[above].all() or int(is_right[tied].sum()) != left:
        return 0.0
    return 1 / math.comb(int(tied.sum()), left)


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
        config: `length` and `less_text_only`; `scale`, `temperature` and `threshold` where they
            are known.
    """
    single = [place for place, line in enumerate(lines) if len(line["right"]) == 1]
    several = [place for place, line in enumerate(lines) if len(line["right"]) > 1]
    groups = []
    for places, metrics in ((single, _single_metrics), (several, _several_metrics)):
        if places:
            subset = [lines[place] for place in places]
            groups += [at_items(group, places) for group in metrics(subset, config)]
    return groups


def _single_metrics(lines: Lines, config: Mapping[str, Any]) -> list[MetricGroup]:
    length, less = config["length"], config["less_text_only"]
    right = [line["right"][0] for line in lines]

    def credits(name: str, length: str = length) -> Array:
        return _shares(lines, name, length, less)

    main_N = credits(MAIN)
    size_N = np.array([len(line["options"]) for line in lines])
    overall = {"overall": np.ones(len(lines), np.bool_)}
    masks = _masks(lines)
    kinds = [line.get("kind") or "other" for line in lines]
    of_kind = {name: np.array([kind == name for kind in kinds]) for name in sorted(set(kinds))}
    unanswered_N = np.array([float(None in line["scores"][MAIN]["scores"]) for line in lines])
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
        _shuffle_metrics(lines, main_N, length),
        masked_means("unanswered", unanswered_N, overall),
        *_calibration(lines, main_N, config),
    ]
    if any(line["scores"][MAIN].get("tokens") for line in lines):
        groups += [
            masked_means(ACCURACY, credits(MAIN, each), overall, f"length: {each}")
            for each in LENGTHS
        ]
    for name in BASELINES:
        if name in lines[0]:
            credit_N = np.array([line[name] for line in lines], np.float64)
            groups.append(masked_means(ACCURACY, credit_N, overall, f"baseline: {name}"))
    return groups


def _shares(lines: Lines, name: str, length: str, less: bool) -> Array:
    return np.array(
        [share_of_right(final_scores(line, name, length, less), line["right"]) for line in lines]
    )


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


def _shuffle_metrics(lines: Lines, main_N: Array, length: str) -> MetricGroup:
    """Return the accuracy and the agreement over orders of the options. Scores with the mean image
    are of one order, so they are not subtracted here.
    """
    credit_N = main_N.copy()
    agree_N = np.ones(len(lines))
    for place, line in enumerate(lines):
        shuffled = line.get("shuffled", [])
        if shuffled:
            every = [normalized_scores(entry, length) for entry in shuffled]
            credit_N[place] = np.mean([share_of_right(s, line["right"]) for s in every])
            every.append(normalized_scores(line["scores"][MAIN], length))
            answers = {int(np.argmax(np.nan_to_num(s, nan=-np.inf))) for s in every}
            agree_N[place] = float(len(answers) == 1)
    return mean_metrics(SHUFFLED, np.stack([credit_N, agree_N], axis=1), [ACCURACY, "agreement"])


# Calibration of the softmax over the options.


def probabilities(scores: Sequence[float], scale: float) -> Array:
    """Return the softmax (O,) of scaled scores; NaN where one has none."""
    values = scale * np.asarray(scores, np.float64)
    values = np.exp(values - values.max())
    return np.asarray(values / values.sum())


def fit_temperature(lines: Lines, config: Mapping[str, Any]) -> float | None:
    """Return the temperature of the lowest negative log-likelihood of the right options of
    validation questions with one; None without such questions.
    """
    answered = [
        (scores, line["right"][0])
        for line in lines
        if len(line["right"]) == 1
        and not np.isnan(
            scores := final_scores(line, MAIN, config["length"], config["less_text_only"])
        ).any()
    ]
    if not answered:
        return None

    def loss(log_temperature: float) -> float:
        scale = config["scale"] / math.exp(log_temperature)
        chances = [probabilities(scores, scale)[place] for scores, place in answered]
        return -float(np.log(np.maximum(chances, 1e-300)).mean())

    return math.exp(float(minimize_scalar(loss, bounds=_TEMPERATURES, method="bounded").x))


def _calibration(lines: Lines, main_N: Array, config: Mapping[str, Any]) -> list[MetricGroup]:
    """Return calibration error and Brier score, as scored and with the fitted temperature."""
    scale = config.get("scale", 1.0)
    scales = {"": scale}
    if config.get("temperature") is not None:
        scales[SCALED] = scale / config["temperature"]
    scores = [
        final_scores(line, MAIN, config["length"], config["less_text_only"]) for line in lines
    ]
    groups = []
    for subgroup, factor in scales.items():
        every = [probabilities(each, factor) for each in scores]
        brier_N = np.array(
            [
                ((chance_O - (np.arange(len(chance_O)) == line["right"][0])) ** 2).sum()
                for chance_O, line in zip(every, lines, strict=True)
            ]
        )
        highest_N = np.array([chance_O.max() for chance_O in every])
        overall = ["overall"]
        groups.append(_calibration_error(highest_N, main_N, subgroup))
        groups.append(mean_metrics(BRIER, brier_N[:, None], overall, subgroup=subgroup))
    return groups


def _calibration_error(chance_N: Array, right_N: Array, subgroup: str) -> MetricGroup:
    """Return the expected calibration error of the highest probability of each question."""
    known_N = ~np.isnan(chance_N)
    filled_N = np.where(known_N, chance_N, 0.0)
    bin_N = np.minimum((filled_N * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    gap_NB = np.zeros((len(chance_N), ECE_BINS))
    gap_NB[np.arange(len(chance_N)), bin_N] = np.where(known_N, filled_N - right_N, 0.0)

    def statistic(counts_NR: Array) -> Array:
        items_R = known_N @ counts_NR
        gaps_R = np.abs(gap_NB.T @ counts_NR).sum(axis=0)
        return np.where(items_R > 0, gaps_R / np.maximum(items_R, 1), np.nan)[:, None]

    n = int(known_N.sum())
    return MetricGroup([MetricRow(metric=ECE, target="overall", subgroup=subgroup, n=n)], statistic)


# Questions with several right options.


def _several_metrics(lines: Lines, config: Mapping[str, Any]) -> list[MetricGroup]:
    length, less = config["length"], config["less_text_only"]
    groups = []
    for name in [MAIN, *(each for each in CONTROLS if each in lines[0]["scores"])]:
        columns = {
            "exact_count": _shares(lines, name, length, less),
            "option_auroc": np.array([
                _share_of_pairs(final_scores(line, name, length, less), line["right"])
                for line in lines
            ]),
        }  # fmt: skip
        if config.get("threshold") is not None:
            selections = [
                relative_scores(final_scores(line, name, length, less)) >= config["threshold"]
                for line in lines
            ]
            columns |= _set_scores(selections, lines)
        values_NK = np.stack(list(columns.values()), axis=1)
        subgroup = "" if name == MAIN else control_of(name)
        groups.append(mean_metrics(SEVERAL, values_NK, list(columns), subgroup=subgroup))
    return groups


def _share_of_pairs(scores: Sequence[float], right: Sequence[int]) -> float:
    """Return the share of pairs of a right and a wrong option that the scores order; NaN without a
    wrong one, 0 where an option has no score.
    """
    values = np.asarray(scores, np.float64)
    is_right = np.isin(np.arange(len(values)), right)
    if is_right.all():
        return float("nan")
    margins = values[is_right][:, None] - values[~is_right]
    return float(((margins > 0) + (margins == 0) / 2).mean())


def relative_scores(scores: Sequence[float]) -> Array:
    """Return the scores (O,) of a question less their mean."""
    values = np.asarray(scores, np.float64)
    return np.asarray(values - values.mean())


def _set_scores(chosen: Sequence[NDArray[np.bool_]], lines: Lines) -> dict[str, Array]:
    """Return whether the chosen options are the right ones, and the F1 of each question."""
    exact, f1 = [], []
    for chosen_O, line in zip(chosen, lines, strict=True):
        is_right = np.isin(np.arange(len(chosen_O)), line["right"])
        exact.append(float((chosen_O == is_right).all()))
        f1.append(2 * float((chosen_O & is_right).sum()) / float(chosen_O.sum() + is_right.sum()))
    return {"exact": np.array(exact), "f1": np.array(f1)}


def choose_option_threshold(lines: Lines, config: Mapping[str, Any]) -> float | None:
    """Return the threshold of relative scores with most exact matches of validation questions with
    several right options, then with the highest F1; None without such questions.
    """
    several = [line for line in lines if len(line["right"]) > 1]
    scores = [
        relative_scores(final_scores(line, MAIN, config["length"], config["less_text_only"]))
        for line in several
    ]
    known = np.unique(np.concatenate(scores)) if scores else np.empty(0)
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    middles = (known[1:] + known[:-1]) / 2 if len(known) > 1 else known
    candidates_C = np.unique(np.quantile(middles, np.linspace(0, 1, _CANDIDATES)))
    metrics = [
        _set_scores([each >= candidate for each in scores], several) for candidate in candidates_C
    ]
    means = [(one["exact"].mean(), one["f1"].mean()) for one in metrics]
    return float(candidates_C[max(range(len(means)), key=lambda place: means[place])])
