"""Metrics of labelled images with a score per class, shared by zero-shot prompts, linear probes and
classifiers.

The rows are AUROC and average precision, calibration if scores are probabilities, yes/no metrics at
thresholds chosen on validation images of other patients, and subgroups with their gaps.

Shape letters: N images, L classes.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from medvl.common.config_io import check_choice
from medvl.common.label_names import named_as
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import check_disjoint_patients
from medvl.eval.core.metric_rows import (
    MetricGroup,
    calibration_metrics,
    decision_metrics,
    measure,
    ranking_metrics,
    subgroup_masks,
    subgroup_metrics,
    subgroups_of,
)
from medvl.eval.core.metrics import ECE_BINS, Array, choose_threshold
from medvl.eval.core.results import Results, format_table
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN, Sample

# Named policies for uncertain and missing labels, recorded in every result.
#
# Label tables hold 1, 0, -1 (uncertain) or NaN (not mentioned in the report). Metrics need 1, 0
# or NaN (left out). The conversion changes an AUROC by points and is therefore always explicit.

Uncertain = Literal["ignore", "zeros", "ones", "per_class"]
Missing = Literal["ignore", "negative"]
NoFinding = Literal["implied", "labelled"]

PER_CLASS: Mapping[str, int] = {
    "Atelectasis": POSITIVE,
    "Cardiomegaly": NEGATIVE,
    "Consolidation": NEGATIVE,
    "Edema": POSITIVE,
    "Pleural Effusion": POSITIVE,
}
"""Values of uncertain labels under "per_class" (as in GLoRIA and PTUnifier); other classes are
left out.
"""

NO_FINDING = "No Finding"
_NOT_A_PATHOLOGY = (NO_FINDING, "Support Devices")


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedLabels:
    """Labels for metrics, and counts of the conversion."""

    labels_NL: Array
    """1, 0 or NaN (left out)."""
    counts: Mapping[str, Mapping[str, int]]
    """Label -> counts: positive, negative, left_out (their sum is all images); uncertain,
    missing (of the table).
    """
    contradictions: int
    """Number of images labelled No Finding and with a positive pathology; their labels are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelPolicy:
    """Rules for labels that are neither 1 nor 0, applied in the order of the fields.

    Raises `EvaluationError` on an unknown name.
    """

    no_finding: NoFinding = "implied"
    """"implied" fills missing labels by logic: No Finding is 0 if a pathology is positive, and
    pathologies are 0 if No Finding is positive (Support Devices are not a pathology). "labelled"
    uses the table unchanged.
    """
    uncertain: Uncertain = "ignore"
    """"ignore" leaves the label out; "zeros", "ones", or "per_class" as in `PER_CLASS`."""
    missing: Missing = "negative"
    """A finding that is not mentioned counts as "negative", or the label is left out ("ignore")."""

    def __post_init__(self) -> None:
        for field, allowed in (
            ("no_finding", NoFinding),
            ("uncertain", Uncertain),
            ("missing", Missing),
        ):
            check_choice(getattr(self, field), get_args(allowed), field, error=EvaluationError)

    @property
    def name(self) -> str:
        """The three rules in one line, for tables and pages."""
        return (
            f"uncertain: {self.uncertain}, missing: {self.missing}, no finding: {self.no_finding}"
        )

    def resolve(self, labels_NL: ArrayLike, names: Sequence[str]) -> ResolvedLabels:
        """Convert labels of 1, 0, -1 or NaN to 1, 0 or NaN, and count the conversions per column.

        Pass all columns of the table, also those that are not evaluated: the No Finding rule reads
        them.

        Args:
            labels_NL: label table.
            names: name of each column. The rules find CheXpert's findings in any spelling.

        Raises EvaluationError if a label has another value, or names and columns do not match.
        """
        table_NL = np.array(labels_NL, dtype=np.float64)  # a copy
        if table_NL.ndim != 2 or table_NL.shape[1] != len(names):
            message = (
                f"expected one column for each of {len(names)} names, got shape {table_NL.shape}"
            )
            raise EvaluationError(message, "mismatch", field="labels")
        missing_NL = np.isnan(table_NL)
        uncertain_NL = table_NL == UNCERTAIN
        if not (missing_NL | uncertain_NL | (table_NL == POSITIVE) | (table_NL == NEGATIVE)).all():
            message = "expected labels of 1, 0, -1 (uncertain) or NaN (missing)"
            raise EvaluationError(message, "out_of_range", field="labels")

        resolved_NL = table_NL.copy()
        contradictions = 0
        known = named_as(names, FINDINGS)
        if NO_FINDING in known:
            contradictions = _imply_no_finding(
                resolved_NL, known, fill=self.no_finding == "implied"
            )
        for column, name in enumerate(known):
            resolved_NL[uncertain_NL[:, column], column] = self._value_of_uncertain(name)
        if self.missing == "negative":
            resolved_NL[missing_NL & np.isnan(resolved_NL)] = NEGATIVE
        counts = {
            name: {
                "positive": int((resolved_NL[:, column] == POSITIVE).sum()),
                "negative": int((resolved_NL[:, column] == NEGATIVE).sum()),
                "left_out": int(np.isnan(resolved_NL[:, column]).sum()),
                "uncertain": int(uncertain_NL[:, column].sum()),
                "missing": int(missing_NL[:, column].sum()),
            }
            for column, name in enumerate(names)
        }
        return ResolvedLabels(resolved_NL, counts, contradictions)

    def apply(self, labels_NL: ArrayLike, names: Sequence[str]) -> Array:
        """Return only the labels of `resolve`, as used in training."""
        return self.resolve(labels_NL, names).labels_NL

    def _value_of_uncertain(self, name: str) -> float:
        table = {
            "ignore": np.nan,
            "zeros": NEGATIVE,
            "ones": POSITIVE,
            "per_class": PER_CLASS.get(name, np.nan),
        }
        return float(table[self.uncertain])


