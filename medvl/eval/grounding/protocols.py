"""Grounding protocols by name: their maps, smoothing, thresholds, pixels and sign of the contrast.

* "medvl": the model's own maps, unsmoothed, each scaled to 0..1; a finding outside of the crop counts as missed.
* "biovil": cosines of patches under a Gaussian of 1.5 cells that reflects at the edge (scipy's `gaussian_filter`, as
  in hi-ml-multimodal), thresholds of 0.1 to 0.5 on the cosines themselves, and the absolute contrast (Boecking et al.,
  ECCV 2022). The authors released the maps, which are NaN outside of the crop, and no code of the metrics; pixels
  without a value are left out here.
* "maco": the same maps, each scaled to -1..1, with the same thresholds; pixels outside of the crop are left out, and
  the contrast keeps its sign (Huang et al., 2024, its released code).

In all of them maps are interpolated linearly to the pixels (hi-ml's function does so on request and repeats the nearest
cell by default), and a pixel at a threshold is above it. GLoRIA and MGCA published no protocol for boxes of phrases.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from medvl.common.checks import check_choice
from medvl.errors import EvaluationError
from medvl.eval.grounding.heatmaps import Maps
from medvl.eval.grounding.metrics import MapRules

GroundingProtocolName = Literal["medvl", "biovil", "maco"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundingProtocol:
    """Settings of a grounding evaluation."""

    maps: Maps | None = None
    """"attention" or "similarity"; None for attention if the model has it, else similarity."""
    rules: MapRules = dataclasses.field(default_factory=MapRules)
    smoothing: float = 0.0
    """Standard deviation, in cells of the grid, of a Gaussian over similarity maps."""
    contrast: Literal["cnr", "signed_cnr"] = "cnr"
    """Contrast-to-noise ratio that the protocol reports; both are always computed."""


_PROTOCOLS: Mapping[GroundingProtocolName, GroundingProtocol] = {
    "medvl": GroundingProtocol(),
    "biovil": GroundingProtocol(maps="similarity", rules=MapRules(scale="none", unseen="drop"), smoothing=1.5),
    "maco": GroundingProtocol(
        maps="similarity", rules=MapRules(scale="signed", unseen="drop"), smoothing=1.5, contrast="signed_cnr"
    ),
}


def grounding_protocol(
    name: GroundingProtocolName,
    *,
    maps: Maps | None = None,
    rules: MapRules | None = None,
    smoothing: float | None = None,
) -> GroundingProtocol:
    """Return a protocol; settings other than None replace those of "medvl".

    Raises EvaluationError for an unknown name, or settings together with the protocol of a paper.
    """
    check_choice(name, _PROTOCOLS, "protocol", error=EvaluationError)
    if name == "medvl":
        return GroundingProtocol(maps=maps, rules=rules or MapRules(), smoothing=smoothing or 0.0)
    settings = {"maps": maps, "rules": rules, "smoothing": smoothing}
    if given := [field for field, value in settings.items() if value is not None]:
        message = f"protocol {name!r} sets {', '.join(given)}: leave them out, or use protocol 'medvl'"
        raise EvaluationError(message, "conflict", field="protocol")
    return _PROTOCOLS[name]
