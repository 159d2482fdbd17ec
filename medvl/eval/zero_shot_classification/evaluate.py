"""Zero-shot classification of findings by prompts, evaluated against labels.

Protocol "zero_shot", version 1:

* Every readable image of the loader is scored once; a score depends only on its image and the
  prompts, except under GLoRIA's scorings, which standardise over the images.
* The scores of several checkpoints are averaged (ensemble).
* AUROC and average precision per finding; "macro" is the mean over findings with both classes (and
  `smallest_class` images of each), "macro_competition" the mean over the five findings of the
  CheXpert competition, if all have both classes. The details name the findings of each mean, those
  left out, and those with few patients of a kind.
* Yes/no metrics only with a validation loader, on which thresholds are chosen; it must not share
  patients with the test images.
* Brier score and calibration error if the scores are probabilities.
* If classes compete, top-1 accuracy over images of exactly one class.
* Subgroups as in `medvl.eval.core.metric_rows`.
* Intervals: patients are resampled with all their images, or images with `bootstrap_unit="image"`.
  All rows share the resamples.

Shape letters: N images, L classes, R resamples.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medvl.common.label_names import renamed_labels
from medvl.errors import EvaluationError
from medvl.eval.classification import scored_images as scoring
from medvl.eval.classification.scored_images import (
    BootstrapUnit,
    ClassificationResult,
    LabelPolicy,
    ScoredImages,
    ThresholdRule,
)
from medvl.eval.core.full_pass import Loader, Model, Source, input_hashes, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, measure, top1_metrics
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.zero_shot_classification.prompts import (
    ADVICE,
    COMPETING,
    PromptSet,
    default_prompts,
    load_prompts,
)
from medvl.eval.zero_shot_classification.scores import predict

PROTOCOL = "zero_shot"
PROTOCOL_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShotResult(ClassificationResult):
    """Results of a zero-shot classification with scores and prompts."""

    prompts: PromptSet

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities, so that calibration is defined."""
        return self.prompts.gives_probabilities


def zero_shot(
    model: Model | Sequence[Model],
    loader: Loader,
    prompts: PromptSet | str | Path | None = None,
    *,
    labels: Sequence[str] = (),
    valid_loader: Loader | None = None,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    smallest_class: int = 1,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | Sequence[str | Path] | None = None,
) -> ZeroShotResult:
    """Evaluate zero-shot classification by the protocol of this module.

    Args:
        model: the model, or several as an ensemble.
        loader: test images with labels, opened for evaluation.
        prompts: a prompt set, the name of a built-in one, or a JSON file; None for the
            `zero_shot_prompts` of a model.
        labels: classes to evaluate; empty for all that are labels of the data.
        valid_loader: images of other patients, on which thresholds are chosen; None for no yes/no
            metrics.
        policy: conversion of uncertain and missing labels.
        threshold_rule: metric that thresholds maximise.
        bootstrap_unit, resamples, seed: unit, number and seed of the bootstrap resamples.
        smallest_subgroup: positives, and negatives, that the AUROC of a subgroup needs.
        smallest_class: positives, and negatives, that a finding needs to be in the means over
            findings.
        autocast: dtype of the image encoder, such as `torch.bfloat16`; None for float32.
        checkpoint: directory or file of each model, whose hash is recorded in the results.

    Raises EvaluationError where no class can be evaluated, a chosen label is unknown, images are
    missing or scores are not finite, and SplitError where test and validation images share
    patients.
    """
    scoring.check_bootstrap_unit(bootstrap_unit)
    prompts = _prompt_set(
        prompts, model[0] if isinstance(model, Sequence) else model, loader.source, labels
    )
    policy = policy or LabelPolicy()
    members = _checkpoint_hashes(checkpoint, len(model) if isinstance(model, Sequence) else 1)
    hashes = {"checkpoint": _ensemble_hash(members), "prompts": prompts.sha256}
    test = score_images(model, loader, prompts, policy, autocast)
    test = dataclasses.replace(test, smallest_class=smallest_class)
    thresholds = None
    if valid_loader is not None:
        valid = score_images(model, valid_loader, prompts, policy, autocast)
        thresholds = scoring.choose_thresholds(valid, test, threshold_rule)
    results = scoring.evaluate_scores(
        test,
        _metric_groups(test, prompts, thresholds),
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config={
            **_describe(prompts, policy, members, autocast),
            "threshold_rule": None if valid_loader is None else threshold_rule,
            "bootstrap_unit": bootstrap_unit,
            "resamples": resamples,
            "seed": seed,
            "smallest_subgroup": smallest_subgroup,
        },
        inputs=input_hashes(None, manifest=loader, validation_manifest=valid_loader) | hashes,
    )
    return ZeroShotResult(results=results, prompts=prompts, images=test, thresholds=thresholds)


def _checkpoint_hashes(
    checkpoint: str | Path | Sequence[str | Path] | None, models: int
) -> list[str]:
    """Return the hash of each checkpoint. Raises `EvaluationError` unless there is a different
    one per model.
    """
    if checkpoint is None:
        return []
    paths = [checkpoint] if isinstance(checkpoint, str | Path) else checkpoint
    if len(paths) != models:
        message = f"expected one checkpoint per model, got {len(paths)} for {models} models"
        raise EvaluationError(message, "mismatch", field="checkpoint")
    hashes = [checkpoint_sha256(path) for path in paths]
    for path, sha256 in zip(paths, hashes, strict=True):
        if hashes.count(sha256) > 1:
            message = f"expected different weights in an ensemble, got those of {path} twice"
            raise EvaluationError(message, "conflict", field="checkpoint")
    return hashes


