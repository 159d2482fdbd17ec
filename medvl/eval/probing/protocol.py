"""Linear probe of an image encoder at 1, 10 and 100 % of the labels.

Protocol "linear_probe", version 1:

* Features are the pooled vectors of the frozen encoder in eval mode, with its inference transform.
  `details["note"]` says where the system trained layers above a frozen encoder only, which are not
  part of the features.
* They are standardised by mean and standard deviation over all training images.
* One logistic regression per label, solved by L-BFGS until every entry of the gradient is at most
  1e-4. The penalty is the one of a fixed list with the best mean AUROC on all validation images.
* A fraction of the labels is a fraction of the training patients, sampled once per seed; the
  samples of one seed are nested (`medvl.data.loading.sources.label_fraction`). The full set has one
  run. A label with only positives or only negatives in a sample is scored 0.5 everywhere, so that
  its AUROC is 0.5.
* "auroc@10%" is the mean over the runs at 10 %, "auroc_sd@10%" their standard deviation; likewise
  average precision.
* Rows without a fraction belong to the first run of the largest fraction: calibration, yes/no
  metrics at thresholds chosen on validation images, subgroups and their gaps.
* Labels that are neither 1 nor 0 are converted by one named policy for fitting, selection and
  evaluation.
* Training, validation and test share no patient. Intervals: test patients are resampled; all rows
  share the resamples.

Shape letters: S runs, N images, L classes, R resamples.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medvl.common.label_names import match_labels, named_as, renamed_labels
from medvl.data.loading.sources import label_fraction
from medvl.data.splits import check_disjoint
from medvl.errors import EvaluationError, SplitError
from medvl.eval.classification import scored_images as scoring
from medvl.eval.classification.scored_images import (
    NO_FINDING,
    BootstrapUnit,
    ClassificationResult,
    LabelPolicy,
    ScoredImages,
    ThresholdRule,
)
from medvl.eval.core.metric_rows import MetricGroup, ranking_metrics
from medvl.eval.core.metrics import Array, bootstrap_auroc
from medvl.eval.core.results import format_table
from medvl.eval.probing.features import (
    FeatureTable,
    LinearProbe,
    ProbedEncoder,
    Standardizer,
    fit_path,
)
from medvl.schema import Batch

PROTOCOL = "linear_probe"
PROTOCOL_VERSION = 1
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult(ClassificationResult):
    """Results of a linear probe; images, scores and thresholds are of the first run of the
    largest fraction.
    """

    fractions: tuple[float, ...]

    def table(self) -> str:
        """Return the AUROC of every label by fraction as plain text."""
        metrics = [f"auroc{suffix(fraction)}" for fraction in self.fractions]
        table = format_table([row for row in self.results.rows if row.metric in metrics])
        return "\n\n".join([table, *scoring.notes_on_means(self.results.details)])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRun:
    """A probe fitted to one sample of the labels."""

    fraction: float
    probe: LinearProbe
    scores_NL: Array
    """Probabilities of the test images."""
    details: Mapping[str, Any]


class ChosenProbe(NamedTuple):
    """A probe, its penalty, and the mean AUROC on the validation images that it was chosen by."""

    probe: LinearProbe
    penalty: float
    auroc: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """Standardised features and labels of the three sets."""

    names: tuple[str, ...]
    train: FeatureTable
    x_ND: Tensor
    y_NL: Array
    valid_x_ND: Tensor
    valid_y_NL: Array
    test_x_ND: Tensor


def suffix(fraction: float) -> str:
    """Return the suffix of a metric at a fraction of the labels: "@1%", "@10%", "@100%"."""
    return f"@{100 * fraction:g}%"


def linear_probe(
    train: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    *,
    fractions: Sequence[float] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    penalties: Sequence[float] = PENALTIES,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    smallest_class: int = 1,
    inputs: Mapping[str, str | None] | None = None,
) -> ProbeResult:
    """Fit and evaluate linear probes by the protocol of this module.

    Args:
        train, valid, test: features of one encoder for different patients.
        fractions: fractions of the training patients whose labels are used, each in (0, 1].
        seeds: runs per fraction below 1.
        penalties: candidate penalties. policy, threshold_rule, bootstrap_unit, resamples, seed,
            smallest_subgroup, smallest_class: as in `zero_shot`.
        inputs: further hashes for `Results.inputs`, such as that of the encoder.

    Raises:
        EvaluationError: no label can be evaluated, or fractions, seeds or penalties are empty or
            out of range.
        SplitError: two of the sets share a patient, or validation or test images are synthetic.
    """
    scoring.check_bootstrap_unit(bootstrap_unit)
    policy = policy or LabelPolicy()
    config = {
        "fractions": sorted(fractions),
        "seeds": seeds,
        "penalties": sorted(penalties),
        "policy": dataclasses.asdict(policy),
        "threshold_rule": threshold_rule,
        "bootstrap_unit": bootstrap_unit,
        "resamples": resamples,
        "seed": seed,
        "smallest_subgroup": smallest_subgroup,
    }
    data, scored = _prepare(train, valid, test, policy)
    runs = _fit_all(data, fractions, seeds, penalties)
    main = next(run for run in runs if run.fraction == max(fractions))
    images, on_valid = _with_scores(main, data, scored)
    images = dataclasses.replace(images, smallest_class=smallest_class)
    thresholds = scoring.choose_thresholds(on_valid, images, threshold_rule)
    noted = {"note": train.note} if train.note else {}
    groups = scoring.ranking_groups(images) + scoring.decision_groups(
        images, thresholds, probabilities=True
    )
    results = scoring.evaluate_scores(
        images,
        groups + _fraction_metrics(runs, images),
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config=config,
        inputs={**fingerprints(train, valid, test), **(inputs or {})},
        details={
            "runs": [run.details for run in runs],
            "feature_dim": train.x_ND.shape[1],
            **noted,
        },
    )
    return ProbeResult(
        results=results, images=images, thresholds=thresholds, fractions=tuple(sorted(fractions))
    )


def labelled_images(
    train: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    policy: LabelPolicy,
    *,
    user: str = "the linear probe",
) -> dict[str, ScoredImages]:
    """Return the images of "train", "valid" and "test" with their common labels, and with scores
    of zero.

    Args:
        train, valid, test: features of one encoder for different patients.
        policy: conversion of labels that are neither 1 nor 0.
        user: name of the evaluation, for errors.

    Raises EvaluationError where no label is common, SplitError as `linear_probe`.
    """
    check_disjoint(
        {"train": train.patients, "validation": valid.patients, "test": test.patients}, user
    )
    label_of = {part: match_labels(test.label_names, table.label_names) for part, table in
                (("train", train), ("valid", valid), ("test", test))}  # fmt: skip
    names = tuple(
        name for name in test.label_names if name in label_of["train"] and name in label_of["valid"]
    )
    lacking = [name for name in test.label_names if name not in names]
    if not names:
        message = "expected labels in common to training, validation and test data, got none"
        raise EvaluationError(message, "mismatch", field="labels")
    scored = {}
    for part, table in (("train", train), ("valid", valid), ("test", test)):
        if part != "train" and any(sample.extra.get("synthetic") for sample in table.samples):
            raise SplitError(
                f"the {part} images of {user} are synthetic; give real ones",
                "synthetic",
                field=part,
            )
        label_names = named_as(table.label_names, test.label_names)
        resolved = policy.resolve(table.labels_NL, label_names)
        scored[part] = ScoredImages(
            names=names,
            scores_NL=np.zeros((len(table.samples), len(names))),
            labels_NL=resolved.labels_NL[:, [label_names.index(name) for name in names]],
            samples=table.samples,
            positions=table.positions,
            counts={
                **scoring.image_counts(table.samples, table.unreadable, resolved, names),
                "labels_without_classes": lacking,
                "renamed_labels": renamed_labels(label_of["train"]),
            },
        )
    return scored


def _prepare(
    train: FeatureTable, valid: FeatureTable, test: FeatureTable, policy: LabelPolicy
) -> tuple[_Data, dict[str, ScoredImages]]:
    """Return the data of the three sets for their common labels, and their images with scores of
    zero.
    """
    scored = labelled_images(train, valid, test, policy)
    standardize = Standardizer.fit(train.x_ND)
    data = _Data(
        names=scored["test"].names,
        train=train,
        x_ND=standardize(train.x_ND),
        y_NL=scored["train"].labels_NL,
        valid_x_ND=standardize(valid.x_ND),
        valid_y_NL=scored["valid"].labels_NL,
        test_x_ND=standardize(test.x_ND),
    )
    return data, scored


def _fit_all(
    data: _Data, fractions: Sequence[float], seeds: int, penalties: Sequence[float]
) -> list[ProbeRun]:
    if not fractions or seeds < 1 or not penalties or min(penalties) <= 0:
        raise EvaluationError(
            f"expected fractions, seeds >= 1 and penalties > 0, got {list(fractions)}, {seeds} "
            f"and {list(penalties)}",
            "out_of_range",
            field="fractions" if not fractions else "seeds" if seeds < 1 else "penalties",
        )
    return [
        _fit(data, fraction, number, penalties)
        for fraction in sorted(fractions)
        for number in range(seeds if fraction < 1 else 1)
    ]


def _fit(data: _Data, fraction: float, number: int, penalties: Sequence[float]) -> ProbeRun:
    sampled = label_fraction(data.train.patients, fraction, number)
    y_NL = data.y_NL[sampled]
    choice = choose_probe(data.x_ND[sampled], y_NL, data.valid_x_ND, data.valid_y_NL, penalties)
    both_L = (y_NL == 1).any(axis=0) & (y_NL == 0).any(axis=0)
    details = {
        "fraction": fraction,
        "seed": number,
        "images": len(sampled),
        "patients": len({data.train.patients[position] for position in sampled.tolist()}),
        "penalty": choice.penalty,
        "validation_auroc": choice.auroc,
        "converged": choice.probe.converged,
        "one_class_only": [name for name, both in zip(data.names, both_L, strict=True) if not both],
    }
    scores_NL = choice.probe.probability_NL(data.test_x_ND)
    return ProbeRun(fraction=fraction, probe=choice.probe, scores_NL=scores_NL, details=details)


def fingerprints(
    train: FeatureTable, valid: FeatureTable, test: FeatureTable
) -> dict[str, str | None]:
    """Return the fingerprints of the three sets, for `Results.inputs`."""
    return {
        "manifest": test.fingerprint,
        "train_manifest": train.fingerprint,
        "validation_manifest": valid.fingerprint,
    }


def _with_scores(
    run: ProbeRun, data: _Data, scored: Mapping[str, ScoredImages]
) -> tuple[ScoredImages, ScoredImages]:
    on_valid_NL = run.probe.probability_NL(data.valid_x_ND)
    test = scored["test"]
    valid = scored["valid"]
    return dataclasses.replace(test, scores_NL=run.scores_NL), dataclasses.replace(
        valid, scores_NL=on_valid_NL
    )


def choose_probe(
    x_ND: Tensor,
    y_NL: Array,
    valid_x_ND: Tensor,
    valid_y_NL: Array,
    penalties: Sequence[float] = PENALTIES,
) -> ChosenProbe:
    """Fit probes to standardised features with several penalties; return the one with the best mean
    validation AUROC.

    Raises EvaluationError if no label has positives and negatives among the validation images.
    """
    probes = fit_path(x_ND, y_NL, penalties)
    auroc = {
        penalty: mean_auroc(probe.probability_NL(valid_x_ND), valid_y_NL)
        for penalty, probe in probes.items()
    }
    # the largest penalty among equals: it was fitted first
    best = max(auroc, key=auroc.__getitem__)
    return ChosenProbe(probes[best], best, auroc[best])


def mean_auroc(scores_NL: Array, y_NL: Array) -> float:
    """Return the mean AUROC over the labels with positives and negatives.

    Raises EvaluationError if there is no such label among these validation images.
    """
    auroc_L, _, _ = bootstrap_auroc(scores_NL, y_NL, resamples=0)
    if np.isnan(auroc_L).all():
        message = (
            "expected validation images with positives and negatives of a label to choose "
            "settings by, got none"
        )
        raise EvaluationError(message, "empty", field="valid")
    return float(np.nanmean(auroc_L))


def _fraction_metrics(runs: Sequence[ProbeRun], images: ScoredImages) -> list[MetricGroup]:
    by_fraction: dict[float, list[ProbeRun]] = {}
    for run in runs:
        by_fraction.setdefault(run.fraction, []).append(run)
    return [
        over_runs(
            metric,
            [run.scores_NL for run in of_fraction],
            images.labels_NL,
            images.names,
            suffix(fraction),
            means=images.means,
        )
        for fraction, of_fraction in by_fraction.items()
        for metric in ("auroc", "average_precision")
    ]


def over_runs(
    metric: str,
    scores: Sequence[Array],
    labels_NL: Array,
    names: Sequence[str],
    ending: str,
    *,
    means: Mapping[str, Sequence[str]],
) -> MetricGroup:
    """Return the mean of a metric over the scores (N, L) of one or more runs, and their standard
    deviation as `METRIC_sd`. `means` as of `ranking_metrics`.
    """
    by_run = [
        ranking_metrics(metric, scores_NL, labels_NL, names, means=means) for scores_NL in scores
    ]
    rows = [dataclasses.replace(row, metric=f"{metric}{ending}") for row in by_run[0].rows]
    if len(scores) > 1:
        rows += [dataclasses.replace(row, metric=f"{metric}_sd{ending}") for row in by_run[0].rows]

    def statistic(counts_NR: Array) -> Array:
        values_SRK = np.stack([group.statistic(counts_NR) for group in by_run])
        if len(scores) == 1:
            return values_SRK[0]
        return np.concatenate([values_SRK.mean(axis=0), values_SRK.std(axis=0, ddof=1)], axis=1)

    return MetricGroup(rows, statistic)


# Ordinal AUCs of severity: a graded finding as one label for each step of its scale.
#
# Of the levels none, mild, moderate and severe these are "severity >= mild", "severity >=
# moderate" and "severity >= severe", as in the evaluation of pulmonary edema by Liao et al.
# (MICCAI 2021, arXiv 2103.04537): 0 against 1, 2 and 3; 0 and 1 against 2 and 3; 0, 1 and 2
# against 3. Their mean is the row "macro".


def parse_levels(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the column and the levels of "COLUMN=LEVEL,LEVEL,...", lowest first.

    Raises EvaluationError if there are fewer than two levels, or one twice.
    """
    column, _, listed = text.partition("=")
    levels = tuple(level.strip() for level in listed.split(","))
    if not column or len(levels) < 2 or len(set(levels)) < len(levels) or not all(levels):
        message = (
            f"expected COLUMN=LEVEL,LEVEL,... with two levels or more, lowest first, got {text!r}"
        )
        raise EvaluationError(message, "malformed", field="levels")
    return column, levels


