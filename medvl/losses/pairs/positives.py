"""Groups of rows of a batch that are positives of each other, besides each row's own image and text.

Reports repeat ("No acute process."), images of one study share theirs, and figures have several texts, so a negative is
often a positive. Matching and contrastive losses take these groups.

    same_BB = same_pairs(text_ids(batch.ids_BT, batch.mask_BT), name_ids(studies))
"""

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# B rows of a batch, T text tokens.


def name_ids(names: Sequence[str]) -> Tensor:
    """Return (B,) int64: equal for equal names (of studies, articles, label sets), on every rank and in every run.

    These are 63 bits of a hash: among a million names two collide with a probability of 1 in 18 million.
    """
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)


def in_share(names: Sequence[str], share: float) -> Tensor:
    """Return (B,) bool: whether a name is in this share of all names, in every run.

    Names are ordered by their hash: a larger share includes a smaller one, and a share of a few names is not exact.
    """
    return name_ids(names).double() / 2**63 < share


def text_ids(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B,) int64: equal for texts with equal tokens, on every rank.

    Padding is ignored. Give ids before masking. The result is a sum of ids, each times a random number of its place,
    modulo 2^64: two different texts collide with a probability of about 2^-47. Does not wait for the device.
    """
    weight_T = name_ids([f"token {place}" for place in range(ids_BT.shape[1])]).to(ids_BT.device)
    # One is added because id 0 need not be padding.
    return ((ids_BT + 1) * weight_T).masked_fill(~mask_BT, 0).sum(dim=1)


def same_pairs(*groups_B: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return (B, B) bool: True where rows i and j agree in any of the groups, so always on the diagonal.

    With `rows`, return only those rows. Raises ValueError without a group, or on groups of different lengths.
    """
    if len({tuple(group_B.shape) for group_B in groups_B}) != 1 or groups_B[0].ndim != 1:
        raise ValueError(f"same_pairs needs groups (B,) of one length, got {[tuple(g.shape) for g in groups_B]}")
    device = groups_B[0].device
    same = (group_B.to(device)[rows, None] == group_B.to(device) for group_B in groups_B)
    return functools.reduce(torch.logical_or, same)
