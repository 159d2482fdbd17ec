"""ConVIRT: contrastive learning of a report sentence and its image (Zhang et al., arXiv
2010.00747, MLHC 2022).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.base import (
    AlteredTextConfig,
    BertDualConfig,
    DualEncoder,
    Positives,
    projection_head,
)
from medvl.models.dual_encoders.bases.local import local_features
from medvl.models.dual_encoders.bases.pairs import (
    LabelMapConfig,
    Pairs,
    gather_global,
    reads_labels,
)
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConVIRTConfig(BertDualConfig, AlteredTextConfig, LabelMapConfig):
    """Settings of the paper.

    Its training code was not released: max pooling over tokens, the 512 dimensions and the width of
    the heads are as in LoVT's re-implementation.
    """

    hidden_dim: int | None = None
    """Hidden width of both heads; None: the width of their input; 0: linear heads."""
    feature_dropout: float = 0.0
    """Dropout of the image encoder's output before its head, for heads on a frozen encoder."""
    text_pool: Literal["max", "mean"] = "max"
    """Pooling of tokens; the mean is used by an unofficial re-implementation."""
    frozen_text_layers: int = 6
    patch_dropout: float = 0.0
    """Share of each image's patches that training drops at random: twice the speed at one half
    (FLIP, Li et al., arXiv 2212.00794). Vision Transformers only; a last epoch without it closes
    the gap to inference.
    """
    temperature: float = 0.1
    image_weight: float = 0.75
    """Lambda: weight of the image-to-text direction."""
    positives: Positives = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature", "label_map_sharpness")
        check_within(self, "[0, inf)", "hidden_dim")
        check_within(self, "[0, 1]", "image_weight")
        check_within(self, "[0, 1)", "patch_dropout", "feature_dropout")
        check_within(self, "[0, inf)", "label_map_weight")


@register_system("convirt")
class ConVIRT(DualEncoder):
    """Bidirectional InfoNCE of an image and one sentence of its report (section 2.2, equations 2
    to 4).

    With `label_map_weight`, the head of images maps each cell of the encoder's last grid too. The
    cosine of a cell with a text, over the temperature, is the log-odds of the text in the cell.
    """

    Config = ConVIRTConfig
    reads_features = True

    @classmethod
    def encoder_arguments(
        cls, config: ConVIRTConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {}, {"pool": config.text_pool}

    @classmethod
    def make_heads(
        cls, config: ConVIRTConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        def head(width: int) -> nn.Module:
            if config.hidden_dim == 0:
                return nn.Linear(width, config.projection_dim)
            return projection_head(width, config.projection_dim, config.hidden_dim)

        return {
            "image_head": head(image_encoder.feature_dim),
            "text_head": head(text_encoder.feature_dim),
        }

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Return the embeddings; with `label_map_weight`, those of the cells of images too.

        Raises ConfigError for an image encoder whose vector is not as wide as its cells.
        """
        encoder = self.image_encoder
        with_cells = reads_labels(self.config)
        if with_cells and encoder.patch_dim != encoder.feature_dim:
            message = (
                f"{encoder.name} has no cells that the head of images maps: take another image "
                f"encoder, or label_map_weight 0"
            )
            raise ConfigError(message, "conflict", field="label_map_weight")
        texts = self.embed_ids(*self.text_inputs(batch))  # first: packing waits for the device
        features = self.image_features(batch)
        global_BE = self._project(features.pooled_BD)
        cells_BPE = None
        if with_cells:
            assert features.patches_BPD is not None, "cells are as wide as the vector"
            cells_BPE = self._project(features.patches_BPD)
        return Pairs(images=Embeddings(global_BE, cells_BPE), texts=texts)

    def _project(self, features: Tensor) -> Tensor:
        """Return the unit vectors of features (..., D) of a training batch, with dropout."""
        dropped_out = F.dropout(features, self.config.feature_dropout, self.training)
        return F.normalize(self.image_head(dropped_out).float(), dim=-1)

    def text_scores(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (B, M, P): the log-odds of every text in the cells of every image."""
        cells_BPE, _ = local_features(images)
        scores_BMP = torch.einsum("bpe,me->bmp", cells_BPE, texts.global_NE)
        return scores_BMP / self.config.temperature

    def compare_pairs(self, pairs: Pairs) -> Losses:
        image_NE, text_NE, groups = gather_global(pairs)
        temperature = self.config.temperature
        weight = self.config.image_weight
        return Losses.sum(
            contrastive=losses.convirt(image_NE, text_NE, temperature, weight, groups=groups)
        )