def ordinal_table(table: FeatureTable, column: str, levels: Sequence[str]) -> FeatureTable:
    """Return a table whose labels are the steps of a scale, "COLUMN >= LEVEL" for every level but
    the lowest.

    Args:
        table: features with a label `COLUMN=LEVEL` for each level (`medvl shards table
            --category-column`).
        column: name of the column.
        levels: its values, lowest first. Images that have none of them, or several, are left out.

    Raises EvaluationError where a level is not a label of the table, or no image is left.
    """
    names = [f"{column}={level}" for level in levels]
    known = [name for name in table.label_names if name.startswith(f"{column}=")]
    missing = [name for name in names if name not in known]
    if missing:
        message = (
            f"expected the labels {', '.join(names)} in the shards, got "
            f"{', '.join(known) or 'none of them'}"
        )
        raise EvaluationError(
            f"{message}; name the levels as in the table", "unknown_name", field="levels"
        )
    is_level_NV = table.labels_NL[:, [table.label_names.index(name) for name in names]] == 1
    graded_M = np.flatnonzero(is_level_NV.sum(axis=1) == 1)
    if not len(graded_M):
        raise EvaluationError(
            f"no image has one of the labels {', '.join(names)}", "empty", field="levels"
        )
    labels_ML = is_level_NV[graded_M].argmax(axis=1)[:, None] >= np.arange(1, len(levels))
    return dataclasses.replace(
        table,
        x_ND=table.x_ND[torch.from_numpy(graded_M)],
        labels_NL=labels_ML.astype(table.labels_NL.dtype),
        label_names=tuple(f"{column} >= {level}" for level in levels[1:]),
        samples=tuple(table.samples[row] for row in graded_M),
        positions=tuple(table.positions[row] for row in graded_M),
    )


