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

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
from medvl.eval.core.full_pass import (
    FullPass,
    Loader,
    Model,
    Source,
    column,
    embed_texts,
    encode_batch,
    input_hashes,
    samples_by_key,
    slices_of,
)
from medvl.eval.core.metric_rows import MetricGroup, measure, top1_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.zero_shot_classification.prompts import (
    ADVICE,
    COMPETING,
    STANDARDIZED,
    PromptSet,
    default_prompts,
    load_prompts,
)
from medvl.models.base import evaluating
from medvl.schema import Batch, Embeddings

# Scores of images for prompt sets; images are encoded once for all prompt sets and classes.
#
# A score depends only on its image and the prompts, except under GLoRIA's scorings
# (`prompts.STANDARDIZED`).
#
# Shape letters: N images, M sentences, B batch, L labels or classes, E shared embedding.


@dataclasses.dataclass(frozen=True, slots=True)
class Predictions:
    """Scores and labels of one pass over a loader, in the order of the loader."""

    keys: tuple[str, ...]
    scores_NL: tuple[Array, ...]
    """One array per prompt set, with one column per class."""
    labels_NL: Array
    """Labels of the table: 1, 0, -1 or NaN, one column per name in `label_names`."""
    label_names: tuple[str, ...]
    unreadable: Mapping[str, int]
    """Counts of samples that the loader skipped, by reason; with `keys` they cover the whole
    source.
    """


def predict(
    model: Model | Sequence[Model],
    loader: Loader,
    prompt_sets: Sequence[PromptSet],
    *,
    autocast: torch.dtype | None = None,
) -> Predictions:
    """Score every image of the loader under every prompt set.

    The scores of several models are averaged (ensemble); each image is read once. Under
    "pair_softmax" this is CheXzero's mean over checkpoints of a softmax of two cosines.

    Raises `EvaluationError` if the loader does not yield every sample once, or a score is not
    finite.
    """
    members = list(model) if isinstance(model, Sequence) else [model]
    if not members:
        raise EvaluationError("expected at least one model", "empty", field="model")
    batches = FullPass(loader)
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(evaluating(member))
        scorers = [_MemberScorer(member, prompt_sets, autocast) for member in members]

        def score(batch: Batch) -> dict[str, Tensor]:
            by_member = [scorer(batch) for scorer in scorers]
            means = [
                torch.stack(of_members).mean(dim=0) for of_members in zip(*by_member, strict=True)
            ]
            return {
                "labels": batch.labels_BL,
                **{str(index): mean for index, mean in enumerate(means)},
            }

        parts = batches.compute(score)
    return Predictions(
        keys=tuple(batches.keys),
        scores_NL=tuple(
            _set_scores(prompts, column(parts, str(index)))
            for index, prompts in enumerate(prompt_sets)
        ),
        labels_NL=column(parts, "labels").double().numpy(),
        label_names=tuple(loader.source.label_names),
        unreadable=batches.unreadable,
    )


def _set_scores(prompts: PromptSet, raw_NL: Tensor) -> Array:
    """Return the final scores of all images under one prompt set. Raises `EvaluationError` if
    one is not finite.
    """
    scores_NL = _standardize(raw_NL.numpy(), prompts)
    if not np.isfinite(scores_NL).all():
        bad = int((~np.isfinite(scores_NL)).any(axis=1).sum())
        message = (
            f"expected finite scores, got others for {bad} of {len(scores_NL)} images; "
            f"check weights and autocast"
        )
        raise EvaluationError(message, "nonfinite")
    return scores_NL


def _standardize(scores_NL: Array, prompts: PromptSet) -> Array:
    """Standardise the scores over the images under GLoRIA's scorings; return other scores
    unchanged.
    """
    if prompts.scoring not in STANDARDIZED:
        return scores_NL
    std_L = scores_NL.std(axis=0)
    if not std_L.all():
        message = (
            f"{prompts.name!r} standardises over images, but all scores are equal; "
            f"evaluate a complete test set"
        )
        raise EvaluationError(message, "empty")
    standardised_NL: Array = (scores_NL - scores_NL.mean(axis=0)) / std_L
    return standardised_NL


