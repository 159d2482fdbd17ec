"""Words of a text with its padding, as the released code of CARZero reads them."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.models.dual_encoders.bases.local import LocalDualConfig, LocalDualEncoder, local_features
from medvl.schema import Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedWordsConfig(LocalDualConfig):
    """Settings of a dual-encoder that may read the padding of its texts."""

    padded_memory: bool = False
    """Let images read [SEP] and the padding of texts up to `max_tokens`, as the released code does: set for imported
    models, whose scores depend on it."""


class PaddedWords(LocalDualEncoder):
    """A dual-encoder whose texts have [SEP] and, up to `max_tokens`, zeros among their words (`padded_memory`)."""

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        """See the base class."""
        if not self.config.padded_memory:
            return super().embed_ids(ids_BT, mask_BT)
        texts = self.embed_slots(ids_BT, mask_BT, self.word_slots(ids_BT, mask_BT, last_token=True))
        words_NWE, _ = local_features(texts)
        padded_NWE = F.pad(words_NWE, (0, 0, 0, self.config.max_tokens - words_NWE.shape[1]))
        return Embeddings(texts.global_NE, padded_NWE, torch.ones_like(padded_NWE[..., 0], dtype=torch.bool))
