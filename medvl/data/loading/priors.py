"""The previous image of each sample's patient, for systems that compare an image with an earlier one."""

import itertools
from collections import defaultdict

import numpy as np

from medvl.data.loading.sources import Source

NO_PRIOR = -1
_FRONTAL = ("AP", "PA", "FRONTAL")


def prior_positions(source: Source) -> np.ndarray:
    """Return the position of each sample's prior image: (N,) int64, -1 where there is none. Reads all samples once.

    `extra["prior"]` of a sample, the key of another one, decides where it exists. Otherwise the prior image is of the
    patient's latest earlier study (`Sample.order`) with an image of the same projection (frontal or not), of the same
    view if that study has one. Samples without an order, and keys that are not in the source, have none.
    """
    positions: dict[str, int] = {}
    explicit: dict[int, str] = {}
    studies: defaultdict[tuple[str, bool], defaultdict[int, list[tuple[int, str | None]]]]
    studies = defaultdict(lambda: defaultdict(list))
    for position in range(len(source)):
        sample = source.sample(position)
        positions[sample.key] = position
        if "prior" in sample.extra:
            explicit[position] = str(sample.extra["prior"])
        elif sample.order is not None:
            projection = (sample.patient, sample.view is None or sample.view.startswith(_FRONTAL))
            studies[projection][sample.order].append((position, sample.view))
    prior_N = np.full(len(source), NO_PRIOR, np.int64)
    for by_order in studies.values():
        orders = sorted(by_order)
        for earlier, later in itertools.pairwise(orders):
            of_view = {view: position for position, view in reversed(by_order[earlier])}
            first = by_order[earlier][0][0]
            for position, view in by_order[later]:
                prior_N[position] = of_view.get(view, first)
    for position, key in explicit.items():
        prior_N[position] = positions.get(key, NO_PRIOR)
    return prior_N
