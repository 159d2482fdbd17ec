"""Captions of CT and MR slices: organ, modality, plane and masses."""

import numpy as np

from medvl.phantom.language.sentences import pick, realize
from medvl.phantom.population.slices import Slice

_NAMES = {
    "CT": (
        "[axial|transverse] [CT|computed tomography] [scan |image |]of the {organ}",
        "[axial|transverse] {organ} CT",
    ),
    "MRI": (
        "[axial|transverse] [|T2-weighted ][MRI|magnetic resonance image] of the {organ}",
        "[axial|transverse] {organ} MRI",
    ),
}
_MASSES = {
    0: ("no mass", "no focal lesion"),
    1: ("a [single |]{cm} cm mass on the {side}", "a [single |]mass of {cm} cm on the {side}[| side]"),
    2: ("two {side}-sided masses of {cm} cm", "two masses on the {side}, {cm} cm each"),
    3: ("three {side}-sided masses of {cm} cm", "three masses on the {side}, {cm} cm each"),
}
"""Number of masses -> noun phrases."""
_CAPTIONS = (
    "{name} [showing|demonstrating|revealing] {shown}.",
    "{name} [shows|demonstrates|reveals] {shown}.",
    "{name} [at presentation|on admission|on day {day}], with {shown}.",
)
_REFERENCES = (
    "[On admission, a|A] {name} [revealed|showed] {shown} ({figure}).",
    "{name} as in {figure} [showed|demonstrated] {shown}.",
)


def compose_slice_caption(rng: np.random.Generator, part: Slice) -> str:
    """Return the caption of a slice, which names everything that questions ask about."""
    return realize(rng, _CAPTIONS, _slots(rng, part))


def compose_slice_references(rng: np.random.Generator, part: Slice, number: int) -> list[str]:
    """Return the sentences of the article that refer to figure `number`; none or one."""
    if rng.random() < 0.5:
        return []
    slots = _slots(rng, part)
    slots["figure"] = pick(rng, [f"Figure {number}", f"Fig. {number}"])
    return [realize(rng, _REFERENCES, slots)]


def _slots(rng: np.random.Generator, part: Slice) -> dict[str, str]:
    return {
        "name": pick(rng, _NAMES[part.modality]).format(organ=part.organ),
        "shown": pick(rng, _MASSES[len(part.masses)]).format(cm=f"{part.diameter:g}", side=part.side),
        "day": str(rng.integers(2, 15)),
    }