# A linear probe as a classifier: fitted once to a frozen image encoder, then applied to any images.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedProbe:
    """One logistic regression per finding on the features of a frozen image encoder.

    Attributes:
        encoder: the encoder.
        names: findings with positives and negatives among the training images, without No Finding.
        patients: split -> patients that the probe was fitted to, or its penalty chosen on.
        manifests: split -> fingerprint of its shards.
        penalty: the chosen penalty.
    """

    encoder: ProbedEncoder
    names: tuple[str, ...]
    standardizer: Standardizer
    probe: LinearProbe
    patients: Mapping[str, frozenset[str]]
    manifests: Mapping[str, str | None]
    penalty: float

    @classmethod
    def fit(
        cls,
        encoder: ProbedEncoder,
        train: FeatureTable,
        valid: FeatureTable,
        *,
        policy: LabelPolicy | None = None,
        penalties: Sequence[float] = PENALTIES,
    ) -> "FittedProbe":
        """Fit a probe to all labels, as the protocol "linear_probe" does at 100 %
        (`medvl.eval.linear_probe`).

        Args:
            encoder: the encoder of the features.
            train, valid: features of different patients.
            policy: conversion of labels that are neither 1 nor 0.
            penalties: candidate penalties; the one with the best mean AUROC on the validation
                images is taken, over `names`, while `linear_probe` leaves out findings without
                labels in the test data.

        Raises:
            EvaluationError: no finding has positives and negatives in both sets.
            SplitError: the sets share a patient.
        """
        patients = {"train": frozenset(train.patients), "validation": frozenset(valid.patients)}
        check_disjoint(patients, "the linear probe")
        policy = policy or LabelPolicy()
        labels = {"train": _labels(train, policy), "validation": _labels(valid, policy)}
        names = tuple(
            name
            for name in train.label_names
            if name in valid.label_names
            and name != NO_FINDING
            and {0.0, 1.0} <= set(labels["train"][name])
        )
        if not names:
            message = (
                "expected a finding with positives and negatives among the probe's "
                "training images, got none"
            )
            raise EvaluationError(message, "empty", field="probe_train")
        standardizer = Standardizer.fit(train.x_ND)
        y_NL, valid_y_NL = (
            np.stack([labels[part][name] for name in names], axis=1) for part in labels
        )
        choice = choose_probe(
            standardizer(train.x_ND), y_NL, standardizer(valid.x_ND), valid_y_NL, penalties
        )
        return cls(
            encoder=encoder,
            names=names,
            standardizer=standardizer,
            probe=choice.probe,
            patients=patients,
            manifests={"train": train.fingerprint, "validation": valid.fingerprint},
            penalty=choice.penalty,
        )

    def probabilities(self, batch: Batch) -> Tensor:
        """Return (B, L): float64 probabilities of a batch's images on the CPU, columns as in
        `names`.
        """
        features = self.encoder.module(batch.pixels.to(self.encoder.device, non_blocking=True))
        return torch.from_numpy(
            self.probe.probability_NL(self.standardizer(features.pooled_BD.float().cpu()))
        )


def _labels(table: FeatureTable, policy: LabelPolicy) -> dict[str, np.ndarray]:
    """Return finding -> labels of 1, 0 or NaN."""
    resolved_NL = policy.resolve(table.labels_NL, table.label_names).labels_NL
    return dict(zip(table.label_names, resolved_NL.T, strict=True))
