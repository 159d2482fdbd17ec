"""The classifier of findings that was trained on real images.

Shape letters: N images, D feature dim, L labels.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.label_names import match_labels, named_as
from medvl.data.splits import check_disjoint
from medvl.errors import EvaluationError
from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.core.bootstrap import bootstrap_auroc
from medvl.eval.core.metrics import Array
from medvl.eval.probing.evaluate import choose_probe
from medvl.eval.probing.features import FeatureTable
from medvl.eval.probing.solver import LinearProbe, Standardizer
from medvl.models.base import System
from medvl.models.downstream.classifier import Classifier
from medvl.schema import FINDINGS


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
    """Return the linear head of a fine-tuned classifier; None for other systems, whose encoder needs a probe.

    Raises EvaluationError if none of its labels is one of `FINDINGS`.
    """
    if not isinstance(model, Classifier):
        return None
    labels = model.config.labels
    names = tuple(name for name in FINDINGS if name in labels)
    if not names:
        message = f"the classifier has none of the findings {', '.join(FINDINGS)}, which prompts are read for"
        raise EvaluationError(message, "mismatch", field="classifier")
    columns = [labels.index(name) for name in names]
    head = model.label_head
    with torch.no_grad():
        probe = LinearProbe(head.weight[columns].double().cpu(), head.bias[columns].double().cpu())
    return FindingClassifier(names=names, probe=probe, standardize=None, details={"kind": "fine-tuned classifier"})


def fit_classifier(train: FeatureTable, valid: FeatureTable, policy: LabelPolicy) -> FindingClassifier:
    """Fit a linear probe for the findings of the training shards; its penalty is chosen on the validation images.

    Raises EvaluationError if the shards have no label of `FINDINGS` with positives and negatives, SplitError if they
    share a patient.
    """
    check_disjoint({"train": train.patients, "validation": valid.patients}, "the classifier")
    names = findings_of(train, policy)
    standardize = Standardizer.fit(train.x_ND)
    chosen = choose_probe(
        standardize(train.x_ND),
        labels_of(train, names, policy),
        standardize(valid.x_ND),
        labels_of(valid, names, policy),
    )
    details = {
        "kind": "linear probe",
        "images": len(train.samples),
        "penalty": chosen.penalty,
        "validation_auroc": chosen.auroc,
        "converged": chosen.probe.converged,
    }
    return FindingClassifier(names=names, probe=chosen.probe, standardize=standardize, details=details)


def findings_of(table: FeatureTable, policy: LabelPolicy) -> tuple[str, ...]:
    """Return the findings with positives and negatives. Raises EvaluationError if there are none."""
    present = list(match_labels(FINDINGS, table.label_names))
    labels_NL = labels_of(table, present, policy) if present else np.zeros((1, 0))
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    names = tuple(name for name, both in zip(present, both_L, strict=True) if both)
    if not names:
        message = f"expected training labels of one of {', '.join(FINDINGS)} with both classes, got none"
        raise EvaluationError(message, "empty", field="train")
    return names


def labels_of(table: FeatureTable, names: tuple[str, ...] | list[str], policy: LabelPolicy) -> Array:
    """Return the labels under the policy, in the columns of `names`; NaN for a name that the table lacks."""
    known = named_as(table.label_names, FINDINGS)
    return columns_of(policy.apply(table.labels_NL, known), known, names)


def columns_of(labels_NL: Array, present: tuple[str, ...], names: tuple[str, ...] | list[str]) -> Array:
    """Return the columns of some names; NaN for a name that is not present."""
    empty_N = np.full(len(labels_NL), np.nan)
    columns = [labels_NL[:, present.index(name)] if name in present else empty_N for name in names]
    return np.stack(columns, axis=1) if columns else np.zeros((len(labels_NL), 0))


def auroc_on(classifier: FindingClassifier, table: FeatureTable, policy: LabelPolicy) -> dict[str, float]:
    """Return the AUROC of each finding on real images; undefined ones are left out."""
    labels_NL = labels_of(table, classifier.names, policy)
    auroc_L, _, _ = bootstrap_auroc(classifier.logits(table.x_ND), labels_NL, resamples=0)
    return {name: value for name, value in zip(classifier.names, auroc_L.tolist(), strict=True) if not np.isnan(value)}
