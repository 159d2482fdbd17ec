"""Random corruption of a training batch: masked words and image-text pairs that do not match.

Everything is sampled before any arithmetic, from torch's CPU generator, which the training step seeds. A batch is thus
corrupted alike on every device, and a test can repeat a step in another way. Masked patches are sampled by
`medvl.losses.mim.mask_patches`.

B batch, T text tokens, N masked positions or pairs.
"""

import dataclasses

import torch
from torch import Tensor

from medvl.data.transforms.mlm_masking import TextMasking
from medvl.losses.itm import MatchingPairs, random_pairs
from medvl.losses.mlm import masked_positions
from medvl.losses.positives import name_ids, same_pairs, text_ids
from medvl.models.base import complete_rows
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedWords:
    """The texts of a batch with some words masked."""

    ids_BT: Tensor
    labels_BT: Tensor
    """int64: the original id at masked positions, -100 elsewhere."""
    position_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch."""

    @property
    def target_N(self) -> Tensor:
        """The original ids at the masked positions."""
        return self.labels_BT.flatten()[self.position_N]


def sample_masked_words(batch: Batch, masking: TextMasking) -> MaskedWords:
    """Mask words of every text; samples without a text have none."""
    mask_BT = batch.mask_BT if batch.has_text_B is None else batch.mask_BT & batch.has_text_B[:, None]
    masked = masking(batch.ids_BT, mask_BT, torch.default_generator)
    position_N = masked_positions(masked.labels_BT)
    return MaskedWords(ids_BT=masked.ids_BT, labels_BT=masked.labels_BT, position_N=position_N)


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
