"""BLURB's score: the mean of six means (Gu et al. 2021, Section 4.1)."""

import dataclasses
import statistics
from collections.abc import Mapping

from medvl.data.text_tasks.tasks import BLURB


@dataclasses.dataclass(frozen=True, slots=True)
class BlurbScore:
    """A mean over the groups of BLURB, and the sets that it leaves out."""

    value: float
    groups: tuple[float, ...]
    """Mean of each group that has a score."""
    tasks: int
    """Number of sets with a score."""
    missing: tuple[str, ...]
    """Sets without a score, in BLURB's order."""

    @property
    def name(self) -> str:
        """Return "BLURB", or a name that lists the missing sets."""
        return "BLURB" if not self.missing else f"mean without {', '.join(self.missing)}"


def blurb_score(scores: Mapping[str, float]) -> BlurbScore | None:
    """Return the score of the sets that are there, None if none is.

    Args:
        scores: task -> score; tasks that are not of BLURB are ignored. The result has their scale.
    """
    present = [[scores[name] for name in group if name in scores] for group in BLURB]
    groups = tuple(statistics.fmean(group) for group in present if group)
    if not groups:
        return None
    missing = tuple(name for group in BLURB for name in group if name not in scores)
    return BlurbScore(statistics.fmean(groups), groups, sum(map(len, present)), missing)
