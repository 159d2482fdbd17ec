"""Agreement of generated images with their prompts: findings, negated findings, and sides.

Shape letters: N images, L findings, R resamples, P permutations.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.loading.sources import color_for
from medvl.data.reports.labeler import CHEXPERT, Conventions, find_mentions
from medvl.data.reports.statements import places_of
from medvl.errors import EvaluationError
from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, measure, ranking_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.generation.finding_classifier import FindingClassifier, columns_of
from medvl.eval.generation.inputs import ImageSet
from medvl.eval.probing.features import ProbedEncoder
from medvl.models.eval_mode import evaluating
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, POSITIVE

_SHUFFLES = 200
SHUFFLED = "shuffled prompts"
_NOT_NEGATED = ("No Finding", "Support Devices")
_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """Settings of the bootstrap; patients, or prompts without one, are resampled with all their images."""

    resamples: int = 1000
    seed: int = 0

    def measure(self, groups: Sequence[MetricGroup], patients: Sequence[str]) -> tuple[MetricRow, ...]:
        """Return the rows of all groups with intervals."""
        return measure(groups, len(patients), resamples=self.resamples, seed=self.seed, groups=list(patients))


def renamed(group: MetricGroup, metric: str, subgroup: str) -> MetricGroup:
    """Return a group whose rows have another metric and subgroup."""
    rows = [dataclasses.replace(row, metric=metric, subgroup=subgroup) for row in group.rows]
    return MetricGroup(rows, group.statistic)


def means_over(names: Sequence[str], labels_NL: Array) -> dict[str, list[str]]:
    """Return the means over findings with positives and negatives: all, and the five of the CheXpert competition."""
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    evaluable = [name for name, both in zip(names, both_L, strict=True) if both]
    means = {"macro": evaluable} if evaluable else {}
    if set(COMPETITION_FINDINGS) <= set(evaluable):
        means["macro_competition"] = list(COMPETITION_FINDINGS)
    return means


def stated_labels(images: ImageSet, names: Sequence[str], policy: LabelPolicy) -> Array:
    """Return the findings of the prompts under a policy: 1, 0 or NaN."""
    return columns_of(policy.apply(images.labels_NL, FINDINGS), FINDINGS, list(names))


def prompted_findings(
    images: ImageSet, classifier: FindingClassifier, policy: LabelPolicy, resampling: Resampling, *, like: Array
) -> tuple[MetricRow, ...]:
    """Return the AUROC of the classifier's score of the images against the findings that their prompts state.

    Means are over the findings with both classes in `like`, the labels of the generated images, so that those of
    generated and real images compare. Rows have the name of the set as subgroup.
    """
    labels_NL, logits_NL = stated_labels(images, classifier.names, policy), classifier.logits(images.scored.x_ND)
    group = findings_metrics(logits_NL, labels_NL, classifier.names, like=like, name=images.name)
    return resampling.measure([group], images.patients)


def findings_metrics(
    logits_NL: Array, labels_NL: Array, names: Sequence[str], *, like: Array, name: str
) -> MetricGroup:
    """Return the AUROC of each finding of a set of images, and the means of `prompted_findings`."""
    return renamed(ranking_metrics("auroc", logits_NL, labels_NL, names, means=means_over(names, like)), "auroc", name)


def shuffled_findings(
    images: ImageSet, classifier: FindingClassifier, policy: LabelPolicy, seed: int = 0
) -> tuple[MetricRow, ...]:
    """Return `prompted_findings` of images against other images' prompts: the mean over 200 permutations of them.

    The interval holds 95 % of the permutations: the values of images that are unrelated to their prompts.
    """
    labels_NL, logits_NL = stated_labels(images, classifier.names, policy), classifier.logits(images.scored.x_ND)
    means, keys = means_over(classifier.names, labels_NL), [sample.extra["prompt_key"] for sample in _samples(images)]
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
    named = renamed(ranking_metrics("auroc", logits_NL, labels_NL, classifier.names, means=means), "auroc", SHUFFLED)
    return tuple(_of_permutations(row, column) for row, column in zip(named.rows, np.array(values).T, strict=True))


def _of_permutations(row: MetricRow, values_P: Array) -> MetricRow:
    known_P = values_P[~np.isnan(values_P)]
    if not len(known_P):
        return row
    low, high = np.quantile(known_P, (0.025, 0.975)).tolist()
    return dataclasses.replace(row, value=float(known_P.mean()), low=low, high=high)


def negated_findings(images: ImageSet, classifier: FindingClassifier, resampling: Resampling) -> tuple[MetricRow, ...]:
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
    """Return finding -> "left" or "right" of the findings that a text places on one side of the patient only."""
    found: dict[str, set[str]] = {}
    mentions = find_mentions(prompt, conventions)
    for mention, (sides, _) in zip(mentions, places_of(mentions), strict=True):
        if mention.value == POSITIVE:
            found.setdefault(mention.finding, set()).update(sides or ["unknown"])
    known = {finding: sides - {"unknown"} for finding, sides in found.items()}
    return {finding: side for finding, sides in known.items() if len(sides) == 1 and (side := min(sides)) in _SIDES}


_SIDES = ("left", "right")


def prompted_sides(
    images: ImageSet,
    classifier: FindingClassifier,
    encoder: ProbedEncoder,
    resampling: Resampling,
    conventions: Conventions = CHEXPERT,
) -> tuple[MetricRow, ...]:
    """Return the AUROC of prompts with a finding on the left against the same finding on the right.

    The score of an image is the classifier's logit of the image's half with the patient's left, beside its own mirror
    image, minus that of the other half beside its mirror image: it needs no classifier of sides. Frontal images are
    displayed with the patient's left on the right. Empty where no finding has prompts of both sides.
    """
    sides = [sides_of(prompt, conventions) for prompt in images.prompts]
    values = {"left": 1.0, "right": 0.0}
    labels_NL = np.array([[values.get(of.get(name, ""), np.nan) for name in classifier.names] for of in sides])
    means = means_over(classifier.names, labels_NL)
    if not means:
        return ()
    rows = np.flatnonzero(~np.isnan(labels_NL).all(axis=1))
    scores_NL = np.zeros(labels_NL.shape)
    scores_NL[rows] = side_scores(images, rows, classifier, encoder)
    names = means["macro"]
    columns = [classifier.names.index(name) for name in names]
    group = ranking_metrics("auroc", scores_NL[:, columns], labels_NL[:, columns], names, means={"macro": names})
    return resampling.measure([renamed(group, "side_auroc", images.name)], images.patients)


@torch.no_grad()
def side_scores(
    images: ImageSet, rows: NDArray[np.int64], classifier: FindingClassifier, encoder: ProbedEncoder
) -> Array:
    """Return (len(rows), L): logits of the patient's left half, doubled, minus those of the right half, doubled."""
    transform, rng = encoder.transform.build(), np.random.default_rng(0)
    color = color_for(images.source, encoder.transform)
    device, parts = next(encoder.module.parameters()).device, []
    with evaluating(encoder.module):
        for start in range(0, len(rows), _BATCH):
            chosen = [images.scored.positions[row] for row in rows[start : start + _BATCH].tolist()]
            squares = [transform(images.source.pixels(position, color), rng).image_HWC for position in chosen]
            halves = [np.stack([double(square, side) for square in squares]) for side in _SIDES]
            pixels = [torch.from_numpy(half.transpose(0, 3, 1, 2).copy()).to(device) for half in halves]
            left, right = (classifier.logits(encoder.module(each).pooled_BD.float().cpu()) for each in pixels)
            parts.append(left - right)
    return np.concatenate(parts)


def double(image_HWC: NDArray[np.uint8], side: str) -> NDArray[np.uint8]:
    """Return one half of a frontal image, of the patient's left or right, beside its mirror image."""
    half = image_HWC.shape[1] // 2
    kept = image_HWC[:, -half:] if side == "left" else image_HWC[:, :half]
    mirrored = kept[:, ::-1]
    middle = image_HWC[:, half : image_HWC.shape[1] - half]
    parts = (mirrored, middle, kept) if side == "left" else (kept, middle, mirrored)
    return np.concatenate(parts, axis=1)


def _samples(images: ImageSet) -> Sequence[Any]:
    if not all("prompt_key" in sample.extra for sample in images.scored.samples):
        raise EvaluationError("only generated images have prompts that can be shuffled", "unsupported", field="data")
    return images.scored.samples
