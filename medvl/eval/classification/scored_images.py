"""Labelled images with a score a class: how every classifier is judged, whatever it was made from.

Zero-shot prompts, a linear probe and a fine-tuned classifier give the same thing, scores of images, and get the same
rows: AUROC and average precision, calibration where scores are probabilities, yes/no metrics at thresholds that were
chosen on validation images of other patients, and subgroups with their gaps.

Shape letters: N images, L classes.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from medvl.errors import EvaluationError
from medvl.eval.classification.label_policy import ResolvedLabels
from medvl.eval.classification.subgroups import subgroup_groups
from medvl.eval.core.full_pass import check_disjoint_patients
from medvl.eval.core.metric_rows import MetricGroup, calibration_metrics, decision_metrics, measure, ranking_metrics
from medvl.eval.core.metrics import ECE_BINS, Array, choose_threshold
from medvl.eval.core.results import Results, format_table
from medvl.schema import COMPETITION_FINDINGS, Sample

BootstrapUnit = Literal["patient", "image"]
ThresholdRule = Literal["f1", "mcc", "youden"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredImages:
    """A data set with its scores, in the loader's order."""

    names: tuple[str, ...]
    """Classes that are judged: those that have scores, and a label column in the data."""
    scores_NL: Array
    labels_NL: Array
    """1, 0 or NaN (left out), after the policy."""
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Place of each sample in the loader's source."""
    account: Mapping[str, Any]
    """What was read, judged and left out, as JSON."""

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]

    @property
    def judgeable(self) -> list[str]:
        """Classes with positives and negatives."""
        both = (self.labels_NL == 1).any(axis=0) & (self.labels_NL == 0).any(axis=0)
        return [name for name, judged in zip(self.names, both, strict=True) if judged]

    @property
    def means(self) -> dict[str, list[str]]:
        """Mean -> the classes that it is the mean of; `EvaluationError` where no class can be judged."""
        if not self.judgeable:
            raise EvaluationError(
                f"none of {', '.join(self.names)} has positive and negative images under this policy: "
                "there is nothing to judge"
            )
        means = {"macro": self.judgeable}
        if set(COMPETITION_FINDINGS) <= set(self.judgeable):
            means["macro_competition"] = list(COMPETITION_FINDINGS)
        return means


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationResult:
    """The results, and the scores behind them for the page and the predictions file."""

    results: Results
    images: ScoredImages
    thresholds: Mapping[str, float] | None
    """By class, chosen on validation images; NaN where those have one class only."""

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities, so that calibration can be judged."""
        return True

    @property
    def groups(self) -> list[str] | None:
        """What was drawn for the intervals, for statistics of one's own on the same draws."""
        return self.images.patients if self.results.config["bootstrap_unit"] == "patient" else None

    def table(self) -> str:
        """The findings and the means of subgroups, as plain text."""
        rows = [row for row in self.results.rows if not row.subgroup or row.target == "macro"]
        return format_table(rows)

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an image: key, patient, scores, and labels (null: left out), as `write_results` takes them."""
        images = self.images
        rows = zip(images.samples, images.scores_NL.tolist(), images.labels_NL.tolist(), strict=True)
        for sample, scores, labels in rows:
            yield {
                "key": sample.key,
                "patient": sample.patient,
                "scores": dict(zip(images.names, scores, strict=True)),
                "labels": dict(zip(images.names, labels, strict=True)),
            }


def check_bootstrap_unit(unit: str) -> None:
    """Raise `EvaluationError` unless `unit` names a bootstrap unit."""
    if unit not in get_args(BootstrapUnit):
        raise EvaluationError(
            f"expected bootstrap_unit to be one of {', '.join(get_args(BootstrapUnit))}, got {unit!r}",
            "unknown_name",
            field="bootstrap_unit",
        )


def image_counts(
    samples: Sequence[Sample], unreadable: Mapping[str, int], resolved: ResolvedLabels, names: Sequence[str]
) -> dict[str, Any]:
    """What became of every image and label, for `ScoredImages.account`."""
    return {
        "images": len(samples),
        "patients": len({sample.patient for sample in samples}),
        "unreadable": dict(unreadable),
        "labels": {name: dict(resolved.counts[name]) for name in names},
        "no_finding_contradictions": resolved.contradictions,
    }


def choose_thresholds(valid: ScoredImages, test: ScoredImages, rule: ThresholdRule) -> dict[str, float]:
    """Class -> the threshold that is best by `rule` on the validation images; NaN where those have one class only.

    Raises SplitError when the two sets share a patient.
    """
    check_disjoint_patients(valid.patients, test.patients)
    columns = zip(valid.names, valid.scores_NL.T, valid.labels_NL.T, strict=True)
    chosen = {name: choose_threshold(scores_N, labels_N, rule) for name, scores_N, labels_N in columns}
    return {name: chosen.get(name, float("nan")) for name in test.names}


def ranking_groups(test: ScoredImages) -> list[MetricGroup]:
    """AUROC and average precision of every class, and their means."""
    columns = test.scores_NL, test.labels_NL, test.names
    return [ranking_metrics(metric, *columns, means=test.means) for metric in ("auroc", "average_precision")]


def decision_groups(
    test: ScoredImages, thresholds: Mapping[str, float] | None, *, probabilities: bool
) -> list[MetricGroup]:
    """Calibration where scores are probabilities, and yes/no metrics where there are thresholds."""
    blocks = [calibration_metrics(test.scores_NL, test.labels_NL, test.names)] if probabilities else []
    decided = [index for index, name in enumerate(test.names) if thresholds and not np.isnan(thresholds[name])]
    if thresholds and decided:
        names = [test.names[index] for index in decided]
        predicted_NL = test.scores_NL[:, decided] >= np.array([thresholds[name] for name in names])
        blocks.append(decision_metrics(predicted_NL, test.labels_NL[:, decided], names))
    return blocks


def evaluate_scores(
    test: ScoredImages,
    blocks: Sequence[MetricGroup],
    *,
    thresholds: Mapping[str, float] | None,
    protocol: tuple[str, int],
    config: Mapping[str, Any],
    inputs: Mapping[str, str | None],
    details: Mapping[str, Any] | None = None,
) -> Results:
    """The rows of these blocks and of the subgroups under one bootstrap.

    `config` has `bootstrap_unit`, `resamples`, `seed` and `smallest_subgroup`; `protocol` is its name and version.
    """
    of_groups, labels_in_mean = subgroup_groups(
        test.scores_NL, test.labels_NL, test.names, test.samples, config["smallest_subgroup"]
    )
    rows = measure(
        [*blocks, *of_groups],
        len(test.samples),
        resamples=config["resamples"],
        seed=config["seed"],
        groups=test.patients if config["bootstrap_unit"] == "patient" else None,
    )
    return Results(
        protocol=protocol[0],
        protocol_version=protocol[1],
        rows=rows,
        config={**config, "ece_bins": ECE_BINS},
        inputs=inputs,
        details={
            **test.account,
            "thresholds": thresholds,
            "labels_in_subgroup_mean": labels_in_mean,
            **(details or {}),
        },
    )
