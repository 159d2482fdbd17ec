"""Labels of a breast, which all its mammograms share."""

from collections.abc import Mapping, Sequence

BIRADS = "Breast BI-RADS "
"""Beginning of the labels of the assessment: 0 to 6 follow."""
DENSITY = "Breast density "
"""Beginning of the labels of the density: A to D follow."""
VIEWS = ("CC", "MLO", "ML", "LM", "LMO", "XCCL", "XCCM", "FB", "AT")

_SUSPICION = ("6", "5", "4", "0", "3", "2", "1")
"""BI-RADS categories, the most suspicious first; 0 is incomplete: more images are needed."""


def most_suspicious(categories: Sequence[str]) -> str | None:
    """Return the most suspicious of BI-RADS categories "0" to "6"; None without one."""
    return next((category for category in _SUSPICION if category in categories), None)


def breast_labels(
    birads: str | None, density: str | None, names: Sequence[str]
) -> Mapping[str, int]:
    """Return a breast's labels, 1 or 0, of those in `names`; absent where it has no category."""
    given = {BIRADS: birads, DENSITY: density}
    return {
        name: int(name == f"{kind}{category}")
        for kind, category in given.items()
        if category is not None
        for name in names
        if name.startswith(kind)
    }
