"""Calibration of zero-shot scores: Platt scaling of each finding, fitted on validation images.

    probability = sigmoid(slope * logit(score) + intercept)

`medvl eval calibrate` fits it and writes `calibration/PROMPTS.json` into the folder of the
checkpoint's evaluations (`medvl.eval.core.results`); `medvl serve` and `medvl infer` read it from
there. A calibration belongs to one checkpoint and one prompt set, whose hashes it holds.
Probabilities hold for patients like the validation patients: with another prevalence they are
biased.

A finding stays uncalibrated if the fit does not lower its Brier score on validation patients
outside of the fit.

Shape letters: N images, L classes.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.files import write_atomic
from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy, ScoredImages
from medvl.eval.core.full_pass import Loader, Model
from medvl.eval.core.metrics import Array, ProbabilityColumn
from medvl.eval.core.results import checkpoint_sha256, default_folder
from medvl.eval.zero_shot_classification.prompts import (
    COMPETING,
    STANDARDIZED,
    ClassPrompts,
    PromptSet,
)
from medvl.eval.zero_shot_classification.protocol import score_images
from medvl.models.checkpoint_folder import find_checkpoint

_VERSION = 1
_FOLDS = 5
_FEWEST = 10
"""Positives, and negatives, that a finding needs."""
_NEEDS = "needs "
"""Start of the reasons that more images would remove."""
NOT_MADE = "no calibration was made (medvl eval calibrate)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FindingCalibration:
    """Calibration of one finding, and its quality on validation patients outside of the fit."""

    slope: float
    intercept: float
    images: int
    positives: int
    brier_before: float
    brier_after: float
    ece_before: float
    ece_after: float
    """Brier score and calibration error, before and after, in a cross-validation over patients."""

    @property
    def is_worse(self) -> bool:
        """Whether the fit does not lower the Brier score on patients outside of the fit: it is
        not used then.
        """
        return not self.brier_after < self.brier_before

    @property
    def reason(self) -> str:
        """Why a fit that is worse is not used."""
        before = self.brier_before
        after = self.brier_after
        return (
            f"its Brier score on patients outside of the fit would go from {before:.3f} to "
            f"{after:.3f}"
        )

    def probability(self, score: float) -> float:
        """Return the calibrated probability of a score of the prompt set."""
        return float(_sigmoid(self.slope * _logit(np.array([score])) + self.intercept)[0])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Calibrations of the findings of a prompt set."""

    prompts: str
    prompts_sha256: str
    checkpoint_sha256: str
    data: Mapping[str, Any]
    """Corpus, split and fingerprint of the validation images, and the policy of their labels."""
    findings: Mapping[str, FindingCalibration]
    left_out: Mapping[str, str]
    """Finding -> reason why it has no calibration."""

    def of_texts(
        self, prompts: PromptSet, sentences: Mapping[str, ClassPrompts]
    ) -> dict[str, FindingCalibration]:
        """Return text -> calibration, of the texts that are scored with the sentences of a
        calibrated finding.

        Where classes compete, a score depends on the other texts: then all classes together are
        calibrated, or none.
        """
        finding_of = {sides: name for name, sides in prompts.classes.items()}
        named = {
            text: finding_of[sides] for text, sides in sentences.items() if sides in finding_of
        }
        if prompts.scoring in COMPETING and (
            {*named.values()} != {*prompts.classes} or len(named) < len(sentences)
        ):
            return {}
        return {text: self.findings[name] for text, name in named.items() if name in self.findings}


def calibration_path(checkpoint: Path, prompts: str) -> Path:
    """Return the path of the calibration of a checkpoint, such as RUN/best, for a prompt set."""
    return default_folder(checkpoint, "calibration") / f"{prompts}.json"


