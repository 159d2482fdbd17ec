"""Masking of texts for masked language modelling, by whole words in any vocabulary.

Words are the tokenizer's own (`Tokenizer.word_ids`), so WordPiece, byte-level BPE and SentencePiece are masked alike;
code that looks for `##` masks single tokens, unnoticed, in RoBERTa's vocabulary.

    masking = TextMasking(tokenizer)
    masked = masking(batch.ids_BT, batch.mask_BT, generator)     # masked.ids_BT in, masked.labels_BT for the loss
"""

import dataclasses

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import ConfigError

IGNORED = -100
"""Label of a token that was not masked: what `medvl.losses.mlm` leaves out."""
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedText:
    """A batch of texts with words hidden."""

    ids_BT: Tensor
    labels_BT: Tensor
    """int64: the id that was there at masked tokens, -100 elsewhere."""


class TextMasking:
    """BERT's masking (Devlin et al., arXiv 1810.04805, section 3.1), by words or by tokens.

    Each word is chosen with probability `rate`, alone or not, so `rate` is the expected share of tokens too; a text in
    which no word was chosen gets one. Each token of a chosen word becomes, independently, the mask token (80 %), some
    other token (10 %) or stays (10 %). Special tokens, unknown ones and padding are never chosen. Random tokens are
    drawn from the vocabulary without its special tokens, where BERT draws from all of it.

    Args:
        tokenizer: of the texts.
        rate: chance of a word, within (0, 1).
        whole_words: False chooses every token by itself.
        ends: a text's closing token is chosen as words are: how a model that writes learns where to stop.

    Attributes:
        mask_id: the mask token.

    Raises ConfigError when the vocabulary has no mask token, or the rate is out of range.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, rate: float = 0.15, whole_words: bool = True, ends: bool = False
    ) -> None:
        if not 0 < rate < 1:
            raise ConfigError(f"a masking rate must be between 0 and 1, got {rate}")
        if tokenizer.mask_id is None:
            raise ConfigError(
                f"the vocabulary of {tokenizer.source} has no mask token, so its texts cannot be masked: "
                "take an encoder with a WordPiece or RoBERTa vocabulary"
            )
        self.rate, self.whole_words, self.ends = rate, whole_words, ends
        self._tokenizer, self.mask_id = tokenizer, tokenizer.mask_id
        marks = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id, tokenizer.mask_id)
        special = {mark for mark in marks if mark is not None}
        ordinary = sorted(set(tokenizer.vocabulary.values()) - special)
        if not ordinary:
            raise ConfigError(f"the vocabulary of {tokenizer.source} holds nothing but special tokens")
        self._ordinary_O = torch.tensor(ordinary)
        self._special_S = torch.tensor(sorted(special))

    def __call__(self, ids_BT: Tensor, mask_BT: Tensor, generator: torch.Generator) -> MaskedText:
        """Mask a batch.

        Args:
            ids_BT: int64 token ids.
            mask_BT: bool, True on real tokens.
            generator: of the CPU or of the ids' device. A CPU generator gives the same masks on every device. The
                draws depend on the shape of the batch; give texts one at a time, each with a generator of its own,
                where they must not.
        """
        if ids_BT.numel() == 0:
            return MaskedText(ids_BT, ids_BT)
        device = ids_BT.device

        def uniform() -> Tensor:
            return torch.rand(ids_BT.shape, generator=generator, device=generator.device).to(device)

        chosen_BT = self._choose(self._units(ids_BT, mask_BT), uniform())
        fate_BT, other_BT = uniform(), self._ordinary_O.to(device)
        other_BT = other_BT[(uniform() * len(other_BT)).long().clamp(max=len(other_BT) - 1)]
        masked_BT = torch.where(fate_BT < _MASK_SHARE + _RANDOM_SHARE, other_BT, ids_BT)
        masked_BT = masked_BT.masked_fill(fate_BT < _MASK_SHARE, self.mask_id)
        return MaskedText(torch.where(chosen_BT, masked_BT, ids_BT), ids_BT.masked_fill(~chosen_BT, IGNORED))

    def _units(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T) int64: the number of the word or token that is chosen or left as one; -1 on what never is."""
        place_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        unit_BT = self._tokenizer.word_ids(ids_BT, mask_BT) if self.whole_words else place_BT
        never_BT = torch.isin(ids_BT, self._special_S.to(ids_BT.device)) | ~mask_BT
        unit_BT = unit_BT.masked_fill(never_BT, -1)
        if not self.ends:
            return unit_BT
        end_BT = (ids_BT == self._tokenizer.sep_id) & (place_BT == mask_BT.sum(dim=1, keepdim=True) - 1)
        return torch.where(end_BT, place_BT, unit_BT)  # a text has fewer words than tokens: no word has this number

    def _choose(self, unit_BT: Tensor, draw_BT: Tensor) -> Tensor:
        """(B, T) bool. Unit u of a text has draw u; below the rate it is chosen, and so is the lowest of its text."""
        draw_BT = draw_BT.gather(1, unit_BT.clamp(min=0)).masked_fill(unit_BT < 0, torch.inf)
        lowest_B1 = draw_BT.amin(dim=1, keepdim=True)
        return ((draw_BT < self.rate) | (draw_BT == lowest_B1)) & (unit_BT >= 0)