def _ensemble_hash(hashes: Sequence[str]) -> str | None:
    """Return the hash of a single checkpoint, or the hash of the members' hashes, one per line."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return hashlib.sha256("".join(f"{member}\n" for member in hashes).encode()).hexdigest()


def score_images(
    model: Model | Sequence[Model],
    loader: Loader,
    prompts: PromptSet,
    policy: LabelPolicy,
    autocast: torch.dtype | None = None,
) -> ScoredImages:
    """Return every image of a loader with scores and labels under the policy. Raises
    `EvaluationError`.
    """
    source = loader.source
    names = common_classes(prompts, source)
    predictions = predict(model, loader, [prompts], autocast=autocast)
    columns = [list(prompts.classes).index(name) for name in names]
    label_of = prompts.labels_of(predictions.label_names)
    class_of = {label: name for name, label in label_of.items()}
    label_names = [class_of.get(label, label) for label in predictions.label_names]
    resolved = policy.resolve(predictions.labels_NL, label_names)
    by_key = samples_by_key(source)
    positions, samples = zip(*(by_key[key] for key in predictions.keys), strict=True)
    counts = scoring.image_counts(samples, predictions.unreadable, resolved, names)
    counts["classes_without_labels"] = [name for name in prompts.classes if name not in names]
    counts["labels_without_prompts"] = [
        label for label in predictions.label_names if label not in class_of
    ]
    counts["renamed_labels"] = renamed_labels(label_of)
    return ScoredImages(
        names=names,
        scores_NL=predictions.scores_NL[0][:, columns],
        labels_NL=resolved.labels_NL[:, [label_names.index(name) for name in names]],
        samples=samples,
        positions=positions,
        counts=counts,
    )


def common_classes(prompts: PromptSet, source: Source) -> tuple[str, ...]:
    """Return the classes of the prompts that are labels of the data. Raises EvaluationError when
    there are none.
    """
    names = tuple(prompts.labels_of(source.label_names))
    if not names:
        classes = ", ".join(prompts.classes)
        labels = ", ".join(source.label_names) or "none"
        message = (
            f"expected a label of the data for a class of the prompts {prompts.name!r} "
            f"({classes}), got {labels}"
        )
        advice = ADVICE if source.label_names else "evaluate data with labels"
        raise EvaluationError(
            f"{message}; {advice}, or train with --prompts None", "mismatch", field="prompts"
        )
    return names


def _metric_groups(
    test: ScoredImages, prompts: PromptSet, thresholds: Mapping[str, float] | None
) -> list[MetricGroup]:
    groups = scoring.ranking_groups(test)
    groups += scoring.decision_groups(test, thresholds, probabilities=prompts.gives_probabilities)
    if prompts.scoring in COMPETING:
        groups.append(top1_metrics(test.scores_NL, test.labels_NL))
    return groups


def _describe(
    prompts: PromptSet, policy: LabelPolicy, members: Sequence[str], autocast: torch.dtype | None
) -> dict[str, Any]:
    fields = ("name", "version", "scoring", "temperature", "ensemble")
    return {
        "prompts": {
            **{field: getattr(prompts, field) for field in fields},
            "classes": list(prompts.classes),
        },
        "policy": dataclasses.asdict(policy),
        "autocast": None if autocast is None else str(autocast),
        **({"ensemble": list(members)} if len(members) > 1 else {}),
    }


def _prompt_set(
    prompts: PromptSet | str | Path | None, model: Model, source: Source, labels: Sequence[str]
) -> PromptSet:
    if not isinstance(prompts, PromptSet):
        prompts = load_prompts(default_prompts(model) if prompts is None else prompts)
    return prompts.for_labels(source.label_names, labels)


class ZeroShotEval:
    """Zero-shot AUROC of a model during training, without intervals.

    `ZeroShotEval(loader)(model)` returns "zero_shot/auroc_macro",
    "zero_shot/auroc_macro_competition" if all five competition findings can be evaluated, and
    "zero_shot/auroc/<class>" of each evaluable class. The constructor raises `EvaluationError` if
    the data has no label of the prompts.
    """

    def __init__(
        self,
        loader: Loader,
        prompts: PromptSet | str | Path = "chexpert_ensemble",
        *,
        policy: LabelPolicy | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.loader = loader
        self.autocast = autocast
        prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
        self.prompts = prompts.for_labels(loader.source.label_names)
        self.policy = policy or LabelPolicy()
        common_classes(self.prompts, loader.source)

    def __call__(self, model: Model) -> dict[str, float]:
        """Return the metrics of the current model. Raises `EvaluationError` as `zero_shot` does."""
        images = score_images(model, self.loader, self.prompts, self.policy, self.autocast)
        rows = measure(
            _metric_groups(images, self.prompts, None)[:1], len(images.samples), resamples=0
        )
        values = {row.target: row.value for row in rows if not np.isnan(row.value)}
        return {
            f"zero_shot/auroc{'_' if name.startswith('macro') else '/'}{name}": value
            for name, value in values.items()
        }
