"""Frontal and lateral views, from the words that corpora use for the projection of an image."""

from typing import Literal

_LATERAL = {"LATERAL", "LL", "RL"}
_FRONTAL = {"FRONTAL", "PA", "AP", "LLD", "RLD"}


def frontal_or_lateral(view: str | None) -> Literal["frontal", "lateral"] | None:
    """Return the kind of a view such as `Sample.view` ("PA", "AP LLD", "XTABLE LATERAL"); None:
    unknown or neither.

    Decubitus films (LLD, RLD) are frontal projections of a patient who lies on the side.
    """
    words = set((view or "").upper().split())
    if words & _LATERAL:
        return "lateral"
    return "frontal" if words & _FRONTAL else None
