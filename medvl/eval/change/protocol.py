"""Classification of change from a pair of images, evaluated against MS-CXR-T's labels: zero-shot,
or by a linear probe.

Protocol "change", version 1 (the classes and the metric of Bannur et al., CVPR 2023; the prompts
are medvl's):

* An item is an image with its prior image and a finding that is labelled improving, stable or
  worsening.
* The score of a class is the mean similarity of the image with the sentences of that class about
  the finding. The highest score is the prediction; a tie is wrong.
* With `folds` the score of a class is the probability by a linear probe of the image's vector,
  which has not seen the patient (`medvl.eval.change.protocol`).
* The score of a class by a `ChangeClassifier` is its probability.
* "macro_accuracy" of a finding is the mean of the three classes' accuracies (of those that occur),
  "accuracy" the share of correct items; target "macro" is the mean over findings. Chance is 1/3 in
  macro accuracy.
* A model that takes a prior image gets it unless `use_prior` is False; images whose prior image is
  missing are counted, and scored without it.
* Intervals: patients are resampled with all their images.

Shape letters: N images, L findings, C classes of change, R resamples.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.label_names import spoken_name
from medvl.common.text_files import read_text
from medvl.common.untrusted import parse_json
from medvl.data.loading.sources import changes_of
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, Model, input_hashes, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, measure, subgroups_of
from medvl.eval.core.metrics import Array, mean_over_labels
from medvl.eval.core.results import Results
from medvl.eval.probing.features import Standardizer, comparable_probabilities
from medvl.eval.probing.protocol import choose_probe
from medvl.models.base import evaluating
from medvl.models.downstream.classifier import ChangeClassifier
from medvl.models.dual_encoders.biovil_t import SupportsPriors
from medvl.schema import CHANGES, Batch, Embeddings, Sample

# Scores of change from a linear probe, cross-validated over patients: MS-CXR-T has labels of test
# images only.
#
# Shape letters: N images, D feature dim, L findings, C classes of change, K = L x C.


def cross_validated_scores(
    vector_ND: Tensor,
    truth_NL: NDArray[np.int64],
    patients: Sequence[str],
    *,
    folds: int,
    seed: int,
) -> Array:
    """Return (N, L, C): probabilities of each class, by probes that have not seen the patient.

    One logistic regression per finding and class, against the other classes. To score a fold,
    probes with several penalties are fitted to all folds but this and the next one, which chooses
    the penalty by its mean AUROC.

    Args:
        vector_ND: features of the images, from pairs of images where the model takes them.
        truth_NL: index of the class in `CHANGES`; -1 without a label.
        patients: patient of each image; a patient's images are in one fold.
        folds: number of folds, at least 3.
        seed: seed of the assignment of patients to folds.

    Raises EvaluationError for fewer than 3 folds, or fewer patients than folds.
    """
    names, patient_N = np.unique(np.asarray(patients), return_inverse=True)
    if not 3 <= folds <= len(names):
        message = (
            f"expected from 3 folds to as many as there are patients ({len(names)}), got {folds}"
        )
        raise EvaluationError(message, "out_of_range", field="folds")
    fold_N = (np.random.default_rng(seed).permutation(len(names)) % folds)[patient_N]
    truth_NL1 = truth_NL[:, :, None]
    class_NLC = np.where(truth_NL1 >= 0, truth_NL1 == np.arange(len(CHANGES)), np.nan)
    y_NK = class_NLC.reshape(len(truth_NL), -1)
    scores_NK = np.zeros_like(y_NK)
    for fold in range(folds):
        test_N = fold_N == fold
        valid_N = fold_N == (fold + 1) % folds
        train_N = ~(test_N | valid_N)
        standardize = Standardizer.fit(vector_ND[train_N])
        train_x, valid_x, test_x = (
            standardize(vector_ND[rows_N]) for rows_N in (train_N, valid_N, test_N)
        )
        probe = choose_probe(train_x, y_NK[train_N], valid_x, y_NK[valid_N]).probe
        scores_NK[test_N] = comparable_probabilities(probe, test_x, y_NK[train_N])
    return scores_NK.reshape(class_NLC.shape)


# Sentences about change: the prompts of `medvl.eval.change.protocol`.

_DEFAULT = {
    "improving": (
        "{finding} is improving.",
        "{finding} has improved.",
        "{finding}, decreased since the prior study.",
    ),
    "stable": (
        "{finding} is stable.",
        "{finding} is unchanged.",
        "{finding}, unchanged since the prior study.",
    ),
    "worsening": (
        "{finding} is worsening.",
        "{finding} has worsened.",
        "{finding}, increased since the prior study.",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ChangePrompts:
    """Templates of each class in `CHANGES`; `{finding}` is replaced by the finding's name in
    lower case.
    """

    name: str
    templates: Mapping[str, tuple[str, ...]]

    @property
    def sha256(self) -> str:
        """Hash of the templates."""
        return hashlib.sha256(json.dumps(self.templates, sort_keys=True).encode()).hexdigest()

    def sentences(self, finding: str) -> list[list[str]]:
        """Return the sentences of each class about one finding, each starting with a capital
        letter.
        """
        filled = [
            [t.replace("{finding}", spoken_name(finding)) for t in self.templates[change]]
            for change in CHANGES
        ]
        return [[text[:1].upper() + text[1:] for text in texts] for texts in filled]


def load_change_prompts(path: Path | str | None = None) -> ChangePrompts:
    """Return the default templates, or those of a JSON file: {"improving": [...], "stable": [...],
    "worsening": [...]}.

    Raises EvaluationError, naming the file, unless each class has templates with `{finding}`.
    """
    if path is None:
        return ChangePrompts("default", _DEFAULT)
    path = Path(path)
    try:
        data = parse_json(
            read_text(path, EvaluationError, field="prompts", what="a JSON file of prompts")
        )
    except ValueError as error:
        message = f"{path} is not valid JSON: {error}"
        raise EvaluationError(message, "malformed", field="prompts") from error
    valid = isinstance(data, dict) and set(data) == set(CHANGES)
    if not valid or not all(_are_templates(templates) for templates in data.values()):
        message = (
            f"{path}: expected an object with lists of sentences with {{finding}} for "
            f"{', '.join(CHANGES)}"
        )
        raise EvaluationError(message, "malformed", field="prompts")
    return ChangePrompts(path.name, {change: tuple(data[change]) for change in CHANGES})


def _are_templates(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, str) and "{finding}" in t for t in value)
    )


PROTOCOL = "change"
PROTOCOL_VERSION = 1
Scorer = Callable[[Batch], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeResult:
    """Results of a change classification, with the images, their scores and labels."""

    results: Results
    findings: tuple[str, ...]
    samples: tuple[Sample, ...]
    """Images with labels."""
    positions: tuple[int, ...]
    """Position of each image in the source."""
    scores_NLC: Array
    truth_NL: NDArray[np.int64]
    """Index of the class in `CHANGES`; -1 without a label."""

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one JSON line per image: key, patient, subgroups, and scores and label of each
        labelled finding.
        """
        for sample, scores_LC, truth_L in zip(
            self.samples, self.scores_NLC, self.truth_NL, strict=True
        ):
            yield {
                "key": sample.key,
                "patient": sample.patient,
                "subgroups": subgroups_of(sample),
                "prior": sample.extra.get("prior"),
                "findings": {
                    name: {
                        "label": CHANGES[truth],
                        "scores": dict(zip(CHANGES, scores_C.tolist(), strict=True)),
                    }
                    for name, scores_C, truth in zip(self.findings, scores_LC, truth_L, strict=True)
                    if truth >= 0
                },
            }


