"""Word features as sums of their sub-words' token features.

    slot_BT = word_slots(tokenizer, ids_BT, mask_BT)
    words_BWD, mask_BW = sum_by_slot(features.tokens_BTD, slot_BT, most_slots(slot_BT))

Shape letters are those of `medvl.schema`; slot 0 is the text's first token.
"""

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer


def word_slots(tokenizer: Tokenizer, ids_BT: Tensor, mask_BT: Tensor, *, last_token: bool = False) -> Tensor:
    """Return (B, T) int64: 0 for the text's first token, from 1 for its words, -1 for padding and the last token.

    With `last_token`, the last token ([SEP]) has the slot after the words.
    """
    slot_BT = tokenizer.word_ids(ids_BT, mask_BT)
    slot_BT = torch.where(slot_BT >= 0, slot_BT + 1, slot_BT)
    slot_BT[:, 0] = torch.where(mask_BT[:, 0], 0, -1)
    if last_token:
        slot_BT = torch.where(mask_BT & (slot_BT < 0), slot_BT.amax(dim=1, keepdim=True) + 1, slot_BT)
    return slot_BT


def most_slots(slot_BT: Tensor) -> int:
    """Return W, the number of slots of the longest text. Waits for the device."""
    return int(slot_BT.max()) + 1


def sum_by_slot(tokens_BTD: Tensor, slot_BT: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (words_BWD, mask_BW): the sum of the tokens of each slot, in float32; W is `width`, from `most_slots`.

    Slots of a text are numbered from 0 without a gap; tokens at -1 are ignored.
    """
    count_B = slot_BT.amax(dim=1) + 1
    place_BTD = torch.where(slot_BT >= 0, slot_BT, width)[:, :, None].expand_as(tokens_BTD)
    words_BWD = tokens_BTD.new_zeros(len(tokens_BTD), width + 1, tokens_BTD.shape[2], dtype=torch.float32)
    words_BWD = words_BWD.scatter_add(1, place_BTD, tokens_BTD.float())[:, :width]
    return words_BWD, torch.arange(width, device=slot_BT.device) < count_B[:, None]
