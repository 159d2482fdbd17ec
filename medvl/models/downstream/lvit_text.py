"""Words that LViT's network reads, and the vector by which its LV loss compares texts (arXiv 2206.14718).

Shape letters: W words that are read; others as in the schema.
"""

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import TextEncoder
from medvl.models.dual_encoders.parts.words import sum_by_slot, word_slots
from medvl.schema import Batch


def encode_words(encoder: TextEncoder, tokenizer: Tokenizer, batch: Batch, words: int) -> tuple[Tensor, Tensor]:
    """Return the first words (B, W, D), each the mean of its tokens, and the mean token of each text (B, D).

    Words are 0 where a text has no more, and for samples without a text. The mean tokens have no gradient.
    """
    tokens_BTD = encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
    slot_BT = word_slots(tokenizer, batch.ids_BT, batch.mask_BT) - 1  # the first token is not a word
    slot_BT = torch.where(slot_BT < words, slot_BT, -1)
    words_BWD, _ = sum_by_slot(tokens_BTD, slot_BT, words)
    count_BW1, _ = sum_by_slot(torch.ones_like(tokens_BTD[:, :, :1]), slot_BT, words)
    words_BWD = words_BWD / count_BW1.clamp(min=1)
    if batch.has_text_B is not None:
        words_BWD = words_BWD * batch.has_text_B[:, None, None]
    text_BD = tokens_BTD.detach().float().sum(dim=1) / batch.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return words_BWD, text_BD