def calibrate(
    model: Model,
    loader: Loader,
    prompts: PromptSet,
    *,
    checkpoint: Path,
    policy: LabelPolicy | None = None,
    data: Mapping[str, Any] | None = None,
) -> Calibration:
    """Fit a calibration on validation images.

    Args:
        model: a dual-encoder.
        loader: validation images with labels, opened for evaluation.
        prompts: prompt set whose scores are probabilities, with its `other_classes` for labels that
            it does not list.
        checkpoint: folder of the model.
        policy: conversion of uncertain and missing labels.
        data: description of the validation images.

    Raises EvaluationError if no finding has enough images.
    """
    if prompts.scoring in STANDARDIZED or not prompts.gives_probabilities:
        message = (
            f"{prompts.name!r} gives no probabilities to calibrate: its scoring is "
            f"{prompts.scoring!r}"
        )
        raise EvaluationError(message, "unsupported", field="prompts")
    policy = policy or LabelPolicy()
    images = score_images(model, loader, prompts.for_labels(loader.source.label_names), policy)
    findings, left_out = _fit_all(images)
    if not findings and all(reason.startswith(_NEEDS) for reason in left_out.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise EvaluationError(
            f"no finding can be calibrated ({reasons}); use more validation images", "empty"
        )
    return Calibration(
        prompts=prompts.name,
        prompts_sha256=prompts.sha256,
        checkpoint_sha256=checkpoint_sha256(checkpoint),
        data={
            **(data or {}),
            "fingerprint": loader.source.fingerprint,
            "policy": dataclasses.asdict(policy),
        },
        findings=findings,
        left_out=left_out,
    )


def _fit_all(images: ScoredImages) -> tuple[dict[str, FindingCalibration], dict[str, str]]:
    findings: dict[str, FindingCalibration] = {}
    left_out: dict[str, str] = {}
    patients = np.array(images.patients)
    for name, score_N, label_N in zip(
        images.names, images.scores_NL.T, images.labels_NL.T, strict=True
    ):
        known_N = ~np.isnan(label_N)
        logit_N = _logit(score_N[known_N])
        positive_N = label_N[known_N] == 1
        if min(positive_N.sum(), (~positive_N).sum()) < _FEWEST:
            left_out[name] = (
                f"{_NEEDS}{_FEWEST} positive and {_FEWEST} negative images, has "
                f"{positive_N.sum()} and "
            )
            left_out[name] += str((~positive_N).sum())
            continue
        if len(set(patients[known_N])) < 2:
            left_out[name] = (
                f"{_NEEDS}images of two patients or more, for a cross-validation over patients"
            )
            continue
        slope, intercept = fit_platt(logit_N, positive_N)
        if slope <= 0:
            left_out[name] = "higher scores do not mean that the finding is likelier"
            continue
        held_out_N = _held_out(logit_N, positive_N, patients[known_N])
        before = _quality(score_N[known_N], positive_N)
        after = _quality(held_out_N, positive_N)
        fitted = FindingCalibration(
            slope=slope,
            intercept=intercept,
            images=len(positive_N),
            positives=int(positive_N.sum()),
            brier_before=before[0],
            brier_after=after[0],
            ece_before=before[1],
            ece_after=after[1],
        )
        if fitted.is_worse:
            left_out[name] = fitted.reason
        else:
            findings[name] = fitted
    return findings, left_out


def fit_platt(logit_N: Array, positive_N: np.ndarray, iterations: int = 100) -> tuple[float, float]:
    """Return (slope, intercept) of the likeliest logistic function of one score, by Newton's
    method.

    Targets are those of Platt (1999): (P + 1) / (P + 2) for the P positives and 1 / (M + 2) for the
    M negatives, so that the fit is finite where the classes do not overlap.
    """
    positives = positive_N.sum()
    negatives = (~positive_N).sum()
    target_N = np.where(positive_N, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    center = logit_N.mean()
    spread = logit_N.std() or 1.0
    design_N2 = np.stack([(logit_N - center) / spread, np.ones(len(logit_N))], axis=1)
    weight_2 = np.array([0.0, _logit(np.array([target_N.mean()]))[0]])
    loss = _log_loss(design_N2 @ weight_2, target_N)
    for _ in range(iterations):
        probability_N = _sigmoid(design_N2 @ weight_2)
        gradient_2 = design_N2.T @ (probability_N - target_N)
        variance_N = probability_N * (1 - probability_N)
        hessian_22 = (design_N2 * variance_N[:, None]).T @ design_N2 + 1e-9 * np.eye(2)
        step_2 = np.linalg.solve(hessian_22, gradient_2)
        rate = 1.0
        while (
            new := _log_loss(design_N2 @ (weight_2 - rate * step_2), target_N)
        ) > loss and rate > 1e-6:
            rate /= 2
        if loss - new < 1e-12 * len(target_N):
            break
        weight_2 = weight_2 - rate * step_2
        loss = new
    return float(weight_2[0] / spread), float(weight_2[1] - weight_2[0] * center / spread)


def _held_out(logit_N: Array, positive_N: np.ndarray, patients_N: np.ndarray) -> Array:
    """Return the probability of each image by a fit on the patients of the other folds."""
    _, patient_N = np.unique(patients_N, return_inverse=True)
    probability_N = np.empty(len(logit_N))
    for fold in range(_FOLDS):
        held_N = patient_N % _FOLDS == fold
        if held_N.any():
            slope, intercept = fit_platt(logit_N[~held_N], positive_N[~held_N])
            probability_N[held_N] = _sigmoid(slope * logit_N[held_N] + intercept)
    return probability_N


def _quality(probability_N: Array, positive_N: np.ndarray) -> tuple[float, float]:
    """Return the Brier score and the calibration error."""
    column = ProbabilityColumn(probability_N, positive_N.astype(np.float64))
    brier, error = column.metrics_RK(np.ones((len(probability_N), 1)))[0]
    return float(brier), float(error)


def _logit(score_N: Array) -> Array:
    clipped_N = np.clip(score_N, 1e-9, 1 - 1e-9)
    return np.asarray(np.log(clipped_N / (1 - clipped_N)))


def _sigmoid(logit_N: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(logit_N, -700, 700))))


