"""Agreement of generated images with their prompts: findings, negated findings, and sides.

Shape letters: N images, L findings, R resamples, P permutations.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.label_names import match_labels, named_as
from medvl.data.loading.sources import color_for
from medvl.data.reports.labeler import CHEXPERT, Conventions, find_mentions
from medvl.data.reports.statements import places_of
from medvl.data.splits import check_disjoint
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.full_pass import concatenate, embed_texts, encode_batch
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    mean_metrics,
    means_over,
    measure,
    median_metric,
    ranking_metrics,
)
from medvl.eval.core.metrics import Array, bootstrap_auroc
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.generation.inputs import ImageSet, LoaderOptions
from medvl.eval.probing.features import FeatureTable, LinearProbe, ProbedEncoder, Standardizer
from medvl.eval.probing.protocol import choose_probe
from medvl.models.base import System, evaluating
from medvl.models.checkpoint_folder import WEIGHTS, find_checkpoint
from medvl.models.downstream.classifier import Classifier
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import FINDINGS, POSITIVE

# The classifier of findings that was trained on real images.
#
# Shape letters: N images, D feature dim, L labels.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FindingClassifier:
    """A linear classifier of findings on the pooled features of an image encoder."""

    names: tuple[str, ...]
    """Findings, in the order of `FINDINGS`."""
    probe: LinearProbe
    standardize: Standardizer | None
    """Standardisation of the features; None for a head that was trained on them as they are."""
    details: Mapping[str, Any]

    def logits(self, x_ND: Tensor) -> Array:
        """Return (N, L) logits in the order of `names`."""
        x_ND = x_ND.double() if self.standardize is None else self.standardize(x_ND)
        logits_NL: Array = F.linear(x_ND, self.probe.weight_LD, self.probe.bias_L).numpy()
        return logits_NL


def classifier_of(model: System) -> FindingClassifier | None:
    """Return the linear head of a fine-tuned classifier; None for other systems, whose encoder
    needs a probe.

    Raises EvaluationError if none of its labels is one of `FINDINGS`.
    """
    if not isinstance(model, Classifier):
        return None
    labels = model.config.labels
    names = tuple(name for name in FINDINGS if name in labels)
    if not names:
        message = (
            f"the classifier has none of the findings {', '.join(FINDINGS)}, which "
            f"prompts are read for"
        )
        raise EvaluationError(message, "mismatch", field="classifier")
    columns = [labels.index(name) for name in names]
    head = model.label_head
    with torch.no_grad():
        probe = LinearProbe(head.weight[columns].double().cpu(), head.bias[columns].double().cpu())
    return FindingClassifier(
        names=names, probe=probe, standardize=None, details={"kind": "fine-tuned classifier"}
    )


def fit_classifier(
    train: FeatureTable, valid: FeatureTable, policy: LabelPolicy
) -> FindingClassifier:
    """Fit a linear probe for the findings of the training shards; its penalty is chosen on the
    validation images.

    Raises EvaluationError if the shards have no label of `FINDINGS` with positives and negatives,
    SplitError if they share a patient.
    """
    check_disjoint({"train": train.patients, "validation": valid.patients}, "the classifier")
    names = findings_of(train, policy)
    standardize = Standardizer.fit(train.x_ND)
    choice = choose_probe(
        standardize(train.x_ND),
        labels_of(train, names, policy),
        standardize(valid.x_ND),
        labels_of(valid, names, policy),
    )
    details = {
        "kind": "linear probe",
        "images": len(train.samples),
        "penalty": choice.penalty,
        "validation_auroc": choice.auroc,
        "converged": choice.probe.converged,
    }
    return FindingClassifier(
        names=names, probe=choice.probe, standardize=standardize, details=details
    )


def findings_of(table: FeatureTable, policy: LabelPolicy) -> tuple[str, ...]:
    """Return the findings with positives and negatives. Raises EvaluationError if there are
    none.
    """
    present = list(match_labels(FINDINGS, table.label_names))
    labels_NL = labels_of(table, present, policy) if present else np.zeros((1, 0))
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    names = tuple(name for name, both in zip(present, both_L, strict=True) if both)
    if not names:
        message = (
            f"expected training labels of one of {', '.join(FINDINGS)} with both classes, got none"
        )
        raise EvaluationError(message, "empty", field="train")
    return names


def labels_of(
    table: FeatureTable, names: tuple[str, ...] | list[str], policy: LabelPolicy
) -> Array:
    """Return the labels under the policy, in the columns of `names`; NaN for a name that the
    table lacks.
    """
    known = named_as(table.label_names, FINDINGS)
    return columns_of(policy.apply(table.labels_NL, known), known, names)


def columns_of(
    labels_NL: Array, present: tuple[str, ...], names: tuple[str, ...] | list[str]
) -> Array:
    """Return the columns of some names; NaN for a name that is not present."""
    empty_N = np.full(len(labels_NL), np.nan)
    columns = [labels_NL[:, present.index(name)] if name in present else empty_N for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((len(labels_NL), 0))


def auroc_on(
    classifier: FindingClassifier, table: FeatureTable, policy: LabelPolicy
) -> dict[str, float]:
    """Return the AUROC of each finding on real images; undefined ones are left out."""
    labels_NL = labels_of(table, classifier.names, policy)
    auroc_L, _, _ = bootstrap_auroc(classifier.logits(table.x_ND), labels_NL, resamples=0)
    return {
        name: value
        for name, value in zip(classifier.names, auroc_L.tolist(), strict=True)
        if not np.isnan(value)
    }


_SHUFFLES = 200
SHUFFLED = "shuffled prompts"
_NOT_NEGATED = ("No Finding", "Support Devices")
_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """Settings of the bootstrap; patients, or prompts without one, are resampled with all their
    images.
    """

    resamples: int = 1000
    seed: int = 0

    def measure(
        self, groups: Sequence[MetricGroup], patients: Sequence[str]
    ) -> tuple[MetricRow, ...]:
        """Return the rows of all groups with intervals."""
        return measure(
            groups, len(patients), resamples=self.resamples, seed=self.seed, groups=list(patients)
        )


def renamed(group: MetricGroup, metric: str, subgroup: str) -> MetricGroup:
    """Return a group whose rows have another metric and subgroup."""
    rows = [dataclasses.replace(row, metric=metric, subgroup=subgroup) for row in group.rows]
    return MetricGroup(rows, group.statistic)


def stated_labels(images: ImageSet, names: Sequence[str], policy: LabelPolicy) -> Array:
    """Return the findings of the prompts under a policy: 1, 0 or NaN."""
    return columns_of(policy.apply(images.labels_NL, FINDINGS), FINDINGS, list(names))


def prompted_findings(
    images: ImageSet,
    classifier: FindingClassifier,
    policy: LabelPolicy,
    resampling: Resampling,
    *,
    like: Array,
) -> tuple[MetricRow, ...]:
    """Return the AUROC of the classifier's score of the images against the findings that their
    prompts state.

    Means are over the findings with both classes in `like`, the labels of the generated images, so
    that those of generated and real images compare. Rows have the name of the set as subgroup.
    """
    labels_NL = stated_labels(images, classifier.names, policy)
    logits_NL = classifier.logits(images.scored.x_ND)
    group = findings_metrics(logits_NL, labels_NL, classifier.names, like=like, name=images.name)
    return resampling.measure([group], images.patients)


def findings_metrics(
    logits_NL: Array, labels_NL: Array, names: Sequence[str], *, like: Array, name: str
) -> MetricGroup:
    """Return the AUROC of each finding of a set of images, and the means of `prompted_findings`."""
    return renamed(
        ranking_metrics("auroc", logits_NL, labels_NL, names, means=means_over(names, like)),
        "auroc",
        name,
    )


def shuffled_findings(
    images: ImageSet, classifier: FindingClassifier, policy: LabelPolicy, seed: int = 0
) -> tuple[MetricRow, ...]:
    """Return `prompted_findings` of images against other images' prompts: the mean over 200
    permutations of them.

    The interval holds 95 % of the permutations: the values of images that are unrelated to their
    prompts.
    """
    labels_NL = stated_labels(images, classifier.names, policy)
    logits_NL = classifier.logits(images.scored.x_ND)
    means = means_over(classifier.names, labels_NL)
    keys = [sample.extra["prompt_key"] for sample in _samples(images)]
    of_key = {key: row for row, key in reversed(list(enumerate(keys)))}
    distinct = list(of_key)
    values = []
    for number in range(_SHUFFLES):
        order = np.random.default_rng((seed, number)).permutation(len(distinct))
        shuffled = [distinct[place] for place in order.tolist()]
        other = dict(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))
        rows = [of_key[other[key]] for key in keys]
        group = ranking_metrics("auroc", logits_NL, labels_NL[rows], classifier.names, means=means)
        values.append(group.statistic(np.ones((len(keys), 1)))[0])
    named = renamed(
        ranking_metrics("auroc", logits_NL, labels_NL, classifier.names, means=means),
        "auroc",
        SHUFFLED,
    )
    return tuple(
        _of_permutations(row, column)
        for row, column in zip(named.rows, np.array(values).T, strict=True)
    )


def _of_permutations(row: MetricRow, values_P: Array) -> MetricRow:
    known_P = values_P[~np.isnan(values_P)]
    if not len(known_P):
        return row
    low, high = np.quantile(known_P, (0.025, 0.975)).tolist()
    return dataclasses.replace(row, value=float(known_P.mean()), low=low, high=high)


def negated_findings(
    images: ImageSet, classifier: FindingClassifier, resampling: Resampling
) -> tuple[MetricRow, ...]:
    """Return the AUROC among images whose prompts name a finding: asserted against negated ones.

    Empty where no finding is asserted by one prompt and negated by another.
    """
    names = [name for name in classifier.names if name not in _NOT_NEGATED]
    labels_NL = columns_of(images.labels_NL, FINDINGS, names)
    labels_NL[labels_NL == -1] = np.nan
    means = means_over(names, labels_NL)
    if not means:
        return ()
    columns = [classifier.names.index(name) for name in names]
    scores_NL = classifier.logits(images.scored.x_ND)[:, columns]
    group = ranking_metrics("auroc", scores_NL, labels_NL, names, means=means)
    return resampling.measure([renamed(group, "negation_auroc", images.name)], images.patients)


def sides_of(prompt: str, conventions: Conventions = CHEXPERT) -> dict[str, str]:
    """Return finding -> "left" or "right" of the findings that a text places on one side of the
    patient only.
    """
    all_sides: dict[str, set[str]] = {}
    mentions = find_mentions(prompt, conventions)
    for mention, (sides, _) in zip(mentions, places_of(mentions), strict=True):
        if mention.value == POSITIVE:
            all_sides.setdefault(mention.finding, set()).update(sides or ["unknown"])
    known = {finding: sides - {"unknown"} for finding, sides in all_sides.items()}
    return {
        finding: side
        for finding, sides in known.items()
        if len(sides) == 1 and (side := min(sides)) in _SIDES
    }


_SIDES = ("left", "right")


def prompted_sides(
    images: ImageSet,
    classifier: FindingClassifier,
    encoder: ProbedEncoder,
    resampling: Resampling,
    conventions: Conventions = CHEXPERT,
) -> tuple[MetricRow, ...]:
    """Return the AUROC of prompts with a finding on the left against the same finding on the right.

    The score of an image is the classifier's logit of the image's half with the patient's left,
    beside its own mirror image, minus that of the other half beside its mirror image: it needs no
    classifier of sides. Frontal images are displayed with the patient's left on the right. Empty
    where no finding has prompts of both sides.
    """
    sides = [sides_of(prompt, conventions) for prompt in images.prompts]
    values = {"left": 1.0, "right": 0.0}
    labels_NL = np.array(
        [[values.get(of.get(name, ""), np.nan) for name in classifier.names] for of in sides]
    )
    means = means_over(classifier.names, labels_NL)
    if not means:
        return ()
    rows = np.flatnonzero(~np.isnan(labels_NL).all(axis=1))
    scores_NL = np.zeros(labels_NL.shape)
    scores_NL[rows] = side_scores(images, rows, classifier, encoder)
    names = means["macro"]
    columns = [classifier.names.index(name) for name in names]
    group = ranking_metrics(
        "auroc", scores_NL[:, columns], labels_NL[:, columns], names, means={"macro": names}
    )
    return resampling.measure([renamed(group, "side_auroc", images.name)], images.patients)


@torch.no_grad()
def side_scores(
    images: ImageSet, rows: NDArray[np.int64], classifier: FindingClassifier, encoder: ProbedEncoder
) -> Array:
    """Return (len(rows), L): logits of the patient's left half, doubled, minus those of the
    right half, doubled.
    """
    transform = encoder.transform.build()
    rng = np.random.default_rng(0)
    color = color_for(images.source, encoder.transform)
    device = next(encoder.module.parameters()).device
    parts = []
    with evaluating(encoder.module):
        for start in range(0, len(rows), _BATCH):
            positions = [
                images.scored.positions[row] for row in rows[start : start + _BATCH].tolist()
            ]
            squares = [
                transform(images.source.pixels(position, color), rng).image_HWC
                for position in positions
            ]
            halves = [np.stack([double(square, side) for square in squares]) for side in _SIDES]
            pixels = [
                torch.from_numpy(half.transpose(0, 3, 1, 2).copy()).to(device) for half in halves
            ]
            left, right = (
                classifier.logits(encoder.module(each).pooled_BD.float().cpu()) for each in pixels
            )
            parts.append(left - right)
    return np.concatenate(parts)


def double(image_HWC: NDArray[np.uint8], side: str) -> NDArray[np.uint8]:
    """Return one half of a frontal image, of the patient's left or right, beside its mirror
    image.
    """
    half = image_HWC.shape[1] // 2
    original = image_HWC[:, -half:] if side == "left" else image_HWC[:, :half]
    mirrored = original[:, ::-1]
    middle = image_HWC[:, half : image_HWC.shape[1] - half]
    parts = (mirrored, middle, original) if side == "left" else (original, middle, mirrored)
    return np.concatenate(parts, axis=1)


def _samples(images: ImageSet) -> Sequence[Any]:
    if not all("prompt_key" in sample.extra for sample in images.scored.samples):
        raise EvaluationError(
            "only generated images have prompts that can be shuffled", "unsupported", field="data"
        )
    return images.scored.samples


# Alignment of images with their prompts, by a dual-encoder that was trained apart from the
# generator.
#
# Shape letters: N images, M distinct prompts.

RANKS = (1, 5, 10)
_TEXT_TOWER = "text_encoder."
_SMALLEST = 256  # elements; smaller tensors may be equal by chance, such as zeros


def check_separate(aligner: Path, generator: Path) -> float:
    """Return the share of the aligner's text weights that the generator has too.

    Matrices are compared by value, not by name. Some may be equal because both started from the
    same published encoder and left a part of it frozen. Raises ConfigError where all are: the
    generator reads its prompts with the aligner's own text encoder, which would favour it.
    """
    own = _matrices(aligner, _TEXT_TOWER)
    theirs = _matrices(generator, "")
    shared = {
        name
        for name, tensor in own.items()
        if any(torch.equal(tensor, other) for other in theirs.of(tensor))
    }
    total = sum(tensor.numel() for tensor in own.values())
    if total and len(shared) == len(own):
        message = (
            f"the generator reads prompts with the text encoder of {aligner}; give a "
            f"model trained apart from it"
        )
        raise ConfigError(message, "conflict", field="aligner")
    return sum(own[name].numel() for name in shared) / total if total else 0.0


class _Matrices(dict[str, torch.Tensor]):
    """Tensors by name."""

    def of(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return those of the shape of another one."""
        return [tensor for tensor in self.values() if tensor.shape == like.shape]


