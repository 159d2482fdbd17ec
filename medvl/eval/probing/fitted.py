"""A linear probe as a classifier: fitted once to a frozen image encoder, then applied to any
images.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from medvl.data.splits import check_disjoint
from medvl.errors import EvaluationError
from medvl.eval.classification.scored_images import NO_FINDING, LabelPolicy
from medvl.eval.probing.evaluate import PENALTIES, choose_probe
from medvl.eval.probing.features import FeatureTable, LinearProbe, ProbedEncoder, Standardizer
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedProbe:
    """One logistic regression per finding on the features of a frozen image encoder.

    Attributes:
        encoder: the encoder.
        names: findings with positives and negatives among the training images, without No Finding.
        patients: split -> patients that the probe was fitted to, or its penalty chosen on.
        manifests: split -> fingerprint of its shards.
        penalty: the chosen penalty.
    """

    encoder: ProbedEncoder
    names: tuple[str, ...]
    standardizer: Standardizer
    probe: LinearProbe
    patients: Mapping[str, frozenset[str]]
    manifests: Mapping[str, str | None]
    penalty: float

    @classmethod
    def fit(
        cls,
        encoder: ProbedEncoder,
        train: FeatureTable,
        valid: FeatureTable,
        *,
        policy: LabelPolicy | None = None,
        penalties: Sequence[float] = PENALTIES,
    ) -> "FittedProbe":
        """Fit a probe to all labels, as the protocol "linear_probe" does at 100 %
        (`medvl.eval.linear_probe`).

        Args:
            encoder: the encoder of the features.
            train, valid: features of different patients.
            policy: conversion of labels that are neither 1 nor 0.
            penalties: candidate penalties; the one with the best mean AUROC on the validation
                images is taken, over `names`, while `linear_probe` leaves out findings without
                labels in the test data.

        Raises:
            EvaluationError: no finding has positives and negatives in both sets.
            SplitError: the sets share a patient.
        """
        patients = {"train": frozenset(train.patients), "validation": frozenset(valid.patients)}
        check_disjoint(patients, "the linear probe")
        policy = policy or LabelPolicy()
        labels = {"train": _labels(train, policy), "validation": _labels(valid, policy)}
        names = tuple(
            name
            for name in train.label_names
            if name in valid.label_names
            and name != NO_FINDING
            and {0.0, 1.0} <= set(labels["train"][name])
        )
        if not names:
            message = (
                "expected a finding with positives and negatives among the probe's "
                "training images, got none"
            )
            raise EvaluationError(message, "empty", field="probe_train")
        standardizer = Standardizer.fit(train.x_ND)
        y_NL, valid_y_NL = (
            np.stack([labels[part][name] for name in names], axis=1) for part in labels
        )
        chosen = choose_probe(
            standardizer(train.x_ND), y_NL, standardizer(valid.x_ND), valid_y_NL, penalties
        )
        return cls(
            encoder=encoder,
            names=names,
            standardizer=standardizer,
            probe=chosen.probe,
            patients=patients,
            manifests={"train": train.fingerprint, "validation": valid.fingerprint},
            penalty=chosen.penalty,
        )

    def probabilities(self, batch: Batch) -> Tensor:
        """Return (B, L): float64 probabilities of a batch's images on the CPU, columns as in
        `names`.
        """
        features = self.encoder.module(batch.image_BCHW.to(self.encoder.device, non_blocking=True))
        return torch.from_numpy(
            self.probe.probability_NL(self.standardizer(features.pooled_BD.float().cpu()))
        )


def _labels(table: FeatureTable, policy: LabelPolicy) -> dict[str, np.ndarray]:
    """Return finding -> labels of 1, 0 or NaN."""
    resolved_NL = policy.resolve(table.labels_NL, table.label_names).labels_NL
    return dict(zip(table.label_names, resolved_NL.T, strict=True))