def change_classification(
    model: Model | ChangeClassifier,
    loader: Loader,
    prompts: ChangePrompts | None = None,
    *,
    use_prior: bool = True,
    folds: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> ChangeResult:
    """Evaluate change classification by the protocol of this module.

    Args:
        model: a classifier of change, or a dual-encoder; one that takes prior images has
            `embed_with_prior`.
        loader: images with `extra["change"]`, and for such a model their prior images
            (`Inputs.prior_image`).
        prompts: sentences of each class; None for the default ones. A linear probe and a classifier
            read none.
        use_prior: give the prior image to a dual-encoder that takes one; False measures what it
            adds. A classifier reads what it was trained with.
        folds: None for zero-shot classification; else the number of folds of patients of a linear
            probe.
        resamples, seed: number of the bootstrap resamples; seed of these and of the folds.
        checkpoint: the model's, whose hash is recorded.

    Findings that a classifier does not predict are left out.

    Raises EvaluationError where labels of change or images are missing, a score is not finite,
    folds do not fit, or a classifier predicts none of the findings.
    """
    prompts = prompts or load_change_prompts()
    by_key = samples_by_key(loader.source)
    findings = _labelled_findings(sample for _, sample in by_key.values())
    score, findings, use_prior = _choose_scorer(model, prompts, findings, use_prior, folds)
    encoded_NK, keys, without_prior, unreadable = _encode(model, loader, by_key, score)
    positions, samples = zip(*(by_key[key] for key in keys), strict=True)
    truth_NL = np.array([[_truth(sample, finding) for finding in findings] for sample in samples])
    patients = [sample.patient for sample in samples]
    if folds is None:
        scores_NLC = encoded_NK.double().numpy().reshape(*truth_NL.shape, -1)
    else:
        scores_NLC = cross_validated_scores(encoded_NK, truth_NL, patients, folds=folds, seed=seed)
    groups = [change_metrics(scores_NLC, truth_NL, findings)]
    rows = measure(groups, len(samples), resamples=resamples, seed=seed, groups=patients)
    recorded = _recorded(model, folds, prompts.name)
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rows,
        config={"use_prior": use_prior, "resamples": resamples, "seed": seed} | recorded,
        inputs=input_hashes(checkpoint, manifest=loader)
        | ({"prompts": prompts.sha256} if "prompts" in recorded else {}),
        details={
            "images": len(samples),
            "without_prior": without_prior,
            "unreadable": unreadable,
            "labels": {
                name: _counts(truth_N) for name, truth_N in zip(findings, truth_NL.T, strict=True)
            },
        },
    )
    return ChangeResult(
        results=results, findings=findings, samples=samples, positions=positions,
        scores_NLC=scores_NLC, truth_NL=truth_NL,
    )  # fmt: skip


