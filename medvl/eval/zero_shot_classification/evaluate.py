"""Zero-shot classification: findings scored by their sentences, judged against labels.

Protocol "zero_shot", version 1:

* Every readable image of the loader is scored once; a score depends on its image and the prompts alone, but for the
  scoring "gloria_published".
* Several checkpoints are an ensemble: an image's score is the mean of theirs.
* AUROC and average precision a finding; "macro" is the mean over the findings that have both classes, and
  "macro_competition" that over the five of the CheXpert competition, where all five have.
* Yes/no metrics only with a validation loader: thresholds are chosen there and nowhere else, and a patient in both
  sets is an error.
* Brier score and calibration error where the prompts give probabilities.
* Where classes compete, the share of images whose one class scores highest.
* Subgroup rows as `medvl.eval.classification.subgroups` says.
* Intervals: patients are drawn, with all their images (`bootstrap_unit="image"`: images are). All rows share the draws.

Shape letters: N images, L classes, R resamples.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from medvl.eval.core.full_pass import input_hashes, samples_by_key
from medvl.eval.core.interfaces import Loader, Model, Source
from medvl.eval.core.metric_rows import MetricGroup, measure, top1_metrics
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.zero_shot_classification.prompts import COMPETING, PromptSet, load_prompts
from medvl.eval.zero_shot_classification.scores import predict

PROTOCOL, PROTOCOL_VERSION = "zero_shot", 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShotResult(ClassificationResult):
    """The results with the scores behind them, and the prompts that gave these."""

    prompts: PromptSet

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities, so that calibration can be judged."""
        return self.prompts.gives_probabilities


def zero_shot(
    model: Model | Sequence[Model],
    loader: Loader,
    prompts: PromptSet | str | Path = "chexpert_ensemble",
    *,
    valid_loader: Loader | None = None,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | Sequence[str | Path] | None = None,
) -> ZeroShotResult:
    """Judge a dual-encoder on labelled images without training on labels; the protocol is at the top of this module.

    `prompts` is a set, the name of one of ours, or the path of a JSON file. `valid_loader` has images of other
    patients, on which thresholds are chosen to maximise `threshold_rule`. `smallest_subgroup` is how many positives,
    and negatives, the AUROC of a subgroup needs. `autocast` is a type for the image encoder, such as `torch.bfloat16`;
    the hash of `checkpoint` (a directory or a file) goes into the results. Several models are judged as an ensemble.

    Raises:
        EvaluationError: no class can be judged, scores are not whole, or models and checkpoints do not go together.
        SplitError: test and validation images share patients.
    """
    check_bootstrap_unit(bootstrap_unit)
    prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
    policy = policy or LabelPolicy()
    members = _hashes(checkpoint, len(model) if isinstance(model, Sequence) else 1)
    config = {
        "prompts": _describe(prompts),
        "policy": dataclasses.asdict(policy),
        "threshold_rule": None if valid_loader is None else threshold_rule,
        "bootstrap_unit": bootstrap_unit,
        "resamples": resamples,
        "seed": seed,
        "smallest_subgroup": smallest_subgroup,
        "autocast": None if autocast is None else str(autocast),
        **({"ensemble": members} if len(members) > 1 else {}),
    }
    test = score_images(model, loader, prompts, policy, autocast)
    thresholds = None
    if valid_loader is not None:
        valid = score_images(model, valid_loader, prompts, policy, autocast)
        thresholds = choose_thresholds(valid, test, threshold_rule)
    results = evaluate_scores(
        test,
        _blocks(test, prompts, thresholds),
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config=config,
        inputs={
            **input_hashes(None, manifest=loader, validation_manifest=valid_loader),
            "checkpoint": _one_hash(members),
            "prompts": prompts.sha256,
        },
    )
    return ZeroShotResult(results=results, prompts=prompts, images=test, thresholds=thresholds)


