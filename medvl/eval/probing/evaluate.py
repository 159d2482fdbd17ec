"""Linear probe: what labels can be read off an encoder's image features by a line, at 1, 10 and 100 % of the labels.

Protocol "linear_probe", version 1:

* Features are the encoder's pooled vectors, the encoder in eval mode and not trained; images as for its inference.
* They are standardised by mean and deviation of all training images, which takes no label.
* One logistic regression a label, solved by L-BFGS until no entry of the gradient is above 1e-4. The penalty is the one
  of a fixed list with the best mean AUROC on the validation images, which are always the same ones with all their
  labels.
* A fraction of the labels is a fraction of the training patients, drawn once a seed; draws of one seed are nested
  (`medvl.data.loading.subset.label_fraction`). The full set has one draw. A label of which a draw has only
  positives or only
  negatives is scored 0.5 everywhere, so its AUROC is 0.5.
* "auroc@10%" is the mean over the draws of 10 %, "auroc_sd@10%" their standard deviation; likewise average precision.
* Rows without a fraction are of the largest fraction's first draw: calibration, yes/no metrics at thresholds that were
  chosen on validation images, subgroups and their gaps.
* Labels that are neither 1 nor 0 are settled by one named policy, for fitting, choosing and judging alike.
* Training, validation and test share no patient. Intervals: test patients are drawn; all rows share the draws.

Shape letters: S draws, N images, L classes, R resamples.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medvl.data.loading.subset import label_fraction
from medvl.data.splits import check_disjoint
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
from medvl.eval.core.bootstrap import bootstrap_auroc
from medvl.eval.core.metric_rows import MetricGroup, ranking_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import format_table
from medvl.eval.probing.features import FeatureTable
from medvl.eval.probing.solver import LinearProbe, Standardizer, fit_path

PROTOCOL, PROTOCOL_VERSION = "linear_probe", 1
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult(ClassificationResult):
    """The results; images, scores and thresholds are those of the largest fraction's first draw."""

    fractions: tuple[float, ...]

    def table(self) -> str:
        """AUROC of every label by fraction, as plain text."""
        metrics = [f"auroc{suffix(fraction)}" for fraction in self.fractions]
        return format_table([row for row in self.results.rows if row.metric in metrics])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Draw:
    """A probe that was fitted to one draw of the labels."""

    fraction: float
    probe: LinearProbe
    scores_NL: Array
    """Of the test images."""
    told: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """Features, standardised, and labels of the three sets."""

    names: tuple[str, ...]
    train: FeatureTable
    x_ND: Tensor
    y_NL: Array
    valid_x_ND: Tensor
    valid_y_NL: Array
    test_x_ND: Tensor


def suffix(fraction: float) -> str:
    """How a metric of a fraction of the labels ends: "@1%", "@10%", "@100%"."""
    return f"@{100 * fraction:g}%"


def linear_probe(
    train: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    *,
    fractions: Sequence[float] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    penalties: Sequence[float] = PENALTIES,
    policy: LabelPolicy | None = None,
    threshold_rule: ThresholdRule = "f1",
    bootstrap_unit: BootstrapUnit = "patient",
    resamples: int = 1000,
    seed: int = 0,
    smallest_subgroup: int = 10,
    inputs: Mapping[str, str | None] | None = None,
) -> ProbeResult:
    """Fit and judge; the protocol is at the top of this module.

    Args:
        train, valid, test: features of one encoder, of different patients.
        fractions: of the training patients whose labels are used, each above 0 and at most 1.
        seeds: draws of each fraction below 1.
        penalties: to choose from.
        policy, threshold_rule, bootstrap_unit, resamples, seed, smallest_subgroup: as in `zero_shot`.
        inputs: hashes for `Results.inputs` beside those of the data, such as that of the encoder.

    Raises:
        EvaluationError: no label can be judged, or the fractions, seeds or penalties are none.
        SplitError: two of the sets share a patient.
    """
    check_bootstrap_unit(bootstrap_unit)
    policy = policy or LabelPolicy()
    config = {
        "fractions": sorted(fractions),
        "seeds": seeds,
        "penalties": sorted(penalties),
        "policy": dataclasses.asdict(policy),
        "threshold_rule": threshold_rule,
        "bootstrap_unit": bootstrap_unit,
        "resamples": resamples,
        "seed": seed,
        "smallest_subgroup": smallest_subgroup,
    }
    data, scored = _prepare(train, valid, test, policy)
    draws = _fit_all(data, fractions, seeds, penalties)
    main = next(one for one in draws if one.fraction == max(fractions))
    images, on_valid = _with_scores(main, data, scored)
    thresholds = choose_thresholds(on_valid, images, threshold_rule)
    blocks = ranking_groups(images) + decision_groups(images, thresholds, probabilities=True)
    results = evaluate_scores(
        images,
        blocks + _fraction_blocks(draws, images),
        thresholds=thresholds,
        protocol=(PROTOCOL, PROTOCOL_VERSION),
        config=config,
        inputs={**_fingerprints(train, valid, test), **(inputs or {})},
        details={"draws": [one.told for one in draws], "feature_dim": train.x_ND.shape[1]},
    )
    return ProbeResult(results=results, images=images, thresholds=thresholds, fractions=tuple(sorted(fractions)))


