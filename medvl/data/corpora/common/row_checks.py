"""Checks over all rows of a table, whose messages name rows: repeated images and shared patients."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from medvl.errors import CorpusError, SplitError
from medvl.schema import Sample

_SHOWN = 10


class RowChecks:
    """Collects the rows of a table; `finish` raises for all of them at once. Takes 28 bytes of memory per row."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._rows, self._images, self._patients, self._splits = array("q"), array("Q"), array("Q"), array("i")
        self._split_numbers: dict[str, int] = {}

    def add(self, row: int, sample: Sample) -> None:
        """Add the sample of a row."""
        self._rows.append(row)
        self._images.append(_hash(str(sample.image or sample.key)))
        self._patients.append(_hash(sample.patient))
        self._splits.append(self._split_numbers.setdefault(sample.split, len(self._split_numbers)))

    def finish(self) -> None:
        """Raise CorpusError for images in two rows, SplitError for patients in two splits."""
        if not self._rows:
            return
        row_N, split_N = np.frombuffer(self._rows, np.int64), np.frombuffer(self._splits, np.intc)
        names = list(self._split_numbers)
        one_P, other_P = _equal_pairs(self._images)
        if len(one_P):
            pairs = (f"rows {row_N[one]} and {row_N[other]}" for one, other in zip(one_P, other_P, strict=True))
            advice = "keep one row of each, also where its path is spelled in two ways"
            message = f"{self._table} lists an image file twice in {_listed(pairs, len(one_P), 'pair')}; {advice}"
            raise CorpusError(message, "conflict", field="image")
        one_P, other_P = _equal_pairs(self._patients)
        leaked_P = split_N[one_P] != split_N[other_P]
        if leaked_P.any():
            one_P, other_P = one_P[leaked_P], other_P[leaked_P]
            pairs = (
                f"rows {row_N[one]} ({names[split_N[one]]}) and {row_N[other]} ({names[split_N[other]]})"
                for one, other in zip(one_P, other_P, strict=True)
            )
            advice = "correct the split column, or leave it out to split by patient hash"
            message = f"{self._table}: splits share patients: {_listed(pairs, len(one_P), 'pair')}; {advice}"
            raise SplitError(message, "leak", field="split")


def _hash(text: str) -> int:
    """Return 64 bits: two of a million texts collide with a probability of about 3e-8."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _equal_pairs(values: "array[int]") -> tuple[np.ndarray, np.ndarray]:
    """Return positions (one_P, other_P) of equal values, each value with its next occurrence, in the order of one_P."""
    value_N = np.frombuffer(values, np.uint64)
    order_N = np.argsort(value_N, kind="stable")
    equal_N = value_N[order_N[1:]] == value_N[order_N[:-1]]
    one_P, other_P = order_N[:-1][equal_N], order_N[1:][equal_N]
    order_P = np.argsort(one_P)
    return one_P[order_P], other_P[order_P]


def _listed(texts: Iterable[str], count: int, noun: str) -> str:
    """Join the first texts, and count the others."""
    shown = [text for text, _ in zip(texts, range(_SHOWN), strict=False)]
    more = count - len(shown)
    return "; ".join(shown) + (f"; and {more} more {noun}{'s' if more > 1 else ''}" if more else "")
