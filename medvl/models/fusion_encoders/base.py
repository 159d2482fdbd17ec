"""The base of fusion-encoders: image and text are encoded apart, once, and then attend to each other."""

import abc
import functools
from typing import Any

import torch
from torch import Tensor, nn

from medvl.data.transforms.mlm_masking import TextMasking
from medvl.encoders import parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import TwoTowers
from medvl.models.fusion_encoders.layers.encoder import AttentionMaps, Fused, Tokens
from medvl.models.fusion_encoders.layers.inputs import RegionEncoder
from medvl.schema import Batch, Losses

_ENCODERS = ("image_encoder", "text_encoder")


class FusionModel(TwoTowers):
    """Encode each input once with `image_tokens` and `text_tokens`, keep them, and `fuse` any pairs of them.

    Attributes:
        pooled_dim: width of `Fused.pooled_BD`, for heads.
        itm_head: (B, pooled_dim) to (B, 2): no match, match.
    """

    pooled_dim: int
    itm_head: nn.Linear

    def forward(self, batch: Batch) -> Losses:
        """The losses of `learn`. Where samples lack an image or a text, parameters that none of them speaks to get a
        gradient of zeros: a rank whose whole batch lacks one must not keep the others waiting for it under DDP."""
        found = self.learn(batch)
        if batch.has_image_B is None and batch.has_text_B is None:
            return found
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # What is sharded over the ranks is of another type, and nobody waits for its gradient.
        first = [parameter.flatten()[0] for parameter in learning if type(parameter) is nn.Parameter]
        return Losses(total=found.total + 0 * torch.stack(first).sum(), terms=found.terms)

    @abc.abstractmethod
    def learn(self, batch: Batch) -> Losses:
        """The losses of a system: each averages over the samples that have what it needs."""

    @abc.abstractmethod
    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Images (B, C, H, W), or precomputed regions (B, P, D) where the model takes those, ready to be fused."""

    @abc.abstractmethod
    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """Texts, ready to be fused."""

    @abc.abstractmethod
    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """Row i of both attend to each other."""

    @abc.abstractmethod
    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Where row i of the text looks in row i of the images: over the cells of their grid, or over regions. A row of
        the text's for each of the `ids_BT` that `text` was made of."""

    def features(self, batch: Batch) -> Fused:
        """A batch as heads of downstream tasks read it: nothing masked, every text with its own image."""
        text = self.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)
        return self.fuse(text, self.images_of_rows(batch))

    def images_of_rows(self, batch: Batch) -> Tokens:
        """The image of each row, ready to be fused; one that several rows share is encoded once."""
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        return image if batch.image_of_B is None else image.rows(batch.image_of_B)

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""
        logits_B2: Tensor = self.itm_head(self.fuse(text, image).pooled_BD)
        return logits_B2

    def image_input_of(self, batch: Batch) -> Tensor:
        """The pixels, or the regions of a model that takes those.

        Raises ConfigError when the batch has no regions and the model needs them.
        """
        if not isinstance(self.image_encoder, RegionEncoder):
            return batch.image_BCHW
        if batch.regions_BPD is None:
            raise ConfigError(f"{self.name} takes precomputed regions, and this batch has none: Batch.regions_BPD")
        return batch.regions_BPD

    @property
    def masks_ends(self) -> bool:
        """Whether the closing token of a text is masked as its words are."""
        return False

    @functools.cached_property
    def masking(self) -> TextMasking:
        """How words are hidden in pretraining.

        Raises ConfigError when the model has no tokenizer, or a vocabulary without a mask token.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.name} needs a tokenizer to mask words: create_model(..., tokenizer=FOLDER). "
                "Without one it encodes, fuses and matches token ids, but is not pretrained."
            )
        return TextMasking(
            self.tokenizer,
            rate=self.config.mlm_probability,
            whole_words=self.config.whole_words,
            ends=self.masks_ends,
        )

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for an optimiser: encoders at `lr`, the fusion-encoder and the heads at their multiples of it.

        A child is a head where its name ends in `head`. Biases and norms are not decayed.
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