def _hashes(checkpoint: str | Path | Sequence[str | Path] | None, models: int) -> list[str]:
    """One for each checkpoint. Raises `EvaluationError` where there are not as many as models, or two are the same."""
    if checkpoint is None:
        return []
    paths = [checkpoint] if isinstance(checkpoint, str | Path) else checkpoint
    if len(paths) != models:
        raise EvaluationError(f"{models} models with {len(paths)} checkpoints: name one for each")
    hashes = [checkpoint_sha256(path) for path in paths]
    for path, found in zip(paths, hashes, strict=True):
        if hashes.count(found) > 1:
            raise EvaluationError(f"{path} stands twice in the ensemble, or its weights do: name each checkpoint once")
    return hashes


def _one_hash(hashes: Sequence[str]) -> str | None:
    """Of a checkpoint its own; of an ensemble that of its members' hashes, a line each."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return hashlib.sha256("".join(f"{found}\n" for found in hashes).encode()).hexdigest()


def score_images(
    model: Model | Sequence[Model],
    loader: Loader,
    prompts: PromptSet,
    policy: LabelPolicy,
    autocast: torch.dtype | None = None,
) -> ScoredImages:
    """Every image of a loader with its scores and its labels under the policy. Raises `EvaluationError`."""
    source = loader.source
    names = _classes_in_common(prompts, source)
    predictions = predict(model, loader, [prompts], autocast=autocast)
    columns = [list(prompts.classes).index(name) for name in names]
    resolved = policy.resolve(predictions.labels_NL, predictions.label_names)
    place_of = samples_by_key(source)
    positions, samples = zip(*(place_of[key] for key in predictions.keys), strict=True)
    account = image_counts(samples, predictions.unreadable, resolved, names)
    account["classes_without_labels"] = [name for name in prompts.classes if name not in names]
    return ScoredImages(
        names=names,
        scores_NL=predictions.scores_NL[0][:, columns],
        labels_NL=resolved.labels_NL[:, [predictions.label_names.index(name) for name in names]],
        samples=samples,
        positions=positions,
        account=account,
    )


def _classes_in_common(prompts: PromptSet, source: Source) -> tuple[str, ...]:
    names = tuple(name for name in prompts.classes if name in source.label_names)
    if not names:
        raise EvaluationError(
            f"prompt set {prompts.name!r} ({', '.join(prompts.classes)}) and the labels of the data "
            f"({', '.join(source.label_names) or 'none'}) have no class in common"
        )
    return names


def _blocks(test: ScoredImages, prompts: PromptSet, thresholds: Mapping[str, float] | None) -> list[MetricGroup]:
    """All rows but those of subgroups."""
    blocks = ranking_groups(test)
    blocks += decision_groups(test, thresholds, probabilities=prompts.gives_probabilities)
    if prompts.scoring in COMPETING:
        blocks.append(top1_metrics(test.scores_NL, test.labels_NL))
    return blocks


def _describe(prompts: PromptSet) -> dict[str, Any]:
    fields = ("name", "version", "scoring", "temperature", "ensemble")
    return {**{field: getattr(prompts, field) for field in fields}, "classes": list(prompts.classes)}


class ZeroShotEval:
    """Zero-shot AUROC while a model is being trained: `ZeroShotEval(loader)(model)` is a flat mapping of numbers.

    "zero_shot/auroc_macro", "zero_shot/auroc_macro_competition" where all five can be judged, and
    "zero_shot/auroc/<class>" for each class that can; no intervals. Making one raises `EvaluationError` where the data
    has no label of the prompts: better now than after the first epoch.
    """

    def __init__(
        self,
        loader: Loader,
        prompts: PromptSet | str | Path = "chexpert_ensemble",
        *,
        policy: LabelPolicy | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.loader, self.autocast = loader, autocast
        self.prompts = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
        self.policy = policy or LabelPolicy()
        _classes_in_common(self.prompts, loader.source)

    def __call__(self, model: Model) -> dict[str, float]:
        """The numbers for the model as it is now. Raises `EvaluationError` as `zero_shot` does."""
        images = score_images(model, self.loader, self.prompts, self.policy, self.autocast)
        rows = measure(_blocks(images, self.prompts, None)[:1], len(images.samples), resamples=0)
        named = {row.target: row.value for row in rows if not np.isnan(row.value)}
        return {
            f"zero_shot/auroc{'_' if name.startswith('macro') else '/'}{name}": value for name, value in named.items()
        }