def _prepare(
    train: FeatureTable, valid: FeatureTable, test: FeatureTable, policy: LabelPolicy
) -> tuple[_Data, dict[str, ScoredImages]]:
    """The three sets with settled labels of the names that all have; the scores of these are still to come."""
    check_disjoint({"train": train.patients, "validation": valid.patients, "test": test.patients}, "the linear probe")
    names = tuple(name for name in test.label_names if name in train.label_names and name in valid.label_names)
    if not names:
        raise EvaluationError("training, validation and test data have no label in common: there is nothing to probe")
    scored = {}
    for part, table in (("train", train), ("valid", valid), ("test", test)):
        resolved = policy.resolve(table.labels_NL, table.label_names)
        scored[part] = ScoredImages(
            names=names,
            scores_NL=np.zeros((len(table.samples), len(names))),
            labels_NL=resolved.labels_NL[:, [table.label_names.index(name) for name in names]],
            samples=table.samples,
            positions=table.positions,
            account=image_counts(table.samples, table.unreadable, resolved, names),
        )
    standardize = Standardizer.of(train.x_ND)
    data = _Data(
        names=names,
        train=train,
        x_ND=standardize(train.x_ND),
        y_NL=scored["train"].labels_NL,
        valid_x_ND=standardize(valid.x_ND),
        valid_y_NL=scored["valid"].labels_NL,
        test_x_ND=standardize(test.x_ND),
    )
    return data, scored


def _fit_all(data: _Data, fractions: Sequence[float], seeds: int, penalties: Sequence[float]) -> list[_Draw]:
    """The probes of all draws, from the smallest fraction up."""
    if not fractions or seeds < 1 or not penalties or min(penalties) <= 0:
        raise EvaluationError("a probe needs fractions, one seed or more, and penalties above 0")
    return [
        _fit(data, fraction, number, penalties)
        for fraction in sorted(fractions)
        for number in range(seeds if fraction < 1 else 1)
    ]


def _fit(data: _Data, fraction: float, number: int, penalties: Sequence[float]) -> _Draw:
    """The probe of one draw, at the penalty that is best on the validation images."""
    drawn = label_fraction(data.train.patients, fraction, number)
    y_NL = data.y_NL[drawn]
    probes = fit_path(data.x_ND[drawn], y_NL, penalties)
    worth = {penalty: _mean_auroc(probe, data) for penalty, probe in probes.items()}
    best = max(worth, key=worth.__getitem__)  # of equals the largest penalty, which was fitted first
    both_L = (y_NL == 1).any(axis=0) & (y_NL == 0).any(axis=0)
    told = {
        "fraction": fraction,
        "seed": number,
        "images": len(drawn),
        "patients": len({data.train.patients[place] for place in drawn.tolist()}),
        "penalty": best,
        "validation_auroc": worth[best],
        "converged": probes[best].converged,
        "one_class_only": [name for name, both in zip(data.names, both_L, strict=True) if not both],
    }
    scores_NL = probes[best].probability_NL(data.test_x_ND)
    return _Draw(fraction=fraction, probe=probes[best], scores_NL=scores_NL, told=told)


def _fingerprints(train: FeatureTable, valid: FeatureTable, test: FeatureTable) -> dict[str, str | None]:
    return {
        "manifest": test.fingerprint,
        "train_manifest": train.fingerprint,
        "validation_manifest": valid.fingerprint,
    }


def _with_scores(one: _Draw, data: _Data, scored: Mapping[str, ScoredImages]) -> tuple[ScoredImages, ScoredImages]:
    """The test and the validation images with the scores of a draw."""
    on_valid_NL = one.probe.probability_NL(data.valid_x_ND)
    test, valid = scored["test"], scored["valid"]
    return dataclasses.replace(test, scores_NL=one.scores_NL), dataclasses.replace(valid, scores_NL=on_valid_NL)


def _mean_auroc(probe: LinearProbe, data: _Data) -> float:
    auroc_L, _, _ = bootstrap_auroc(probe.probability_NL(data.valid_x_ND), data.valid_y_NL, resamples=0)
    if np.isnan(auroc_L).all():
        raise EvaluationError(
            "no label of the validation images has positives and negatives: there is nothing to choose a penalty on"
        )
    return float(np.nanmean(auroc_L))


def _fraction_blocks(draws: Sequence[_Draw], images: ScoredImages) -> list[MetricGroup]:
    """AUROC and average precision by fraction: the mean over its draws, and where there are several the deviation."""
    by_fraction: dict[float, list[_Draw]] = {}
    for one in draws:
        by_fraction.setdefault(one.fraction, []).append(one)
    return [
        _over_draws(metric, drawn, images, suffix(fraction))
        for fraction, drawn in by_fraction.items()
        for metric in ("auroc", "average_precision")
    ]


def _over_draws(metric: str, draws: Sequence[_Draw], images: ScoredImages, ending: str) -> MetricGroup:
    of_draw = [
        ranking_metrics(metric, one.scores_NL, images.labels_NL, images.names, means=images.means) for one in draws
    ]
    rows = [dataclasses.replace(row, metric=f"{metric}{ending}") for row in of_draw[0].rows]
    if len(draws) > 1:
        rows += [dataclasses.replace(row, metric=f"{metric}_sd{ending}") for row in of_draw[0].rows]

    def statistic(counts_NR: Array) -> Array:
        values_SRK = np.stack([block.statistic(counts_NR) for block in of_draw])
        if len(draws) == 1:
            return values_SRK[0]
        return np.concatenate([values_SRK.mean(axis=0), values_SRK.std(axis=0, ddof=1)], axis=1)

    return MetricGroup(rows, statistic)