class _MemberScorer:
    """Scores of a batch by one model under every prompt set."""

    def __init__(
        self, model: Model, prompt_sets: Sequence[PromptSet], autocast: torch.dtype | None
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._device = next(model.parameters()).device
        self._scorers = [PromptScorer(model, prompts) for prompts in prompt_sets]

    def __call__(self, batch: Batch) -> list[Tensor]:
        images = encode_batch(self._model, batch, self._device, self._autocast)
        return [scorer(images) for scorer in self._scorers]


class PromptScorer:
    """Scorer of images for one prompt set, whose sentences are embedded once."""

    def __init__(self, model: Model, prompts: PromptSet) -> None:
        self.prompts = prompts
        embed, self._compare = _text_functions(model, prompts)
        texts = prompts.texts()
        self.texts = embed_texts(model, texts, embed)
        index_of = {text: index for index, text in enumerate(texts)}
        classes = prompts.classes.values()
        self._positive = [
            torch.tensor([index_of[text] for text in sides.positive]) for sides in classes
        ]
        self._negative = [
            torch.tensor([index_of[text] for text in sides.negative])
            for sides in classes
            if sides.negative
        ]
        if prompts.ensemble == "embedding_mean":
            self._average_embeddings(self.texts.global_NE)
        if prompts.ensemble == "embedding_mean_raw":
            self._average_embeddings(_projections(model, texts))

    def __call__(self, images: Embeddings) -> Tensor:
        """Return scores_BL in float64 on the CPU."""
        similarity_BM = self._compare(images, self.texts).cpu().double()
        positive_BL = self._pool(similarity_BM, self._positive)
        if self.prompts.scoring in ("positive", *STANDARDIZED):
            return positive_BL
        if self.prompts.scoring == "class_softmax":
            return torch.softmax(positive_BL / self.prompts.temperature, dim=1)
        margin_BL = positive_BL - self._pool(similarity_BM, self._negative)
        if self.prompts.scoring == "margin":
            return margin_BL
        return torch.sigmoid(margin_BL / self.prompts.temperature)  # softmax over the two sides

    def _pool(self, similarity_BM: Tensor, sentences: Sequence[Tensor]) -> Tensor:
        of_class = (similarity_BM[:, columns] for columns in sentences)
        if self.prompts.ensemble == "similarity_max":
            return torch.stack([similarity.amax(dim=1) for similarity in of_class], dim=1)
        return torch.stack([similarity.mean(dim=1) for similarity in of_class], dim=1)

    def _average_embeddings(self, sentence_ME: Tensor) -> None:
        """Replace the sentences by one normalised mean per class and side."""
        if self.texts.local_NPE is not None:
            message = (
                "a model with local similarity cannot average embeddings; use the "
                "ensemble similarity_mean"
            )
            raise EvaluationError(message, "unsupported", field="ensemble")
        if not torch.allclose(
            self.texts.global_NE.float().norm(dim=1), torch.ones(()).to(sentence_ME), atol=1e-2
        ):
            message = (
                "a model that compares vectors of any length cannot average embeddings of "
                "unit length; use the "
            )
            raise EvaluationError(
                f"{message}ensemble similarity_mean", "unsupported", field="ensemble"
            )
        sides = [*self._positive, *self._negative]
        means = [sentence_ME[columns.to(sentence_ME.device)].mean(dim=0) for columns in sides]
        self.texts = Embeddings(F.normalize(torch.stack(means), dim=1))
        single = list(torch.arange(len(sides))[:, None])
        self._positive, self._negative = (
            single[: len(self._positive)],
            single[len(self._positive) :],
        )


def _projections(model: Model, texts: Sequence[str]) -> Tensor:
    """Return (M, E): the sentences' vectors before they are normalised."""
    project = getattr(model, "unnormalized_text", None)
    if project is None:
        message = (
            "the ensemble embedding_mean_raw needs a dual-encoder with unnormalized_text; "
            "use embedding_mean"
        )
        raise EvaluationError(message, "unsupported", field="ensemble")
    return embed_texts(model, texts, lambda some: Embeddings(project(some))).global_NE


_METHODS = {
    "gloria_best_word": ("embed_texts", "best_word_similarity"),
    "gloria_published": ("published_prompts", "published_similarity"),
}
"""Scorings with their own methods of the model: to embed the prompts, and to compare them with
images.
"""


def _text_functions(
    model: Model, prompts: PromptSet
) -> tuple[Callable[[Sequence[str]], Embeddings], Callable[[Embeddings, Embeddings], Tensor]]:
    """Return the model's functions that embed the prompts and compare them with images."""
    embed, compare = (
        getattr(model, name, None)
        for name in _METHODS.get(prompts.scoring, ("embed_texts", "similarity"))
    )
    if embed is None or compare is None:
        message = (
            f"prompt set {prompts.name!r} needs GLoRIA's own similarity; use another one "
            f"for this model"
        )
        raise EvaluationError(message, "unsupported", field="prompts")
    return embed, compare


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
    by_scan: bool = False,
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
        by_scan: average the scores of a scan's reconstructions (the samples of one study), so that
            each scan counts once.
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
    test = mean_of_scans(test) if by_scan else test
    thresholds = None
    if valid_loader is not None:
        valid = score_images(model, valid_loader, prompts, policy, autocast)
        valid = mean_of_scans(valid) if by_scan else valid
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
            **({"by_scan": True} if by_scan else {}),
            **slices_of(loader),
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


def mean_of_scans(images: ScoredImages) -> ScoredImages:
    """Return one row for each study, with the mean score of its samples and the labels of the
    first.
    """
    scans: dict[tuple[str, str], list[int]] = {}
    for row, sample in enumerate(images.samples):
        scans.setdefault((sample.patient, sample.study), []).append(row)
    first = [rows[0] for rows in scans.values()]
    return dataclasses.replace(
        images,
        scores_NL=np.stack([images.scores_NL[rows].mean(axis=0) for rows in scans.values()]),
        labels_NL=images.labels_NL[first],
        samples=tuple(images.samples[row] for row in first),
        positions=tuple(images.positions[row] for row in first),
        counts={**images.counts, "scans": len(scans)},
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
        rows = measure(scoring.ranking_groups(images)[:1], len(images.samples), resamples=0)
        values = {row.target: row.value for row in rows if not np.isnan(row.value)}
        return {
            f"zero_shot/auroc{'_' if name.startswith('macro') else '/'}{name}": value
            for name, value in values.items()
        }
