"""Samples that are left out of their batch, and the limit on their number."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from medvl.errors import BudgetError, ShardError

_log = logging.getLogger(__name__)

NO_IMAGE = "no_image"
"""Reason for skipping a sample without an image, also the code of ImageError. It does not count as unreadable."""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that is left out of its batch: an unreadable one, or in evaluation one without an image."""

    key: str
    reason: str


class SkipBudget:
    """Counter of skipped samples by reason, with an upper limit.

    Args:
        where: folder or address of the data, for messages.
        max_skipped: below 1 a fraction of all samples, else a number.
        samples: number of all samples.
    """

    def __init__(self, where: str, max_skipped: float, samples: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._where, self._budget = where, int(max_skipped if max_skipped >= 1 else max_skipped * samples)

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Count skipped samples, and log unreadable ones. Raises BudgetError where these are above the limit."""
        for sample in skipped:
            self.reasons[sample.reason] += 1
            if sample.reason != NO_IMAGE:
                _log.warning("skipped sample %s: %s", sample.key, sample.reason)
        unreadable = self.reasons.total() - self.reasons[NO_IMAGE]
        if unreadable > self._budget:
            detail = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
            state = f"{unreadable} unreadable samples ({detail}), over the budget of {self._budget}"
            message = f"{self._where}: {state}; run `medvl verify` to list the damage"
            raise BudgetError(message, "budget", field="max_skipped")

    def check_empty_batch(self, skipped: Sequence[SkippedSample]) -> None:
        """Raise ShardError for a batch without a readable sample, unless none of its samples has an image."""
        if all(sample.reason == NO_IMAGE for sample in skipped):
            return
        raise ShardError(
            f"{self._where}: no sample of a batch can be read (first: {skipped[0].key}, {skipped[0].reason}); "
            "run `medvl verify` to list the damage",
            "empty",
        )
