"""Random corruption of a training batch: image-text pairs that do not match.

Everything is sampled before any arithmetic, from torch's CPU generator, which the training step seeds. A batch is thus
corrupted alike on every device, and a test can repeat a step in another way. Masked words are sampled by
`medvl.models.masked_words`, masked patches by `medvl.losses.masked.mim.mask_patches`.

B batch, N pairs.
"""

import torch
from torch import Tensor

from medvl.losses.pairs.itm import MatchingPairs, random_pairs
from medvl.losses.pairs.positives import name_ids, same_pairs, text_ids
from medvl.models.base import complete_rows
from medvl.schema import Batch


def sample_pairs(batch: Batch, *groups_B: Tensor) -> MatchingPairs:
    """Keep the image of half of the complete samples; give the others a wrong image of the batch.

    Rows of `same_rows(batch, *groups_B)` are never each other's negatives.
    """
    row_N = complete_rows(batch)
    pairs = random_pairs(same_rows(batch, *groups_B)[row_N][:, row_N], torch.default_generator)
    return pairs_of_rows(pairs, row_N)


def same_rows(batch: Batch, *groups_B: Tensor) -> Tensor:
    """(B, B) bool: samples with equal texts, of one study, or equal in any of `groups_B` (int64)."""
    if batch.studies is not None:
        groups_B = (*groups_B, name_ids(batch.studies))
    return same_pairs(text_ids(batch.ids_BT, batch.mask_BT), *groups_B)


def pairs_of_rows(pairs: MatchingPairs, row_N: Tensor) -> MatchingPairs:
    """Convert pairs sampled among some rows of a batch to rows of the batch."""
    return MatchingPairs(row_N[pairs.image_N], row_N[pairs.text_N], pairs.matched_N)
