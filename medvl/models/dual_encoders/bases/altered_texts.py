"""Each text of a batch against the same text altered: with left and right exchanged, or with its
findings denied.
"""

from typing import Any

import torch
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.common import gather, mean_over_ranks
from medvl.losses.pairs.contrastive import altered_texts, denial_holds
from medvl.models.dual_encoders.bases.pairs import Pairs, negatives
from medvl.schema import Batch, Embeddings

KINDS = ("mirrored", "denied")
"""Sides of `Pairs` with altered texts."""
FINDINGS_SIDE = "findings"
"""Side of `Pairs` with the findings of each pair: `Batch.turned_BL`, then `Batch.found_BL`."""


def altered_kinds(config: Any) -> dict[str, float]:
    """Return the kinds of altered texts that a system compares with, and their weights."""
    weights = {
        "mirrored": getattr(config, "mirror_weight", 0.0),
        "denied": getattr(config, "denial_weight", 0.0),
    }
    return {kind: weight for kind, weight in weights.items() if weight}


def embed_altered(model: Any, batch: Batch) -> dict[str, Embeddings]:
    """Return the altered texts of each kind: one row for each text that the exchange alters, with
    its pair. Raises ConfigError for a batch without them.
    """
    fields = {
        "mirrored": (batch.mirrored_ids_BT, batch.mirrored_mask_BT, batch.has_mirror_B),
        "denied": (batch.denied_ids_BT, batch.denied_mask_BT, batch.has_denial_B),
    }
    sides = {}
    for kind in altered_kinds(model.config):
        ids_BT, mask_BT, altered_B = fields[kind]
        if ids_BT is None or mask_BT is None or altered_B is None:
            message = f"expected {kind} texts: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field=f"{kind}_ids_BT")
        row_K = altered_B.nonzero()[:, 0]
        global_BE = model.embed_ids(ids_BT, mask_BT).global_NE
        sides[kind] = Embeddings(global_BE[row_K], pair_N=row_K)
    if "denied" in sides:
        if batch.turned_BL is None or batch.found_BL is None:
            message = "expected findings of the texts: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="turned_BL")
        sides[FINDINGS_SIDE] = Embeddings(torch.cat([batch.turned_BL, batch.found_BL], 1).float())
    return sides


def altered_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean loss of each kind of altered texts over all ranks (`losses.altered_texts`)
    and its weight, from the sides of `embed_altered`.

    A denied text is compared with its own image and with those that contradict the text
    (`losses.denial_holds`); a text that no image contradicts does not count. A mirrored text is
    compared with its own image alone, as a text names either side equally often.
    """
    kinds = altered_kinds(model.config)
    if not kinds:
        return {}
    scale = model.scale() if model.learns_scale else 1 / model.config.temperature
    image_NE = gather(pairs.images.global_NE)
    own_B, other_BN = negatives(pairs)
    terms = {}
    for kind, weight in kinds.items():
        altered = pairs.others[kind]
        row_K = altered.pair_N
        assert row_K is not None, "embed_altered numbers the pairs"
        other_KN = torch.zeros_like(other_BN[row_K])
        counted_K = torch.ones_like(row_K, dtype=torch.bool)
        if kind == "denied":
            turned_BL, found_BL = pairs.others[FINDINGS_SIDE].global_NE.chunk(2, dim=1)
            other_KN = other_BN[row_K] & denial_holds(turned_BL[row_K], gather(found_BL))
            counted_K = other_KN.any(dim=1)
        texts = pairs.texts.global_NE[row_K], altered.global_NE
        loss_K = altered_texts(image_NE, *texts, own_B[row_K], other_KN, scale)
        terms[kind] = mean_over_ranks(loss_K, counted_K), weight
    return terms