def _labelled_findings(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Return the findings that have labels of change, sorted. Raises EvaluationError where there
    is none.
    """
    findings = tuple(sorted({name for sample in samples for name in changes_of(sample)}))
    if not findings:
        message = "no image has a label of change; convert MS-CXR-T with `medvl shards ms-cxr-t`"
        raise EvaluationError(message, "missing", field="data")
    return findings


def _truth(sample: Sample, finding: str) -> int:
    """Return the index of the class in `CHANGES`, -1 without a label."""
    change = changes_of(sample)
    return CHANGES.index(change[finding]) if finding in change else -1


def _counts(truth_N: NDArray[np.int64]) -> dict[str, int]:
    """Return the number of labels of each class."""
    return dict(
        zip(
            CHANGES,
            np.bincount(truth_N[truth_N >= 0], minlength=len(CHANGES)).tolist(),
            strict=True,
        )
    )


def _vectors(images: Embeddings) -> torch.Tensor:
    return images.global_NE


def _prompt_scorer(
    model: Model, prompts: ChangePrompts, findings: Sequence[str]
) -> Callable[[Embeddings], torch.Tensor]:
    """Return a function from images to (N, L x C), their mean similarity with the sentences of
    each class.
    """
    sentences = [texts for finding in findings for texts in prompts.sentences(finding)]
    sizes = [len(texts) for texts in sentences]
    with torch.no_grad(), evaluating(model):
        texts = model.embed_texts([text for group in sentences for text in group])

    def score(images: Embeddings) -> torch.Tensor:
        parts = model.similarity(images, texts).float().split(sizes, dim=1)
        return torch.stack([part.mean(dim=1) for part in parts], dim=1)

    return score


def _choose_scorer(
    model: Model | ChangeClassifier,
    prompts: ChangePrompts,
    findings: tuple[str, ...],
    use_prior: bool,
    folds: int | None,
) -> tuple[Scorer, tuple[str, ...], bool]:
    """Return a function from a batch to scores or vectors, the findings, and whether prior
    images are read.
    """
    if not isinstance(model, ChangeClassifier):
        use_prior = use_prior and isinstance(model, SupportsPriors)
        of_images = _vectors if folds is not None else _prompt_scorer(model, prompts, findings)
        return functools.partial(_embedded, model, use_prior, of_images), findings, use_prior
    if folds is not None:
        message = "folds apply to a probe of a dual-encoder; leave them out for a classifier"
        raise EvaluationError(message, "conflict", field="folds")
    findings = _known_findings(model, findings)
    return functools.partial(_probabilities, model, findings), findings, model.config.use_prior


def _known_findings(model: ChangeClassifier, findings: Sequence[str]) -> tuple[str, ...]:
    known = tuple(finding for finding in findings if finding in model.config.findings)
    if not known:
        message = (
            f"the classifier predicts {', '.join(model.config.findings)}, the labels are "
            f"of {', '.join(findings)}"
        )
        raise EvaluationError(message, "mismatch", field="checkpoint")
    return known


def _probabilities(model: ChangeClassifier, findings: Sequence[str], batch: Batch) -> torch.Tensor:
    columns = [model.config.findings.index(finding) for finding in findings]
    return model.change_logits(batch)[:, columns].double().softmax(dim=2).flatten(1)


def _recorded(model: Model | ChangeClassifier, folds: int | None, prompts: str) -> dict[str, Any]:
    """Return the settings of the scores."""
    if isinstance(model, ChangeClassifier):
        return {"classifier": True}
    return {"prompts": prompts} if folds is None else {"folds": folds}


@torch.no_grad()
def _encode(
    model: Model | ChangeClassifier,
    loader: Loader,
    by_key: Mapping[str, tuple[int, Sample]],
    score: Scorer,
) -> tuple[torch.Tensor, list[str], int, dict[str, int]]:
    """Return (N, K) on the CPU and keys of the labelled images, how many lack a prior image, and
    unreadable images.
    """
    batches = FullPass(loader)
    keys = list[str]()
    without_prior = 0
    parts: list[torch.Tensor] = []
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            rows = [row for row, key in enumerate(batch.keys) if changes_of(by_key[key][1])]
            if not rows:
                continue
            pairs = batch.rows(rows).to(device)
            parts.append(score(pairs).cpu())
            keys += pairs.keys
            without_prior += 0 if pairs.has_prior_B is None else int((~pairs.has_prior_B).sum())
    encoded_NK = torch.cat(parts)
    if not encoded_NK.isfinite().all():
        raise EvaluationError("the model's scores are not finite: check its weights", "nonfinite")
    return encoded_NK, keys, without_prior, batches.unreadable


def _embedded(
    model: Model, use_prior: bool, of_images: Callable[[Embeddings], torch.Tensor], batch: Batch
) -> torch.Tensor:
    if not (use_prior and isinstance(model, SupportsPriors)):
        return of_images(model.embed_images(batch.image_BCHW))
    if batch.prior_BCHW is None or batch.has_prior_B is None:
        message = "the loader makes no prior images; open it with inputs=Inputs(prior_image=True)"
        raise EvaluationError(message, "missing", field="loader")
    return of_images(model.embed_with_prior(batch.image_BCHW, batch.prior_BCHW, batch.has_prior_B))


def change_metrics(
    scores_NLC: Array, truth_NL: NDArray[np.int64], findings: Sequence[str]
) -> MetricGroup:
    """Return accuracy and macro accuracy of each finding, and their means over findings."""
    items, count, classes = scores_NLC.shape
    of_truth_NL1 = np.take_along_axis(scores_NLC, np.maximum(truth_NL, 0)[..., None], axis=2)
    right_NL = (scores_NLC >= of_truth_NL1).sum(axis=2) == 1
    class_NLC = (truth_NL[..., None] == np.arange(classes)).astype(np.float64)
    class_NK = class_NLC.reshape(items, -1)
    right_NK = (class_NLC * right_NL[..., None]).reshape(items, -1)
    labelled = (truth_NL >= 0).sum(axis=0).tolist()
    occurs_LC = class_NLC.any(axis=0)
    occurs_L = occurs_LC.any(axis=1)
    rows = [
        MetricRow(metric=metric, target=target, n=n)
        for metric in ("macro_accuracy", "accuracy")
        for target, n in [("macro", sum(labelled)), *zip(findings, labelled, strict=True)]
    ]

    def statistic(counts_NR: Array) -> Array:
        drawn_RLC = (counts_NR.T @ class_NK).reshape(-1, count, classes)
        right_RLC = (counts_NR.T @ right_NK).reshape(-1, count, classes)
        within_RLC = np.where(drawn_RLC > 0, right_RLC / np.maximum(drawn_RLC, 1), np.nan)
        macro_RL = np.stack(
            [mean_over_labels(within_RLC[:, at], occurs_LC[at]) for at in range(count)], axis=1
        )
        drawn_RL = drawn_RLC.sum(axis=2)
        accuracy_RL = np.where(
            drawn_RL > 0, right_RLC.sum(axis=2) / np.maximum(drawn_RL, 1), np.nan
        )
        return np.concatenate(
            [
                mean_over_labels(macro_RL, occurs_L)[:, None],
                macro_RL,
                mean_over_labels(accuracy_RL, occurs_L)[:, None],
                accuracy_RL,
            ],
            axis=1,
        )

    return MetricGroup(rows, statistic)


class ChangeEval:
    """Accuracy of a `ChangeClassifier` during training, without intervals.

    `ChangeEval(loader)(model)` returns "change/macro_accuracy" and "change/accuracy", means over
    findings.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __call__(self, model: ChangeClassifier) -> dict[str, float]:
        """Return the metrics of the current model. Raises EvaluationError as
        `change_classification` does.
        """
        results = change_classification(model, self.loader, resamples=0).results
        return {
            f"change/{metric}": results.row(metric, "macro").value
            for metric in ("macro_accuracy", "accuracy")
        }
