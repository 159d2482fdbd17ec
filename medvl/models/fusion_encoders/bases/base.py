"""The base of fusion-encoders: image and text are encoded separately, once, and then attend to each other."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from medvl.data.transforms.mlm_masking import TextMasking
from medvl.encoders import parameter_groups
from medvl.encoders.regions import RegionEncoder
from medvl.models.base import TwoTowers, zero_loss
from medvl.models.fusion_encoders.objectives.base import Corruption, Encoded, Objective
from medvl.models.fusion_encoders.objectives.matching import MirroredTextMatching
from medvl.models.fusion_encoders.parts.encoder import AttentionMaps, Fused, Tokens, join
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.masked_words import MaskedWords, WordHead, sample_masked_words, text_masking
from medvl.schema import Batch, Losses

_ENCODERS = ("image_encoder", "text_encoder")


class DecoderLayers(Protocol):
    """The part of an answer decoder that a fusion-encoder can initialise."""

    sizes: Sizes
    layers: nn.ModuleList
    word_head: WordHead


class FusionModel(TwoTowers):
    """Encode each input once with `image_tokens` and `text_tokens`, keep the result, and `fuse` any pairs of them.

    A system sets `objectives` and writes `encode`, which computes the states that they share. With
    `config.mirror_weight`, matching of mirrored texts follows them.

    Attributes:
        objectives: terms of the pretraining loss, in the order in which they sample and predict.
        pooled_dim: width of `Fused.pooled_BD`, for heads.
        fused_dim: width of the fused states of image and text.
        itm_head: (B, pooled_dim) to (B, 2): no match, match.
        can_match: whether `itm_head` is trained, so that the scores of `match` are meaningful.
    """

    objectives: tuple[Objective[Any, Any, Any], ...]
    pooled_dim: int
    fused_dim: int
    itm_head: nn.Module
    can_match: bool = True
    numbers_cells: bool = False
    """Whether positions of an image's cells are numbers, such as rows of the words' table, that change their cell with
    the size of the grid."""
    masks_closing_token: bool = False
    """Whether the closing token of a text is masked like its words."""
    image_between_text_tokens: ClassVar[bool] = False
    """Whether `Fused.image` starts and ends with a text token (CLS and SEP)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.mirror_weight:
            self.inputs = dataclasses.replace(self.inputs, mirrored_text=True)
        if isinstance(self.image_encoder, RegionEncoder):
            self.inputs = dataclasses.replace(self.inputs, regions=True)

    @property
    def _all_objectives(self) -> tuple[Objective[Any, Any, Any], ...]:
        weight = self.config.mirror_weight
        return (*self.step_objectives, MirroredTextMatching(weight, self)) if weight else self.step_objectives

    @property
    def step_objectives(self) -> tuple[Objective[Any, Any, Any], ...]:
        """The objectives of this step: all, unless a system trains one task per step."""
        return self.objectives

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of `objectives`.

        Where samples lack an image or a text, or the step leaves objectives out, unused parameters get zero gradients,
        so that DDP does not hang.
        """
        corruption = self.corrupt(batch)
        losses = self.losses(self.predict(batch, corruption), corruption)
        is_whole = len(self.step_objectives) == len(self.objectives)
        if batch.has_image_B is None and batch.has_text_B is None and is_whole:
            return losses
        return Losses(total=losses.total + zero_loss(self), terms=losses.terms)

    def corrupt(self, batch: Batch) -> Corruption:
        """Sample the corruption of each objective."""
        return Corruption({objective.name: objective.corrupt(batch) for objective in self._all_objectives})

    def predict(self, batch: Batch, corruption: Corruption) -> dict[str, Any]:
        """Return objective name -> its predictions."""
        encoded = self.encode(batch, corruption)
        return {
            objective.name: objective.predict(encoded, corruption.of(objective)) for objective in self._all_objectives
        }

    def losses(self, predictions: Mapping[str, Any], corruption: Corruption) -> Losses:
        """Return the weighted sum of the objectives' losses and its terms, which are not weighted.

        Terms of objectives that the step leaves out are 0.
        """
        terms = {
            objective.name: objective.loss(predictions[objective.name], corruption.of(objective))
            for objective in self._all_objectives
        }
        weighted = [objective.weight * terms[objective.name] for objective in self._all_objectives]
        total = functools.reduce(torch.add, weighted)
        left_out = {objective.name: torch.zeros_like(total) for objective in self.objectives}
        return Losses(total=total, terms=left_out | terms)

    @abc.abstractmethod
    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Compute the states that the objectives share: every image and every text is encoded once."""

    @abc.abstractmethod
    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Encode images (B, C, H, W), or precomputed regions (B, P, D) where the model takes those, for `fuse`."""

    @abc.abstractmethod
    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """Encode texts for `fuse`."""

    @abc.abstractmethod
    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """Fuse row i of the text with row i of the image by attention."""

    @abc.abstractmethod
    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Return the attention of row i of the text to the grid cells (or regions) of row i of the images.

        The text has one row for each of the `ids_BT` from which `text` was encoded.
        """

    @abc.abstractmethod
    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the vocabulary from fused states of the text."""

    def features(self, batch: Batch) -> Fused:
        """Fuse every text of a batch with its own image, nothing masked: the input of downstream heads."""
        return self.fuse(self.texts_of(batch), self.images_of_rows(batch))

    def texts_of(self, batch: Batch) -> Tokens:
        """Encode the texts of a batch; a system may also read what else the loader adds, such as their entities."""
        return self.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)

    def images_of_rows(self, batch: Batch) -> Tokens:
        """Encode the image of each row; an image that several rows share is encoded once."""
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        return image if batch.image_of_B is None else image.rows(batch.image_of_B)

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""
        logits_B2: Tensor = self.itm_head(self.fuse(text, image).pooled_BD)
        return logits_B2

    def for_reading(self) -> Self:
        """Return the model for a head that reads images and texts: without the draws and masks of the pretraining.

        Where the configuration has `image_tokens`, all tokens of an image are read in training as well.
        """
        if getattr(self.config, "image_tokens", None) is not None:
            self.config = dataclasses.replace(self.config, image_tokens=None)
        return self

    def answer_memory(self, fused: Fused) -> Tokens:
        """Return the states that an answer decoder attends to: those of the text, then those of the image."""
        return join(fused.text, fused.image)

    def unread_by_pooled(self) -> Sequence[nn.Module]:
        """Return modules that `Fused.pooled_BD` does not depend on; a head that reads it alone freezes them."""
        return ()

    def init_decoder(self, decoder: DecoderLayers) -> None:
        """Initialise the layers of an answer decoder from the fusion-encoder, where the paper does so.

        By default they keep their random weights. Raises ConfigError when the sizes do not fit.
        """

    def image_input_of(self, batch: Batch) -> Tensor:
        """Return the pixels, or the regions in a model that takes those.

        Raises ConfigError when the model needs regions and the batch has none.
        """
        if not isinstance(self.image_encoder, RegionEncoder):
            return batch.image_BCHW
        return self.image_encoder.read(batch)

    def mask_words(self, batch: Batch) -> MaskedWords:
        """Mask words of every text of a batch. Raises ConfigError as `masking` does."""
        return sample_masked_words(batch, self.masking)

    @functools.cached_property
    def masking(self) -> TextMasking:
        """Masking of words in pretraining.

        Raises ConfigError when the model has no tokenizer, or a vocabulary without a mask token.
        """
        return text_masking(
            self,
            rate=self.config.mlm_probability,
            whole_words=self.config.whole_words,
            mask_end=self.masks_closing_token,
        )

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: encoders at `lr`, the fusion-encoder and the heads at their multiples of it.

        A child module is a head if its name ends in `head`. Biases and norms are not decayed.
        """
        groups: list[dict[str, Any]] = []
        for name, child in self.named_children():
            rate = 1.0 if name in _ENCODERS else self.config.fusion_lr_mult
            if name.endswith("head"):
                rate = self.config.head_lr_mult
            groups += [
                {**group, "name": f"{name}: {group['name']}"}
                for group in parameter_groups(child, lr * rate, weight_decay)
            ]
        return groups