def _log_loss(logit_N: Array, target_N: Array) -> float:
    return float((np.logaddexp(0, logit_N) - target_N * logit_N).sum())


def write_calibration(calibration: Calibration, path: Path, *, replace: bool = False) -> Path:
    """Write a calibration as JSON and return its path; missing folders are created.

    Raises EvaluationError "exists" where the file is of another checkpoint, unless `replace` is
    set.
    """
    if path.is_file() and not replace:
        earlier = read_calibration(path).checkpoint_sha256
        if earlier != calibration.checkpoint_sha256:
            message = (
                f"{path} is of another checkpoint (sha256 {earlier[:12]}) than this calibration "
                f"(sha256 {calibration.checkpoint_sha256[:12]}); give another file (--out), or "
                "replace it (--replace)"
            )
            raise EvaluationError(message, "exists", field="out")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"calibration_version": _VERSION, **dataclasses.asdict(calibration)}
    return write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises EvaluationError naming the file."""
    try:
        content = parse_json(path.read_bytes())
        if content.pop("calibration_version") != _VERSION:
            raise EvaluationError(
                f"{path} has another version; run medvl eval calibrate again", "version"
            )
        findings = {
            name: FindingCalibration(**values) for name, values in content.pop("findings").items()
        }
        numbers = [value for each in findings.values() for value in dataclasses.astuple(each)]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            raise ValueError("a number is not finite")
        # files of earlier versions hold them
        worse = {name: each.reason for name, each in findings.items() if each.is_worse}
        content["left_out"] = {**content["left_out"], **worse}
        used = {name: each for name, each in findings.items() if name not in worse}
        return Calibration(findings=used, **content)
    except FileNotFoundError:
        raise EvaluationError(
            f"{path} does not exist; run medvl eval calibrate", "not_found"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"{path} is not a calibration of medvl ({type(error).__name__}); run medvl "
            f"eval calibrate again"
        )
        raise EvaluationError(message, "malformed") from error


def calibration_for(
    checkpoint: Path, prompts: PromptSet, path: Path | None = None
) -> tuple[Calibration | None, str]:
    """Return the calibration of a checkpoint's scores by a prompt set, and "" or the reason why
    there is none.

    `path` is a file of `medvl eval calibrate`; None takes the one among the evaluations of the
    checkpoint, or the one in its folder. Raises EvaluationError if the file is missing or damaged.
    """
    default = calibration_path(checkpoint, prompts.name)
    if not default.is_file():  # the demo comes with one
        default = calibration_path(find_checkpoint(checkpoint), prompts.name)
    if path is None and not default.is_file():
        return None, NOT_MADE
    found = read_calibration(path or default)
    for name, expected in (
        ("checkpoint", checkpoint_sha256(checkpoint)),
        ("prompts", prompts.sha256),
    ):
        if getattr(found, f"{name}_sha256") != expected:
            return None, f"the calibration was made for another {name}"
    return found, ""


def describe_calibration(calibration: Calibration) -> str:
    """Return the data of a calibration, and the findings that stay uncalibrated with the
    reasons.
    """
    data = f"calibrated on {calibration.data.get('corpus')}, split {calibration.data.get('split')}"
    if not calibration.findings:
        data = "no finding could be calibrated"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in calibration.left_out.items())
    return f"{data}. Uncalibrated: {reasons}" if reasons else data


def calibration_table(calibration: Calibration) -> str:
    """Return the calibration as plain text: one line for each finding."""
    if not calibration.findings:
        return "\n".join(
            f"{name}: uncalibrated, {reason}" for name, reason in calibration.left_out.items()
        )
    head = ["finding", "images", "positive", "slope", "intercept", "Brier", "after", "ECE", "after"]
    rows: list[Sequence[str]] = [head]
    for name, each in calibration.findings.items():
        numbers = (
            each.slope,
            each.intercept,
            each.brier_before,
            each.brier_after,
            each.ece_before,
            each.ece_after,
        )
        rows.append(
            [name, str(each.images), str(each.positives), *(f"{number:.3f}" for number in numbers)]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(cells)
        )
        for cells in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    return "\n".join(
        [
            *lines,
            *(f"{name}: uncalibrated, {reason}" for name, reason in calibration.left_out.items()),
        ]
    )
