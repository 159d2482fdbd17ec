"""Samples that are left out of their batch, and the limit on their number."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from medvl.errors import BudgetError, ShardError

_log = logging.getLogger(__name__)

NO_IMAGE = "no_image"
"""Reason for skipping a sample without an image, also the code of ImageError. It does not count as unreadable."""
NO_TEXT = "no_text"
"""Reason for skipping a sample without the text that is read. It does not count as unreadable."""
_READABLE = (NO_IMAGE, NO_TEXT)


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that is left out of its batch: an unreadable one, or one without an image or a text that is needed."""

    key: str
    reason: str


class SkipBudget:
    """Counter of skipped samples by reason, with an upper limit on the unreadable ones.

    The limit is on different samples: one that is unreadable in every epoch or validation counts once. A resumed run
    counts from zero.

    Args:
        where: folder or address of the data, for messages.
        max_skipped: below 1 a fraction of all samples, else a number.
        samples: number of all samples.

    Attributes:
        reasons: number of skips by reason, in which a sample counts in every pass that leaves it out.
    """

    def __init__(self, where: str, max_skipped: float, samples: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._unreadable: dict[str, str] = {}  # reason by key
        self._where, self._budget = where, int(max_skipped if max_skipped >= 1 else max_skipped * samples)

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Count skipped samples, and log each unreadable one once. Raises BudgetError with more than the limit."""
        for sample in skipped:
            self.reasons[sample.reason] += 1
            if sample.reason not in _READABLE and sample.key not in self._unreadable:
                self._unreadable[sample.key] = sample.reason
                _log.warning("skipped sample %s: %s", sample.key, sample.reason)
        if len(self._unreadable) > self._budget:
            reasons = Counter(self._unreadable.values())
            detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            state = f"{len(self._unreadable)} unreadable samples ({detail}), over the budget of {self._budget}"
            message = f"{self._where}: {state}; run `medvl verify` to list the damage"
            raise BudgetError(message, "budget", field="max_skipped")

    def check_empty_batch(self, skipped: Sequence[SkippedSample]) -> None:
        """Raise ShardError for a batch without a readable sample, unless all of its samples lack an image or a text."""
        if all(sample.reason in _READABLE for sample in skipped):
            return
        raise ShardError(
            f"{self._where}: no sample of a batch can be read (first: {skipped[0].key}, {skipped[0].reason}); "
            "run `medvl verify` to list the damage",
            "empty",
        )
