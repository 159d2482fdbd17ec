"""Named policies for uncertain and missing labels, recorded in every result.

Label tables hold 1, 0, -1 (uncertain) or NaN (not mentioned in the report). Metrics need 1, 0 or NaN (left out). The
conversion changes an AUROC by points and is therefore always explicit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from medvl.common.checks import check_choice
from medvl.common.label_names import named_as
from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN

Uncertain = Literal["ignore", "zeros", "ones", "per_class"]
Missing = Literal["ignore", "negative"]
NoFinding = Literal["implied", "labelled"]

PER_CLASS: Mapping[str, int] = {
    "Atelectasis": POSITIVE,
    "Cardiomegaly": NEGATIVE,
    "Consolidation": NEGATIVE,
    "Edema": POSITIVE,
    "Pleural Effusion": POSITIVE,
}
"""Values of uncertain labels under "per_class" (as in GLoRIA and PTUnifier); other classes are left out."""

NO_FINDING = "No Finding"
_NOT_A_PATHOLOGY = (NO_FINDING, "Support Devices")


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedLabels:
    """Labels for metrics, and counts of the conversion."""

    labels_NL: Array
    """1, 0 or NaN (left out)."""
    counts: Mapping[str, Mapping[str, int]]
    """Label -> counts: positive, negative, left_out (their sum is all images); uncertain, missing (of the table)."""
    contradictions: int
    """Number of images labelled No Finding and with a positive pathology; their labels are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelPolicy:
    """Rules for labels that are neither 1 nor 0, applied in the order of the fields.

    Raises `EvaluationError` on an unknown name.
    """

    no_finding: NoFinding = "implied"
    """"implied" fills missing labels by logic: No Finding is 0 if a pathology is positive, and pathologies are 0 if
    No Finding is positive (Support Devices are not a pathology). "labelled" uses the table unchanged."""
    uncertain: Uncertain = "ignore"
    """"ignore" leaves the label out; "zeros", "ones", or "per_class" as in `PER_CLASS`."""
    missing: Missing = "negative"
    """A finding that is not mentioned counts as "negative", or the label is left out ("ignore")."""

    def __post_init__(self) -> None:
        for field, allowed in (("no_finding", NoFinding), ("uncertain", Uncertain), ("missing", Missing)):
            check_choice(getattr(self, field), get_args(allowed), field, error=EvaluationError)

    @property
    def name(self) -> str:
        """The three rules in one line, for tables and pages."""
        return f"uncertain: {self.uncertain}, missing: {self.missing}, no finding: {self.no_finding}"

    def resolve(self, labels_NL: ArrayLike, names: Sequence[str]) -> ResolvedLabels:
        """Convert labels of 1, 0, -1 or NaN to 1, 0 or NaN, and count the conversions per column.

        Pass all columns of the table, also those that are not evaluated: the No Finding rule reads them.

        Args:
            labels_NL: label table.
            names: name of each column. The rules find CheXpert's findings in any spelling.

        Raises EvaluationError if a label has another value, or names and columns do not match.
        """
        table_NL = np.array(labels_NL, dtype=np.float64)  # a copy
        if table_NL.ndim != 2 or table_NL.shape[1] != len(names):
            message = f"expected one column for each of {len(names)} names, got shape {table_NL.shape}"
            raise EvaluationError(message, "mismatch", field="labels")
        missing_NL, uncertain_NL = np.isnan(table_NL), table_NL == UNCERTAIN
        if not (missing_NL | uncertain_NL | (table_NL == POSITIVE) | (table_NL == NEGATIVE)).all():
            message = "expected labels of 1, 0, -1 (uncertain) or NaN (missing)"
            raise EvaluationError(message, "out_of_range", field="labels")

        resolved_NL, contradictions = table_NL.copy(), 0
        known = named_as(names, FINDINGS)
        if NO_FINDING in known:
            contradictions = _imply_no_finding(resolved_NL, known, fill=self.no_finding == "implied")
        for column, name in enumerate(known):
            resolved_NL[uncertain_NL[:, column], column] = self._value_of_uncertain(name)
        if self.missing == "negative":
            resolved_NL[missing_NL & np.isnan(resolved_NL)] = NEGATIVE
        counts = {
            name: {
                "positive": int((resolved_NL[:, column] == POSITIVE).sum()),
                "negative": int((resolved_NL[:, column] == NEGATIVE).sum()),
                "left_out": int(np.isnan(resolved_NL[:, column]).sum()),
                "uncertain": int(uncertain_NL[:, column].sum()),
                "missing": int(missing_NL[:, column].sum()),
            }
            for column, name in enumerate(names)
        }
        return ResolvedLabels(resolved_NL, counts, contradictions)

    def apply(self, labels_NL: ArrayLike, names: Sequence[str]) -> Array:
        """Return only the labels of `resolve`, as used in training."""
        return self.resolve(labels_NL, names).labels_NL

    def _value_of_uncertain(self, name: str) -> float:
        table = {"ignore": np.nan, "zeros": NEGATIVE, "ones": POSITIVE, "per_class": PER_CLASS.get(name, np.nan)}
        return float(table[self.uncertain])


def _imply_no_finding(labels_NL: Array, names: Sequence[str], *, fill: bool) -> int:
    """Fill labels implied by No Finding and by pathologies in place; return the number of contradictions."""
    none_N = labels_NL[:, names.index(NO_FINDING)]  # a view
    pathologies = [column for column, name in enumerate(names) if name not in _NOT_A_PATHOLOGY]
    any_N = (labels_NL[:, pathologies] == POSITIVE).any(axis=1)
    normal_N = none_N == POSITIVE
    if fill:
        none_N[np.isnan(none_N) & any_N] = NEGATIVE
        for column in pathologies:
            labels_NL[normal_N & np.isnan(labels_NL[:, column]), column] = NEGATIVE
    return int((normal_N & any_N).sum())
