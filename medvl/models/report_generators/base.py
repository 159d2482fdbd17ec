"""Base of report generators: the next-token loss over a batch's complete samples, and decoding.

Letters: as in `medvl.schema`; V words, K complete samples.
"""

import abc

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import ConfigError
from medvl.models.base import System, complete_rows, update_mean, zero_loss
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.text_decoding import Decoding, Generated, NextToken, search
from medvl.schema import Batch, Losses

_BEAMS = Decoding(beams=3)
IGNORED = -100
"""Target of tokens that have none."""


class ReportGenerator(System):
    """Base of systems that read the images of a sample and write its text, one token after another.

    The loss, "words", is the mean cross-entropy of all words of a batch, each predicted from the image and the true
    words before it. Samples without an image or a text are left out. A text that fills `config.max_tokens` may have
    been cut, so its last token is not a target. The unknown word is a target, and is never written.
    """

    shared_encoders = ("image_encoder",)

    @abc.abstractmethod
    def image_tokens(self, image: Tensor, other: Tensor | None = None, has_other_B: Tensor | None = None) -> Tokens:
        """Encode images, and other views of them where `has_other_B` is True (None: everywhere)."""

    @abc.abstractmethod
    def score_next(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        """(B, T, V): scores of the word after each token."""

    @abc.abstractmethod
    def writer(self, image: Tokens, first_id: int) -> NextToken:
        """Return a writer of texts about the images that begin with a token; it caches the states of earlier tokens."""

    def forward(self, batch: Batch) -> Losses:
        """Return the loss of a training batch."""
        image, other, has_other_B = batch.image_BCHW, batch.other_view_BCHW, batch.has_other_view_B
        ids_BT, mask_BT = batch.ids_BT, batch.mask_BT
        if batch.has_image_B is not None or batch.has_text_B is not None:
            row_K = complete_rows(batch)
            if not len(row_K):
                return Losses.sum(words=zero_loss(self))
            image, ids_BT, mask_BT = image[row_K], ids_BT[row_K], mask_BT[row_K]
            other, has_other_B = (None if each is None else each[row_K] for each in (other, has_other_B))
        scores_BTV = self.score_next(ids_BT[:, :-1], self.image_tokens(image, other, has_other_B))
        target_BT = self._targets(ids_BT, mask_BT)
        total = F.cross_entropy(
            scores_BTV.flatten(0, 1).float(), target_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Losses.sum(words=update_mean(batch, total, (target_BT != IGNORED).sum()))

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: how many words the loss of a batch is a sum over."""
        row_K = complete_rows(batch)
        return (self._targets(batch.ids_BT[row_K], batch.mask_BT[row_K]) != IGNORED).sum().float()[None]

    def _targets(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T - 1): the token after each token."""
        place_T = torch.arange(1, ids_BT.shape[1], device=ids_BT.device)
        may_be_cut_T = place_T == self.config.max_tokens - 1
        return ids_BT[:, 1:].masked_fill(~mask_BT[:, 1:] | may_be_cut_T, IGNORED)

    @torch.no_grad()
    def write_reports(self, batch: Batch, *, decoding: Decoding = _BEAMS) -> Generated:
        """Return a text for each image of a batch, or several with sampling; its texts are not read.

        Raises ConfigError in training mode, and without a tokenizer.
        """
        if self.training:
            raise ConfigError("write_reports needs eval mode; call eval() first", "conflict")
        tokenizer = self.require_tokenizer("writing")
        image = self.image_tokens(batch.image_BCHW, batch.other_view_BCHW, batch.has_other_view_B)
        return search(
            self.writer(image, tokenizer.cls_id),
            decoding,
            max_tokens=decoding.max_tokens or self.config.max_tokens - 1,
            end_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            never=[] if tokenizer.unk_id is None else [tokenizer.unk_id],
        )
