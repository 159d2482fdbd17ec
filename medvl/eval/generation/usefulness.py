"""Use of generated images as training data: classifiers trained on real images, on synthetic ones,
and on both.

Shape letters: N images, D feature dim, L labels, S runs, K rows, R resamples.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medvl.data.loading.sources import label_fraction
from medvl.errors import EvaluationError, SplitError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, means_over, ranking_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.generation.findings import Resampling, findings_of, labels_of
from medvl.eval.probing.features import FeatureTable, Standardizer
from medvl.eval.probing.protocol import choose_probe, suffix

REAL = "real"
BOTH = "real and synthetic"
SYNTHETIC = "synthetic"
GAIN = "both minus real"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UseOptions:
    """Fractions of the real training patients, and runs per fraction below 1."""

    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)
    seeds: int = 5

    def __post_init__(self) -> None:
        if (
            not self.fractions
            or self.seeds < 1
            or not all(0 < fraction <= 1 for fraction in self.fractions)
        ):
            message = (
                f"expected fractions in (0, 1] and seeds of 1 or more, got "
                f"{self.fractions} and {self.seeds}"
            )
            raise EvaluationError(
                message, "out_of_range", field="seeds" if self.seeds < 1 else "fractions"
            )


def use_rows(
    train: FeatureTable,
    synthetic: FeatureTable,
    valid: FeatureTable,
    test: FeatureTable,
    policy: LabelPolicy,
    options: UseOptions,
    resampling: Resampling,
) -> tuple[MetricRow, ...]:
    """Return the AUROC on real test images of linear probes on real, on synthetic, and on both.

    Features are standardised by the real training images. The penalty is chosen on the real
    validation images. Real patients are drawn as in the linear probe, nested by seed; all synthetic
    images are used with each. "use_auroc@1%" is the mean over runs, "use_auroc_sd@1%" their
    standard deviation, and "both minus real" the difference of the runs of equal patients, with an
    interval over test patients.

    Raises SplitError if a prompt of the synthetic images is the text of a test or validation
    patient.
    """
    for table, name in ((test, "test"), (valid, "validation")):
        shared = set(synthetic.patients) & set(table.patients)
        if shared:
            message = (
                f"{len(shared)} {name} patients have a prompt of the synthetic training "
                f"images; generate them from"
            )
            raise SplitError(f"{message} training texts", "leak", field="synthetic_train")
    names = findings_of(train, policy)
    standardize = Standardizer.fit(train.x_ND)
    x = {}
    y = {}
    for key, table in {
        "train": train,
        "synthetic": synthetic,
        "valid": valid,
        "test": test,
    }.items():
        x[key], y[key] = standardize(table.x_ND), labels_of(table, names, policy)

    def scores(x_ND: Tensor, y_NL: Array) -> Array:
        chosen = choose_probe(x_ND, y_NL, x["valid"], y["valid"])
        return chosen.probe.probability_NL(x["test"])

    groups = []
    for fraction in options.fractions:
        real = []
        both = []
        for seed in range(options.seeds if fraction < 1 else 1):
            drawn = label_fraction(train.patients, fraction, seed)
            real.append(scores(x["train"][drawn], y["train"][drawn]))
            joined = torch.cat([x["train"][drawn], x["synthetic"]])
            both.append(scores(joined, np.concatenate([y["train"][drawn], y["synthetic"]])))
        groups.append(_over_runs(real, both, names, y["test"], suffix(fraction)))
    alone = scores(x["synthetic"], y["synthetic"])
    only = ranking_metrics("auroc", alone, y["test"], names, means=means_over(names, y["test"]))
    rows = [
        dataclasses.replace(row, metric="use_auroc@0%", subgroup=SYNTHETIC) for row in only.rows
    ]
    return resampling.measure([*groups, MetricGroup(rows, only.statistic)], test.patients)


def _over_runs(
    real: Sequence[Array],
    both: Sequence[Array],
    names: Sequence[str],
    labels_NL: Array,
    ending: str,
) -> MetricGroup:
    means = means_over(names, labels_NL)
    parts = [
        [ranking_metrics("auroc", each, labels_NL, names, means=means) for each in runs]
        for runs in (real, both)
    ]
    plain = parts[0][0].rows
    kinds = [("use_auroc", REAL), ("use_auroc", BOTH), ("use_auroc_gain", GAIN)]
    if len(real) > 1:
        kinds += [("use_auroc_sd", REAL), ("use_auroc_sd", BOTH)]
    rows = [
        dataclasses.replace(row, metric=f"{metric}{ending}", subgroup=subgroup)
        for metric, subgroup in kinds
        for row in plain
    ]

    def statistic(counts_NR: Array) -> Array:
        real_SRK, both_SRK = (
            np.stack([part.statistic(counts_NR) for part in runs]) for runs in parts
        )
        values = [real_SRK.mean(axis=0), both_SRK.mean(axis=0), (both_SRK - real_SRK).mean(axis=0)]
        if len(real) > 1:
            values += [real_SRK.std(axis=0, ddof=1), both_SRK.std(axis=0, ddof=1)]
        return np.concatenate(values, axis=1)

    return MetricGroup(rows, statistic)
