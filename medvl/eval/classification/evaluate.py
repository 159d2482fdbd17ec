"""A trained classifier of findings, judged on labelled images.

Protocol "classification", version 1: the rows of `medvl.eval.classification.scored_images` for the probabilities of
a `Classifier`.

* Every readable image of the loader is scored once, in eval mode; a score depends on its image alone.
* AUROC and average precision a label and their means; Brier score and calibration error (`ECE_BINS` equal-width bins);
  yes/no metrics at thresholds that are chosen on validation images of other patients and nowhere else.
* Labels that are neither 1 nor 0 are settled by one named policy, which should be the one of training.
* Intervals: patients are drawn, with all their images (`bootstrap_unit="image"`: images are). All rows share the draws.
"""

import dataclasses
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.classification.scored_images import (
    BootstrapUnit,
    ClassificationResult,
    ScoredImages,
    ThresholdRule,
    check_bootstrap_unit,
    choose_thresholds,
    decision_groups,
    evaluate_scores,
    image_counts,
    ranking_groups,
)
from medvl.eval.core.full_pass import FullPass, input_hashes, samples_by_key
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.metric_rows import measure
from medvl.models.downstream.classifier import ClassifierConfig
from medvl.models.eval_mode import HasModules, evaluating

PROTOCOL, PROTOCOL_VERSION = "classification", 1


class Classifies(HasModules, Protocol):
    """A classifier, as `medvl.models.Classifier` is one."""

    @property
    def config(self) -> ClassifierConfig:
        """Its labels are the columns of its logits."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def label_logits(self, image_BCHW: Tensor) -> Tensor:
        """(B, L)."""


def classify(
    model: Classifies,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    checkpoint: str | Path | None = None,
) -> ClassificationResult:
    """Judge a classifier; the protocol is at the top of this module, the arguments are those of `zero_shot`.

    Raises:
        EvaluationError: no label can be judged, or the loader or the scores are not whole.
        SplitError: test and validation images share patients.
    """
    check_bootstrap_unit(bootstrap_unit)
    policy = policy or LabelPolicy()
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    test = score_labels(model, loader, policy)
    thresholds = None
    if valid_loader is not None:
        thresholds = choose_thresholds(score_labels(model, valid_loader, policy), test, threshold_rule)
    results = evaluate_scores(
        test,
        ranking_groups(test) + decision_groups(test, thresholds, probabilities=True),
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config={
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


def score_labels(model: Classifies, loader: Loader, policy: LabelPolicy) -> ScoredImages:
    """Every image of a loader with its probabilities and its labels under the policy. Raises `EvaluationError`."""
    source = loader.source
    names = tuple(name for name in model.config.labels if name in source.label_names)
    if not names:
        raise EvaluationError(
            f"the classifier ({', '.join(model.config.labels)}) and the data "
            f"({', '.join(source.label_names) or 'none'}) have no label in common"
        )
    given = FullPass(loader)
    parts, tables = [], []
    with evaluating(model):
        for batch in given:
            logits_BL = model.label_logits(batch.image_BCHW.to(model.device, non_blocking=True))
            parts.append(torch.sigmoid(logits_BL.double()).cpu())
            tables.append(batch.labels_BL)
    scores_NL = torch.cat(parts).numpy()[:, [model.config.labels.index(name) for name in names]]
    if not np.isfinite(scores_NL).all():
        raise EvaluationError("the classifier's scores are not finite: look at its weights")
    resolved = policy.resolve(torch.cat(tables).double().numpy(), source.label_names)
    place_of = samples_by_key(source)
    positions, samples = zip(*(place_of[key] for key in given.keys), strict=True)
    return ScoredImages(
        names=names,
        scores_NL=scores_NL,
        labels_NL=resolved.labels_NL[:, [source.label_names.index(name) for name in names]],
        samples=samples,
        positions=positions,
        account=image_counts(samples, given.unreadable, resolved, names),
    )


class ClassifyEval:
    """AUROC of a classifier while it is being trained: `ClassifyEval(loader)(model)` is a flat mapping of numbers.

    "classify/auroc_macro", "classify/auroc_macro_competition" where all five can be judged, and
    "classify/auroc/<label>" for each label that can; no intervals.
    """

    def __init__(self, loader: Loader, *, policy: LabelPolicy | None = None) -> None:
        self.loader, self.policy = loader, policy or LabelPolicy()

    def __call__(self, model: Classifies) -> dict[str, float]:
        """The numbers for the model as it is now. Raises `EvaluationError` as `classify` does."""
        images = score_labels(model, self.loader, self.policy)
        rows = measure(ranking_groups(images)[:1], len(images.samples), resamples=0)
        named = {row.target: row.value for row in rows if not np.isnan(row.value)}
        return {
            f"classify/auroc{'_' if name.startswith('macro') else '/'}{name}": value for name, value in named.items()
        }
