"""Evaluation of a trained classifier.

Protocol "classification", version 1: the rows of `medvl.eval.classification.scored_images` for the
probabilities of a `Classifier`.

* Every readable image of the loader is scored once, in eval mode; a score depends on its image
  only, or on what the model reads (`config["reads"]` of the results): its text, or both. Labels
  that were extracted from the text make the scores of a model that reads it say little about the
  image.
* AUROC and average precision per label and their means; Brier score and calibration error
  (`ECE_BINS` equal-width bins); yes/no metrics at thresholds chosen only on validation images of
  other patients. For a classifier of one label an image, also the accuracy of its likeliest label
  and the mean of this accuracy over labels, of the images with exactly one label (published for
  MELINDA).
* Labels that are neither 1 nor 0 are converted by one named policy, which should be that of
  training.
* Intervals: patients are resampled with all their images, or images with `bootstrap_unit="image"`.
  All rows share the resamples.
"""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medvl.common.label_names import match_labels, named_as, renamed_labels
from medvl.errors import EvaluationError
from medvl.eval.classification import scored_images as scoring
from medvl.eval.classification.scored_images import (
    BootstrapUnit,
    ClassificationResult,
    LabelPolicy,
    ScoredImages,
    ThresholdRule,
)
from medvl.eval.core.full_pass import FullPass, Loader, column, input_hashes, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, measure, top1_metrics
from medvl.models.base import HasModules, evaluating
from medvl.schema import Batch

PROTOCOL = "classification"
PROTOCOL_VERSION = 1


class ClassifierModel(HasModules, Protocol):
    """A classifier such as `medvl.models.LabelModel`."""

    reads: str
    one_label: bool

    @property
    def config(self) -> Any:
        """Configuration, whose `labels` name the columns of the probabilities."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    def probabilities(self, batch: Batch) -> Tensor:
        """Return probabilities (B, L), float64."""


def classify(
    model: ClassifierModel,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    smallest_class: int = 1,
    checkpoint: str | Path | None = None,
) -> ClassificationResult:
    """Evaluate a classifier by the protocol of this module.

    Args:
        model: the classifier.
        loader: test images, opened for evaluation.
        valid_loader: images of other patients, on which thresholds are chosen; None for no yes/no
            metrics.
        policy: conversion of uncertain and missing labels.
        threshold_rule: metric that thresholds maximise.
        bootstrap_unit: unit of resampling.
        resamples: bootstrap resamples.
        seed: seed of the resampling.
        smallest_subgroup: positives, and negatives, that the AUROC of a subgroup needs.
        smallest_class: positives, and negatives, that a label needs to be in the means over labels.
        checkpoint: directory or file whose hash is recorded in the results.

    Raises:
        EvaluationError: no label can be evaluated, the loader is incomplete, or scores are not
            finite.
        SplitError: test and validation images share patients.
    """
    scoring.check_bootstrap_unit(bootstrap_unit)
    policy = policy or LabelPolicy()
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    test = dataclasses.replace(score_labels(model, loader, policy), smallest_class=smallest_class)
    thresholds = None
    if valid_loader is not None:
        thresholds = scoring.choose_thresholds(
            score_labels(model, valid_loader, policy), test, threshold_rule
        )
    results = scoring.evaluate_scores(
        test,
        [
            *scoring.ranking_groups(test),
            *scoring.decision_groups(test, thresholds, probabilities=True),
            *_accuracy_groups(model, test),
        ],
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config={
            "reads": model.reads,
            "policy": dataclasses.asdict(policy),
            "threshold_rule": None if valid_loader is None else threshold_rule,
            "bootstrap_unit": bootstrap_unit,
            "resamples": resamples,
            "seed": seed,
            "smallest_subgroup": smallest_subgroup,
        },
        inputs=inputs,
    )
    return ClassificationResult(results=results, images=test, thresholds=thresholds)


def score_labels(model: ClassifierModel, loader: Loader, policy: LabelPolicy) -> ScoredImages:
    """Return every image of a loader with probabilities and labels under the policy. Raises
    `EvaluationError`.
    """
    source = loader.source
    label_of = match_labels(model.config.labels, source.label_names)
    names = tuple(label_of)
    if not names:
        message = (
            f"expected labels of the classifier in the data, got "
            f"{', '.join(source.label_names) or 'none'}"
        )
        raise EvaluationError(message, "mismatch", field="labels")
    batches = FullPass(loader)

    def score(batch: Batch) -> dict[str, torch.Tensor]:
        probabilities_BL = model.probabilities(batch.to(model.device, non_blocking=True))
        return {"probabilities": probabilities_BL, "labels": batch.labels_BL}

    with evaluating(model):
        parts = batches.compute(score)
    scores_NL = column(parts, "probabilities").numpy()[
        :, [model.config.labels.index(name) for name in names]
    ]
    if not np.isfinite(scores_NL).all():
        raise EvaluationError(
            "expected finite scores of the classifier; check its weights", "nonfinite"
        )
    label_names = named_as(source.label_names, names)
    resolved = policy.resolve(column(parts, "labels").double().numpy(), label_names)
    by_key = samples_by_key(source)
    positions, samples = zip(*(by_key[key] for key in batches.keys), strict=True)
    return ScoredImages(
        names=names,
        scores_NL=scores_NL,
        labels_NL=resolved.labels_NL[:, [label_names.index(name) for name in names]],
        samples=samples,
        positions=positions,
        counts={
            **scoring.image_counts(samples, batches.unreadable, resolved, names),
            "classes_without_labels": [
                name for name in model.config.labels if name not in label_of
            ],
            "labels_without_classes": [
                name for name in source.label_names if name not in label_of.values()
            ],
            "renamed_labels": renamed_labels(label_of),
        },
    )


def _accuracy_groups(model: ClassifierModel, test: ScoredImages) -> list[MetricGroup]:
    return [top1_metrics(test.scores_NL, test.labels_NL)] if model.one_label else []


class ClassifyEval:
    """AUROC of a classifier during training, without intervals.

    `ClassifyEval(loader)(model)` returns "classify/auroc_macro", "classify/auroc_macro_competition"
    if all five competition findings can be evaluated, "classify/auroc/<label>" of each evaluable
    label, and for a classifier of one label an image "classify/top1_accuracy" and
    "classify/top1_balanced_accuracy".
    """

    def __init__(self, loader: Loader, *, policy: LabelPolicy | None = None) -> None:
        self.loader = loader
        self.policy = policy or LabelPolicy()

    def __call__(self, model: ClassifierModel) -> dict[str, float]:
        """Return the metrics of the current model. Raises `EvaluationError` as `classify` does."""
        images = score_labels(model, self.loader, self.policy)
        aurocs = scoring.ranking_groups(images)[0]
        groups = _accuracy_groups(model, images)
        rows = measure([aurocs, *groups], len(images.samples), resamples=0)
        return {_name(row): row.value for row in rows if not np.isnan(row.value)}


def _name(row: MetricRow) -> str:
    if row.metric != "auroc":
        return f"classify/{row.metric}"
    return f"classify/auroc{'_' if row.target.startswith('macro') else '/'}{row.target}"