def _imply_no_finding(labels_NL: Array, names: Sequence[str], *, fill: bool) -> int:
    """Fill labels implied by No Finding and by pathologies in place; return the number of
    contradictions.
    """
    none_N = labels_NL[:, names.index(NO_FINDING)]  # a view
    pathologies = [column for column, name in enumerate(names) if name not in _NOT_A_PATHOLOGY]
    any_N = (labels_NL[:, pathologies] == POSITIVE).any(axis=1)
    normal_N = none_N == POSITIVE
    if fill:
        none_N[np.isnan(none_N) & any_N] = NEGATIVE
        for column in pathologies:
            labels_NL[normal_N & np.isnan(labels_NL[:, column]), column] = NEGATIVE
    return int((normal_N & any_N).sum())


FEW = 10
"""Patients with a positive, or with a negative image, below which results name a class in a
warning.
"""
BootstrapUnit = Literal["patient", "image"]
ThresholdRule = Literal["f1", "mcc", "youden"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Treatment of labels and thresholds, as options of evaluations."""

    uncertain: Uncertain = "ignore"
    """treatment of uncertain labels (-1)"""
    missing: Missing = "negative"
    """treatment of missing labels"""
    threshold_rule: ThresholdRule = "f1"
    """metric that thresholds maximise on the validation images"""

    def policy(self) -> LabelPolicy:
        """Return the label policy of these options."""
        return LabelPolicy(uncertain=self.uncertain, missing=self.missing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanOptions(LabelOptions):
    """Treatment of labels, thresholds and means over findings."""

    smallest_class: int = 1
    """positive, and negative, images that a finding needs to be in the means"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredImages:
    """Images of a data set with scores and labels, in the order of the loader."""

    names: tuple[str, ...]
    """Evaluated classes, which have both scores and a label column in the data."""
    scores_NL: Array
    labels_NL: Array
    """Labels of 1, 0 or NaN (left out) under the policy."""
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Position of each sample in the source."""
    counts: Mapping[str, Any]
    """JSON counts of images and labels that were read, evaluated and left out."""
    smallest_class: int = 1
    """Positive, and negative, images that a class needs to be in the means."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]

    @property
    def evaluable(self) -> list[str]:
        """Classes with both positives and negatives."""
        both = (self.labels_NL == 1).any(axis=0) & (self.labels_NL == 0).any(axis=0)
        return [name for name, has_both in zip(self.names, both, strict=True) if has_both]

    @property
    def means(self) -> dict[str, list[str]]:
        """Name of each mean -> its classes, which no resample changes.

        Raises `EvaluationError` if no class can be evaluated.
        """
        if not self.evaluable:
            message = (
                f"expected positive and negative images of a class, got none for "
                f"{', '.join(self.names)}"
            )
            raise EvaluationError(message, "empty", field="labels")
        fewest_L = np.minimum((self.labels_NL == 1).sum(axis=0), (self.labels_NL == 0).sum(axis=0))
        enough = [
            name
            for name, fewest in zip(self.names, fewest_L, strict=True)
            if fewest >= self.smallest_class
        ]
        if not enough:
            message = (
                f"no class has {self.smallest_class} positive and as many negative "
                f"images; lower smallest_class"
            )
            raise EvaluationError(message, "empty", field="smallest_class")
        means = {"macro": enough}
        if set(COMPETITION_FINDINGS) <= set(enough):
            means["macro_competition"] = list(COMPETITION_FINDINGS)
        return means

    def details_of_means(self) -> dict[str, Any]:
        """Return the classes of each mean, those left out with the reason, and those of few
        patients, as JSON.
        """
        means = self.means
        left_out = dict.fromkeys(
            self.counts.get("classes_without_labels", ()), "no label of the data"
        )
        left_out |= dict.fromkeys(self.counts.get("labels_without_prompts", ()), "no prompts")
        left_out |= dict.fromkeys(
            self.counts.get("labels_without_classes", ()), "no label of the model"
        )
        for name, label_N in zip(self.names, self.labels_NL.T, strict=True):
            if name not in means["macro"]:
                lacking = [
                    kind
                    for kind, value in (("positive", 1), ("negative", 0))
                    if not (label_N == value).any()
                ]
                fewer = f"fewer than {self.smallest_class} positive or negative images"
                left_out[name] = f"no {lacking[0]} images" if lacking else fewer
        columns = [self.names.index(name) for name in means["macro"]]
        few = few_patients(means["macro"], self.labels_NL[:, columns], self.patients)
        return {"means": means, "left_out_of_means": left_out, "few_patients": few}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationResult:
    """Results of a classification with the scores, for the page and the predictions file."""

    results: Results
    images: ScoredImages
    thresholds: Mapping[str, float] | None
    """Threshold per class, chosen on validation images; NaN where these have a single class."""

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities, so that calibration is defined."""
        return True

    @property
    def groups(self) -> list[str] | None:
        """Bootstrap groups of the images, to compute further statistics on the same resamples."""
        return self.images.patients if self.results.config["bootstrap_unit"] == "patient" else None

    def table(self) -> str:
        """Return the rows of findings and the means of subgroups as plain text."""
        rows = [row for row in self.results.rows if not row.subgroup or row.target == "macro"]
        return "\n\n".join([format_table(rows), *notes_on_means(self.results.details)])

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield key, patient, subgroups, scores and labels (NaN: left out) of each image, for
        `write_results`.
        """
        images = self.images
        rows = zip(
            images.samples, images.scores_NL.tolist(), images.labels_NL.tolist(), strict=True
        )
        for sample, scores, labels in rows:
            yield {
                "key": sample.key,
                "patient": sample.patient,
                "subgroups": subgroups_of(sample),
                "scores": dict(zip(images.names, scores, strict=True)),
                "labels": dict(zip(images.names, labels, strict=True)),
            }


def few_patients(
    names: Sequence[str], labels_NL: Array, patients: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Return class -> patients with a positive and with a negative image, for classes with fewer
    than `FEW` of a kind.

    Resamples of so few patients, which differ little, give intervals that are too narrow.
    """
    patient_N = np.array(patients)
    few = {}
    for name, label_N in zip(names, labels_NL.T, strict=True):
        counts = {
            kind: len(set(patient_N[label_N == value]))
            for kind, value in (("positive", 1), ("negative", 0))
        }
        if min(counts.values()) < FEW:
            few[name] = counts
    return few


def notes_on_means(details: Mapping[str, Any]) -> list[str]:
    """Return sentences on the classes that the means leave out, that have few patients, and that
    the data rename.
    """
    reasons: dict[str, list[str]] = {}
    for name, reason in details.get("left_out_of_means", {}).items():
        reasons.setdefault(reason, []).append(name)
    notes = []
    if reasons:
        left_out = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
        notes.append(f"Left out of the means: {left_out}.")
    few = details.get("few_patients", {})
    if few:
        counts = "; ".join(
            f"{name} ({each['positive']} with, {each['negative']} without)"
            for name, each in few.items()
        )
        notes.append(f"Warning: few patients of a kind, so that values and intervals are "
                     f"unreliable: {counts}. "
                     f"Leave them out of the means with --smallest-class {FEW}.")  # fmt: skip
    renamed = details.get("renamed_labels", {})
    if renamed:
        notes.append(
            f"Labels read as classes: "
            f"{', '.join(f'{label} as {name}' for name, label in renamed.items())}."
        )
    return notes


def check_bootstrap_unit(unit: str) -> None:
    """Raise `EvaluationError` unless `unit` names a bootstrap unit."""
    if unit not in get_args(BootstrapUnit):
        message = (
            f"expected bootstrap_unit to be one of {', '.join(get_args(BootstrapUnit))}, "
            f"got {unit!r}"
        )
        raise EvaluationError(message, "unknown_name", field="bootstrap_unit")


def image_counts(
    samples: Sequence[Sample],
    unreadable: Mapping[str, int],
    resolved: ResolvedLabels,
    names: Sequence[str],
) -> dict[str, Any]:
    """Return the counts of images and labels, for `ScoredImages.counts`."""
    return {
        "images": len(samples),
        "patients": len({sample.patient for sample in samples}),
        "unreadable": dict(unreadable),
        "labels": {name: dict(resolved.counts[name]) for name in names},
        "no_finding_contradictions": resolved.contradictions,
    }


def choose_thresholds(
    valid: ScoredImages, test: ScoredImages, rule: ThresholdRule
) -> dict[str, float]:
    """Return class -> the best threshold by `rule` on the validation images; NaN where these have a
    single class.

    Raises SplitError if the two sets share a patient.
    """
    check_disjoint_patients(valid.patients, test.patients)
    columns = zip(valid.names, valid.scores_NL.T, valid.labels_NL.T, strict=True)
    thresholds = {
        name: choose_threshold(scores_N, labels_N, rule) for name, scores_N, labels_N in columns
    }
    return {name: thresholds.get(name, float("nan")) for name in test.names}


def ranking_groups(test: ScoredImages) -> list[MetricGroup]:
    """Return AUROC and average precision of every class, and their means."""
    columns = test.scores_NL, test.labels_NL, test.names
    return [
        ranking_metrics(metric, *columns, means=test.means)
        for metric in ("auroc", "average_precision")
    ]


def decision_groups(
    test: ScoredImages, thresholds: Mapping[str, float] | None, *, probabilities: bool
) -> list[MetricGroup]:
    """Return calibration if scores are probabilities, and yes/no metrics if there are
    thresholds.
    """
    groups = (
        [calibration_metrics(test.scores_NL, test.labels_NL, test.names)] if probabilities else []
    )
    decided = [
        index
        for index, name in enumerate(test.names)
        if thresholds and not np.isnan(thresholds[name])
    ]
    if thresholds and decided:
        names = [test.names[index] for index in decided]
        predicted_NL = test.scores_NL[:, decided] >= np.array([thresholds[name] for name in names])
        mean_of = test.means["macro"] if test.smallest_class > 1 else None
        groups.append(
            decision_metrics(predicted_NL, test.labels_NL[:, decided], names, mean_of=mean_of)
        )
    return groups


def evaluate_scores(
    test: ScoredImages,
    metric_groups: Sequence[MetricGroup],
    *,
    thresholds: Mapping[str, float] | None,
    protocol: tuple[str, int],
    config: Mapping[str, Any],
    inputs: Mapping[str, str | None],
    details: Mapping[str, Any] | None = None,
) -> Results:
    """Compute the rows of the metric groups and of the subgroups under one bootstrap.

    Args:
        test: images with scores and labels.
        metric_groups: metrics of all images.
        thresholds: threshold per class, recorded in the details.
        protocol: name and version.
        config: settings, with `bootstrap_unit`, `resamples`, `seed` and `smallest_subgroup`; the
            smallest class of the means is that of `test`.
        inputs: hashes of the inputs.
        details: further details.
    """
    masks_of = subgroup_masks([*map(subgroups_of, test.samples)])
    of_subgroups, labels_in_mean = subgroup_metrics(
        test.scores_NL, test.labels_NL, test.names, masks_of, config["smallest_subgroup"]
    )
    rows = measure(
        [*metric_groups, *of_subgroups],
        len(test.samples),
        resamples=config["resamples"],
        seed=config["seed"],
        groups=test.patients if config["bootstrap_unit"] == "patient" else None,
    )
    return Results(
        protocol=protocol[0],
        protocol_version=protocol[1],
        rows=rows,
        config={**config, "smallest_class": test.smallest_class, "ece_bins": ECE_BINS},
        inputs=inputs,
        details={
            **test.counts,
            **test.details_of_means(),
            "thresholds": thresholds,
            "labels_in_subgroup_mean": labels_in_mean,
            **(details or {}),
        },
    )
