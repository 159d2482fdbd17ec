"""What uncertain and missing labels count as: a named policy, written into every result.

A label table says 1, 0, -1 (uncertain) or nothing (NaN: the report does not mention the finding). Metrics need 1, 0
or "left out". How one becomes the other moves an AUROC by points, so it is never implicit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

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
"""What an uncertain label counts as under "per_class" (as GLoRIA and PTUnifier set it); others are left out."""

NO_FINDING = "No Finding"
_NOT_A_PATHOLOGY = (NO_FINDING, "Support Devices")


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedLabels:
    """Labels that metrics can use, and what became of each."""

    labels_NL: Array
    """1, 0 or NaN (left out)."""
    counts: Mapping[str, Mapping[str, int]]
    """Label -> positive, negative, left_out (together all images), uncertain and missing (as the table had them)."""
    contradictions: int
    """Images whose table says No Finding and a positive pathology at once; they are kept as they stand."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelPolicy:
    """Named rules for the labels that are neither 1 nor 0, applied in the order of the fields.

    Raises `EvaluationError` on an unknown name.
    """

    no_finding: NoFinding = "implied"
    """"implied" first fills what logic fills: beside a positive pathology a missing No Finding is 0, and beside No
    Finding a missing pathology is 0 (Support Devices are not a pathology). "labelled" takes the table as it is."""
    uncertain: Uncertain = "ignore"
    """"ignore" leaves the image out for that finding; "zeros", "ones"; "per_class" as in `PER_CLASS`."""
    missing: Missing = "negative"
    """A finding that nobody mentions is absent ("negative"), or the image is left out for it ("ignore")."""

    def __post_init__(self) -> None:
        for field, allowed in (("no_finding", NoFinding), ("uncertain", Uncertain), ("missing", Missing)):
            value, names = getattr(self, field), get_args(allowed)
            if value not in names:
                raise EvaluationError(f"LabelPolicy.{field} is {value!r}: choose one of {', '.join(names)}")

    @property
    def name(self) -> str:
        """Short, for tables and pages: the three rules in one line."""
        return f"uncertain: {self.uncertain}, missing: {self.missing}, no finding: {self.no_finding}"

    def resolve(self, labels_NL: ArrayLike, names: Sequence[str]) -> ResolvedLabels:
        """`labels_NL` of 1, 0, -1 or NaN, one column a name, made into 1, 0 or NaN with an account of each column.

        All columns of the table should be given, also those that are not judged: the No Finding rule reads them.
        Raises `EvaluationError` on any other value or when names and columns do not match.
        """
        table_NL = np.array(labels_NL, dtype=np.float64)  # a copy
        if table_NL.ndim != 2 or table_NL.shape[1] != len(names):
            raise EvaluationError(
                f"labels of shape {table_NL.shape} do not have one column for each of {len(names)} names"
            )
        missing_NL, uncertain_NL = np.isnan(table_NL), table_NL == UNCERTAIN
        if not (missing_NL | uncertain_NL | (table_NL == POSITIVE) | (table_NL == NEGATIVE)).all():
            raise EvaluationError("labels must be 1, 0, -1 (uncertain) or NaN (not mentioned)")

        resolved_NL, contradictions = table_NL.copy(), 0
        if NO_FINDING in names:
            contradictions = _imply_no_finding(resolved_NL, list(names), fill=self.no_finding == "implied")
        for column, name in enumerate(names):
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

    def settle(self, labels_NL: ArrayLike, names: Sequence[str]) -> Array:
        """The labels of `resolve` without their account: what training takes."""
        return self.resolve(labels_NL, names).labels_NL

    def _value_of_uncertain(self, name: str) -> float:
        table = {"ignore": np.nan, "zeros": NEGATIVE, "ones": POSITIVE, "per_class": PER_CLASS.get(name, np.nan)}
        return float(table[self.uncertain])


def _imply_no_finding(labels_NL: Array, names: Sequence[str], *, fill: bool) -> int:
    """Fill in place what No Finding and the pathologies say about each other; the number of contradictions."""
    none_N = labels_NL[:, names.index(NO_FINDING)]  # a view
    pathologies = [column for column, name in enumerate(names) if name not in _NOT_A_PATHOLOGY]
    any_N = (labels_NL[:, pathologies] == POSITIVE).any(axis=1)
    normal_N = none_N == POSITIVE
    if fill:
        none_N[np.isnan(none_N) & any_N] = NEGATIVE
        for column in pathologies:
            labels_NL[normal_N & np.isnan(labels_NL[:, column]), column] = NEGATIVE
    return int((normal_N & any_N).sum())