def _matrices(checkpoint: Path, prefix: str) -> _Matrices:
    matrices = _Matrices()
    with safetensors.safe_open(find_checkpoint(checkpoint) / WEIGHTS, framework="pt") as file:
        names: list[str] = list(file.keys())
        for name in names:
            if name.startswith(prefix):
                tensor = file.get_tensor(name)
                if tensor.ndim >= 2 and tensor.numel() >= _SMALLEST:
                    matrices[name] = tensor.float()
    return matrices


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """Similarities of images and prompts."""

    own_N: Array
    """Similarity with the own prompt."""
    other_N: Array
    """Mean similarity with the other distinct prompts; NaN if there are none."""
    rank_N: Array
    """Rank of the own prompt among the distinct prompts, from 1; a tie counts in the middle."""
    prompts: int
    """Number of distinct prompts."""


@torch.no_grad()
def align(
    images: ImageSet, model: DualEncoder, prompts: Sequence[str], loading: LoaderOptions
) -> Aligned:
    """Compare every image with some distinct prompts, its own among them."""
    loader = open_for_evaluation(
        images.source, model.transform, batch=loading.batch, workers=loading.workers
    )
    device = next(model.parameters()).device
    keys = list[str]()
    parts = []
    with evaluating(model):
        texts = embed_texts(model, list(prompts))
        for batch in loader:
            keys += batch.keys
            embedded = encode_batch(model, batch, device, None)
            parts.append(model.similarity(concatenate([embedded]), texts).double().cpu())
    row_of = {key: row for row, key in enumerate(keys)}
    similarity_NM = torch.cat(parts).numpy()[
        [row_of[sample.key] for sample in images.scored.samples]
    ]
    column_of = {prompt: column for column, prompt in enumerate(prompts)}
    own = np.array([column_of[prompt] for prompt in images.prompts])
    own_N = similarity_NM[np.arange(len(own)), own]
    above_N = (similarity_NM > own_N[:, None]).sum(axis=1)
    ties_N = (similarity_NM == own_N[:, None]).sum(axis=1) - 1
    others = len(prompts) - 1
    other_N = (
        (similarity_NM.sum(axis=1) - own_N) / others if others else np.full(len(own_N), np.nan)
    )
    return Aligned(
        own_N=own_N,
        other_N=other_N,
        rank_N=1 + above_N + ties_N / 2,
        prompts=len(prompts),
    )


def alignment_rows(
    images: ImageSet, aligned: Aligned, resampling: Resampling
) -> tuple[MetricRow, ...]:
    """Return the mean similarity with own and other prompts, and retrieval of the own prompt."""
    target = f"{aligned.prompts} prompts"
    columns: Mapping[str, Any] = {
        "alignment": aligned.own_N,
        "alignment_other": aligned.other_N,
        **{f"recall@{k}": (aligned.rank_N <= k).astype(np.float64) for k in RANKS},
    }
    groups = [
        mean_metrics(metric, value_N[:, None], [target], subgroup=images.name)
        for metric, value_N in columns.items()
    ]
    median = median_metric("median_rank", aligned.rank_N, target)
    groups.append(renamed(median, "median_rank", images.name))
    return resampling.measure(groups, images.patients)
