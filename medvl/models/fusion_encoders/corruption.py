"""What a pretraining step leaves to chance: words and patches that are hidden, pairs that do not match.

All of it is drawn before any arithmetic, from torch's CPU generator, which the training step seeds: the same batch is
corrupted alike on every device, and a test can compute the same step another way.

B batch, N masked positions or pairs.
"""

import dataclasses

import torch
from torch import Tensor

from medvl.data.transforms.mlm_masking import MaskedText, TextMasking
from medvl.losses.itm import MatchingPairs, random_pairs
from medvl.losses.mim import PatchMask
from medvl.losses.mlm import masked_positions
from medvl.losses.positives import name_ids, same_pairs, text_ids
from medvl.models.base import complete_rows
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Of one batch."""

    masked: MaskedText
    masked_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch."""
    pairs: MatchingPairs
    """Among the samples that have both an image and a text."""
    patches: PatchMask | None = None
    """Of every sample, where a system hides patches."""

    @property
    def hidden_N(self) -> Tensor:
        """The ids that stood at the masked positions."""
        return self.masked.labels_BT.flatten()[self.masked_N]


def draw_text(batch: Batch, masking: TextMasking) -> tuple[MaskedText, Tensor]:
    """The batch's texts with words hidden, and the masked positions. A sample without a text has none."""
    mask_BT = batch.mask_BT if batch.has_text_B is None else batch.mask_BT & batch.has_text_B[:, None]
    masked = masking(batch.ids_BT, mask_BT, torch.default_generator)
    return masked, masked_positions(masked.labels_BT)


def draw_pairs(batch: Batch, *groups_B: Tensor) -> MatchingPairs:
    """Half of the complete samples keep their image, the others get one of the batch that is not theirs.

    Rows of `same_rows(batch, *groups_B)` are never each other's negatives.
    """
    row_N = complete_rows(batch)
    pairs = random_pairs(same_rows(batch, *groups_B)[row_N][:, row_N], torch.default_generator)
    return of_rows(pairs, row_N)


def same_rows(batch: Batch, *groups_B: Tensor) -> Tensor:
    """(B, B) bool: samples with equal texts, of one study, or alike in any of `groups_B` (int64)."""
    if batch.studies is not None:
        groups_B = (*groups_B, name_ids(batch.studies))
    return same_pairs(text_ids(batch.ids_BT, batch.mask_BT), *groups_B)


def of_rows(pairs: MatchingPairs, row_N: Tensor) -> MatchingPairs:
    """Pairs that were drawn among some rows of a batch, as rows of the whole batch."""
    return MatchingPairs(row_N[pairs.image_N], row_N[pairs.text_N], pairs.matched_N)
