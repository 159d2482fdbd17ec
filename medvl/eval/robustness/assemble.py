"""Metrics of all tests, from the scores of a model.

Letters: N images of the data, T items (images of the data, then of the sites, then other images), L
findings.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.eval.classification.scored_images import NO_FINDING, LabelPolicy, few_patients
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    calibration_metrics,
    mean_metrics,
    ranking_metrics,
    subgroup_masks,
    subgroup_metrics,
    subgroups_of,
)
from medvl.eval.core.metrics import (
    Array,
    RankedColumn,
    defined_labels,
    mean_over_labels,
    ranked_columns,
)
from medvl.eval.robustness.image_versions import Version
from medvl.eval.robustness.scorers import Scores
from medvl.eval.zero_shot_classification.calibration import Calibration

# Metric groups of the robustness tests; `medvl.eval.robustness.protocol` defines the metrics.
#
# Letters: N items, R resamples, L findings, K prompt sets.

Value = Callable[[Array], Array]
"""Function from counts_NR to values_R."""
ALL = "all corruptions"


def macro_auroc(scores_NL: Array, labels_NL: Array) -> Value:
    """Return the mean over findings of the AUROC; items without labels are left out."""
    columns = ranked_columns(np.where(np.isnan(labels_NL), 0.0, scores_NL), labels_NL)

    def of_findings(counts_NR: Array) -> Array:
        return np.stack([column.auroc_R(counts_NR) for column in columns], axis=1)

    fixed_L = defined_labels(of_findings, len(labels_NL))
    return lambda counts_NR: mean_over_labels(of_findings(counts_NR), fixed_L)


def share(values_N: Array) -> Value:
    """Return the mean over items, NaN items left out."""
    group = mean_metrics("", values_N[:, None], [""])
    return lambda counts_NR: group.statistic(counts_NR)[:, 0]


def corruption_metrics(
    metric: str, target: str, n: int, clean: Value, versions: Mapping[Version, Value]
) -> MetricGroup:
    """Return a metric under every version, its means over strengths and over all, and paired
    changes from clean.
    """
    names = list(dict.fromkeys(version.name for version in versions))
    numbers = {
        name: [at for at, version in enumerate(versions) if version.name == name] for name in names
    }
    subgroups = [*map(str, versions), *names, ALL]
    rows = [
        MetricRow(metric=kind, target=target, subgroup=subgroup, n=n)
        for kind in (metric, f"{metric}_change")
        for subgroup in subgroups
    ]

    def statistic(counts_NR: Array) -> Array:
        values_RV = np.stack([value(counts_NR) for value in versions.values()], axis=1)
        means_RC = np.stack([values_RV[:, numbers[name]].mean(axis=1) for name in names], axis=1)
        all_RK = np.concatenate([values_RV, means_RC, means_RC.mean(axis=1, keepdims=True)], axis=1)
        return np.concatenate([all_RK, all_RK - clean(counts_NR)[:, None]], axis=1)

    return MetricGroup(rows, statistic)


def prompt_metrics(kind: str, values: Mapping[str, Value], n: int, items: int) -> MetricGroup:
    """Return the macro AUROC of every prompt set and, of two or more, the widest gap and the
    standard deviation.

    The two sets of the gap are chosen on all items and kept in the resamples. `n` items of all
    `items` count.
    """

    def row(metric: str, subgroup: str) -> MetricRow:
        return MetricRow(metric=metric, target="macro", subgroup=f"{kind}: {subgroup}", n=n)

    def table(counts_NR: Array) -> Array:
        return np.stack([value(counts_NR) for value in values.values()], axis=1)

    rows = [row("auroc", name) for name in values]
    if len(values) < 2:
        return MetricGroup(rows, table)
    names = list(values)
    once_K = table(np.ones((items, 1)))[0]
    best = int(np.argmax(once_K))
    worst = int(np.argmin(once_K))
    rows += [
        row("auroc_gap", f"{names[best]} - {names[worst]}"),
        row("auroc_sd", f"{len(names)} sets"),
    ]

    def statistic(counts_NR: Array) -> Array:
        values_RK = table(counts_NR)
        gap_R1 = (values_RK[:, best] - values_RK[:, worst])[:, None]
        return np.concatenate(
            [values_RK, gap_R1, values_RK.std(axis=1, ddof=1, keepdims=True)], axis=1
        )

    return MetricGroup(rows, statistic)


def negation_metrics(statements_NL2: Array, labels_NL: Array, names: Sequence[str]) -> MetricGroup:
    """Return how often an image of a finding prefers the statement, and one without it the denial.

    Args:
        statements_NL2: score of each statement and its denial.
        labels_NL: 1, 0 or NaN (left out); each column has both.
        names: findings.
    """
    above_NL = (np.sign(statements_NL2[:, :, 0] - statements_NL2[:, :, 1]) + 1) / 2
    present, absent = (
        mean_metrics("", np.where(labels_NL == label, right_NL, np.nan), names)
        for label, right_NL in ((1, above_NL), (0, 1 - above_NL))
    )
    known_N = (~np.isnan(labels_NL)).any(axis=1)
    all_L = np.ones(len(names), dtype=np.bool_)
    rows = [
        MetricRow(metric="negation", target=name, n=first.n + second.n, n_positive=first.n)
        for name, first, second in zip(names, present.rows, absent.rows, strict=True)
    ]
    rows += [
        MetricRow(metric=metric, target="macro", n=int(known_N.sum()))
        for metric in ("negation", "negation_present", "negation_absent")
    ]

    def statistic(counts_NR: Array) -> Array:
        present_RL = present.statistic(counts_NR)
        absent_RL = absent.statistic(counts_NR)
        both_RL = (present_RL + absent_RL) / 2
        means = [
            mean_over_labels(values_RL, all_L)[:, None]
            for values_RL in (both_RL, present_RL, absent_RL)
        ]
        return np.concatenate([both_RL, *means], axis=1)

    return MetricGroup(rows, statistic)


def outside_metrics(name: str, inside_N: Array, outside_N: Array) -> MetricGroup:
    """Return how often an image of the data has more confidence than one of another kind, and the
    latter's mean.

    An item may have both values, of an image and of a version of it; NaN: it has none.
    """
    scores = np.concatenate([inside_N, outside_N])
    labels = np.repeat([1.0, 0.0], len(inside_N))
    column = RankedColumn(np.nan_to_num(scores), np.where(np.isnan(scores), np.nan, labels))
    means = mean_metrics("confidence", outside_N[:, None], ["all"], subgroup=name)
    row = MetricRow(metric="ood_auroc", target="all", subgroup=name, n=means.rows[0].n)

    def statistic(counts_NR: Array) -> Array:
        auroc_R = column.auroc_R(np.concatenate([counts_NR, counts_NR]))
        return np.concatenate([auroc_R[:, None], means.statistic(counts_NR)], axis=1)

    return MetricGroup([row, *means.rows], statistic)


DATA = "these data"
"""Name of the evaluated data among the sites."""
_CLEAN = "clean"
_OWN, _OTHER, _MIRROR = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tests:
    """Metric groups over all items, with the patient of each item."""

    groups: list[MetricGroup]
    patients: list[str]
    details: dict[str, Any]


def assemble(
    scores: Scores,
    policy: LabelPolicy,
    smallest: int,
    calibration: Calibration | None,
    smallest_class: int = 1,
) -> Tests:
    """Return the metrics of all tests that the model and the data allow; settings as in
    `RobustnessSettings`.
    """
    clean = scores.clean
    others = [*(images for _, images in scores.sites.values()), *scores.outside.values()]
    patients = [*clean.patients, *(patient for images in others for patient in images.patients)]
    resolved = policy.resolve(clean.labels_NL, scores.label_names)
    labelled = [
        name
        for name in scores.scorer.statements or scores.scorer.names
        if name in scores.label_names
    ]
    names = list(scores.scorer.names) or labelled
    columns = [scores.label_names.index(name) for name in names]
    labels_TL = _padded(resolved.labels_NL[:, columns], len(patients))
    fewest_L = np.minimum((labels_TL == 1).sum(axis=0), (labels_TL == 0).sum(axis=0))
    evaluable = np.flatnonzero(fewest_L >= max(smallest_class, 1)).tolist()
    kept = _Kept(scores, names, labels_TL, evaluable, len(patients))
    groups: list[MetricGroup] = []
    details: dict[str, Any] = {
        "images": len(clean.samples),
        "patients": len(set(clean.patients)),
        "unreadable": dict(clean.unreadable),
        "left_out": dict(scores.left_out),
        "not_scored": {name: list(sets) for name, sets in scores.scorer.not_scored.items()},
        "not_evaluable": [name for index, name in enumerate(names) if index not in evaluable],
        "means": {"macro": [names[index] for index in evaluable]},
        "left_out_of_means": _left_out_of_means(scores, names, evaluable, smallest_class),
        "few_patients": few_patients(
            [names[index] for index in evaluable], labels_TL[:, evaluable], patients
        ),
        "sites": {name: len(images.samples) for name, (_, images) in scores.sites.items()},
        "outside": {name: len(images.samples) for name, images in scores.outside.items()},
    }
    if "findings" in clean.values and evaluable:
        groups += [*_ranking(kept), *_calibration(kept, calibration), *_prompts(kept)]
        of_groups, details["labels_in_subgroup_mean"] = _subgroups(kept, policy, smallest)
        groups += of_groups
    if "statements" in clean.values and evaluable:
        groups.append(_negation(kept))
    if "texts" in clean.values:
        groups += _texts(kept)
    return Tests(groups=[*groups, *_outside(kept)], patients=patients, details=details)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """Scores with the labels of all items, NaN beyond the images of the data."""

    scores: Scores
    names: list[str]
    labels_TL: Array
    evaluable: list[int]
    """Columns with both classes."""
    items: int

    def value(self, name: str) -> Array:
        """Return a value of the clean images for all items."""
        return _padded(self.scores.clean.values[name], self.items)

    @property
    def images(self) -> int:
        """Number of images with a label of 1 or 0."""
        return int((~np.isnan(self.labels_TL[:, self.evaluable])).any(axis=1).sum())

    def macro(self, scores_TL: Array) -> Value:
        """Return the mean AUROC over the findings with both classes."""
        return macro_auroc(scores_TL[:, self.evaluable], self.labels_TL[:, self.evaluable])


def _left_out_of_means(
    scores: Scores, names: list[str], evaluable: list[int], smallest_class: int
) -> dict[str, str]:
    """Return label -> reason why the means over findings leave it out."""
    reason = f"fewer than {max(smallest_class, 1)} positive or negative images"
    left_out = {name: reason for index, name in enumerate(names) if index not in evaluable}
    unknown = [name for name in scores.label_names if name not in names and name != NO_FINDING]
    return left_out | dict.fromkeys(unknown, "not scored by the model or all of its prompts")


def _padded(values: Array, items: int) -> Array:
    return np.concatenate([values, np.full((items - len(values), *values.shape[1:]), np.nan)])


def _ranking(kept: _Kept) -> Iterator[MetricGroup]:
    findings_TL = kept.value("findings")
    names = [kept.names[index] for index in kept.evaluable]
    scores_TL = np.nan_to_num(findings_TL)[:, kept.evaluable]
    labels_TL = kept.labels_TL[:, kept.evaluable]
    yield ranking_metrics("auroc", scores_TL, labels_TL, names, means={"macro": names})
    if kept.scores.of_versions:
        findings_NVL = kept.scores.of_versions["findings"]
        values = {
            version: kept.macro(_padded(findings_NVL[:, number], kept.items))
            for number, version in enumerate(kept.scores.versions)
        }
        yield corruption_metrics("auroc", "macro", kept.images, kept.macro(findings_TL), values)


def _calibration(kept: _Kept, calibration: Calibration | None) -> Iterator[MetricGroup]:
    if not kept.scores.scorer.probabilities:
        return
    names = [kept.names[index] for index in kept.evaluable]
    probability_TL = np.nan_to_num(kept.value("findings"))[:, kept.evaluable]
    yield calibration_metrics(probability_TL, kept.labels_TL[:, kept.evaluable], names)
    fitted = [] if calibration is None else [name for name in names if name in calibration.findings]
    if calibration is not None and fitted:
        columns = [names.index(name) for name in fitted]
        for column, name in zip(columns, fitted, strict=True):
            probability_TL[:, column] = np.vectorize(calibration.findings[name].probability)(
                probability_TL[:, column]
            )
        labels_TL = kept.labels_TL[:, [kept.evaluable[column] for column in columns]]
        group = calibration_metrics(probability_TL[:, columns], labels_TL, fitted)
        yield MetricGroup(
            [dataclasses.replace(row, subgroup="calibrated") for row in group.rows], group.statistic
        )


def _prompts(kept: _Kept) -> Iterator[MetricGroup]:
    sets = kept.scores.scorer.prompt_sets
    if not sets:
        return
    prompts_TKL = kept.value("prompts")
    named = kept.scores.scorer.named_sets
    for kind, numbers in (("prompts", range(named)), ("paraphrases", range(named, len(sets)))):
        values = {sets[number]: kept.macro(prompts_TKL[:, number]) for number in numbers}
        if values:
            yield prompt_metrics(kind, values, kept.images, kept.items)


def _subgroups(
    kept: _Kept, policy: LabelPolicy, smallest: int
) -> tuple[list[MetricGroup], dict[str, list[str]]]:
    """Return the metrics of subgroups of the data, and of the sites on the findings that all
    sites have.
    """
    scores = kept.scores
    clean = kept.scores.clean
    names = [kept.names[index] for index in kept.evaluable]
    masks = {
        attribute: {
            name: _padded(mask_N.astype(float), kept.items) == 1 for name, mask_N in groups.items()
        }
        for attribute, groups in subgroup_masks([*map(subgroups_of, clean.samples)]).items()
    }
    findings_TL = kept.value("findings")[:, kept.evaluable]
    labels_TL = kept.labels_TL[:, kept.evaluable]
    if scores.sites:
        findings_TL = findings_TL.copy()
        labels_TL = labels_TL.copy()
        masks["site"] = {DATA: np.arange(kept.items) < len(clean.samples)}
        start = len(clean.samples)
        for site, (columns, images) in scores.sites.items():
            rows = slice(start, start + len(images.samples))
            start = rows.stop
            masks["site"][site] = _between(rows, kept.items)
            findings_TL[rows] = images.values["findings"][:, kept.evaluable]
            labels_ML = policy.resolve(images.labels_NL, columns).labels_NL
            for column, name in enumerate(names):
                labels_TL[rows, column] = (
                    labels_ML[:, columns.index(name)] if name in columns else np.nan
                )
    return subgroup_metrics(np.nan_to_num(findings_TL), labels_TL, names, masks, smallest)


def _between(rows: slice, items: int) -> NDArray[np.bool_]:
    mask_T = np.zeros(items, dtype=bool)
    mask_T[rows] = True
    return mask_T


def _negation(kept: _Kept) -> MetricGroup:
    pairs = list(kept.scores.scorer.statements)
    indices = [index for index in kept.evaluable if kept.names[index] in pairs]
    statements_TS = kept.value("statements")
    statements_TL2 = statements_TS.reshape(len(statements_TS), -1, 2)
    statements_TL2 = statements_TL2[:, [pairs.index(kept.names[index]) for index in indices]]
    return negation_metrics(
        statements_TL2, kept.labels_TL[:, indices], [kept.names[index] for index in indices]
    )


def _texts(kept: _Kept) -> Iterator[MetricGroup]:
    texts_T3 = kept.value("texts")
    for name, column in (("above_other", _OTHER), ("above_mirror", _MIRROR)):
        yield mean_metrics(name, _above(texts_T3, column)[:, None], ["all"])
    if kept.scores.of_versions:
        pairs_NV2 = kept.scores.of_versions["own_and_other"]
        clean_T = _above(texts_T3, _OTHER)
        values = {
            version: share(_above(_padded(pairs_NV2[:, number], kept.items), _OTHER))
            for number, version in enumerate(kept.scores.versions)
        }
        n = int((~np.isnan(clean_T)).sum())
        yield corruption_metrics("above_other", "all", n, share(clean_T), values)


def _above(texts_TK: Array, column: int) -> Array:
    """Return 1, 1/2 or 0 where the own text scores higher, as high or lower than another one,
    NaN without one.
    """
    above_T: Array = (np.sign(texts_TK[:, _OWN] - texts_TK[:, column]) + 1) / 2
    return above_T


def _outside(kept: _Kept) -> Iterator[MetricGroup]:
    inside_T = kept.value("confidence")
    start = len(kept.scores.clean.samples)
    yield mean_metrics("confidence", inside_T[:, None], ["all"], subgroup=_CLEAN)
    for name, confidence_N in kept.scores.made_up.items():
        yield outside_metrics(name, inside_T, _padded(confidence_N, kept.items))
    start += sum(len(images.samples) for _, images in kept.scores.sites.values())
    for name, images in kept.scores.outside.items():
        outside_T = np.full(kept.items, np.nan)
        outside_T[start : start + len(images.samples)] = images.values["confidence"]
        start += len(images.samples)
        yield outside_metrics(name, inside_T, outside_T)
