"""LXMERT: layers over words, over regions, and across both (Tan and Bansal, arXiv 1908.07490,
EMNLP 2019).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.models.base import EncoderArguments, Parts, init_weights
from medvl.models.fusion_encoders.bases.objectives import Corruption, Encoded, Objective
from medvl.models.fusion_encoders.bases.region_model import (
    MaskedObjectLabels,
    MaskedRegionFeatures,
    RegionConfig,
    RegionHead,
    RegionInput,
    RegionMask,
    RegionModel,
)
from medvl.models.fusion_encoders.parts.encoder import AttentionMaps, Fused, Pooler, Tokens
from medvl.models.fusion_encoders.parts.transformer import (
    Attention,
    FeedForward,
    SelfAttentionLayer,
    Sizes,
    keep_first,
    padding_mask,
)
from medvl.models.registry import register_system
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LXMERTConfig(RegionConfig):
    """Published settings of LXMERT."""

    text_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"num_hidden_layers": 9}
    )
    image_layers: int = 5
    """Layers over regions alone."""
    layers: int = 5
    """Layers across both."""
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    max_tokens: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "layers", "heads", "intermediate")
        check_within(self, "[0, inf)", "image_layers")
        check_within(self, "[0, 1)", "dropout")


class CrossLayer(nn.Module):
    """Attention of each side to the other with the same weights, then to itself, then
    feed-forward (section 2.2).
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.cross_attention = Attention(sizes)
        self.text_attention = Attention(sizes)
        self.text_feed_forward = FeedForward(sizes)
        self.image_attention = Attention(sizes)
        self.image_feed_forward = FeedForward(sizes)

    def forward(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tokens]:
        """Return both after the layer."""
        masks = text_mask, image_mask = padding_mask(text.mask_BN), padding_mask(image.mask_BN)
        states = text.states_BND, image.states_BND
        text_BTD, image_BPD = (
            self.cross_attention(mine, other, mask)
            for mine, other, mask in zip(states, states[::-1], masks[::-1], strict=True)
        )
        text_BTD = self.text_feed_forward(self.text_attention(text_BTD, text_BTD, text_mask))
        image_BPD = self.image_feed_forward(self.image_attention(image_BPD, image_BPD, image_mask))
        return Tokens(text_BTD, text.mask_BN), Tokens(image_BPD, image.mask_BN)


@register_system("lxmert")
class LXMERT(RegionModel):
    """Masked words, masked regions and matching of half of the pairs, from one pass; the text's
    first token is pooled.

    Two objectives of the paper are left out: attributes of objects, because medvl's detectors have
    none, and question answering, which is a fine-tuning task here. Objects are predicted at masked
    regions, as in the paper; its released code predicts them at all regions.
    """

    Config = LXMERTConfig
    zeros = 0.8
    replaced = 0.1

    def __init__(self, config: LXMERTConfig, *encoders: Any, **parts: Unpack[Parts]) -> None:
        super().__init__(config, *encoders, **parts)
        width = self.text_encoder.token_dim
        sizes = Sizes.of(config, width)
        self.image_input = RegionInput(self.image_encoder, 4, width)
        self.image_layers = nn.ModuleList(
            SelfAttentionLayer(sizes) for _ in range(config.image_layers)
        )
        self.cross_layers = nn.ModuleList(CrossLayer(sizes) for _ in range(config.layers))
        self.pooler = Pooler(width)
        for module in (self.image_input, self.image_layers, self.cross_layers, self.pooler):
            init_weights(module)
        self.add_heads(width, width, tied=True)
        self.region_head, self.feature_head = (
            RegionHead(width),
            nn.Linear(width, self.image_input.features),
        )
        head = nn.Sequential(self.region_head, self.feature_head)
        features = MaskedRegionFeatures(config.region_feature_weight, self.sample_mask, head)
        regions: list[Objective[Any, Any, Any]] = [features]
        if config.region_classes:
            self.object_head = nn.Linear(width, config.region_classes)
            objects = nn.Sequential(self.region_head, self.object_head)
            regions.append(
                MaskedObjectLabels(config.region_class_weight, self.sample_mask, objects)
            )
        self.objectives = (self.mlm, self.itm, *regions)
        self.require_classes()

    def embed_regions(self, regions: Tokens, mask: RegionMask | None = None) -> Tokens:
        """Embed regions and encode them without the text."""
        states_BPD = self.image_input(regions.states_BND, mask) / 2
        states_BPD = F.dropout(states_BPD, self.config.dropout, self.training)
        for layer in self.image_layers:
            states_BPD = layer(states_BPD, padding_mask(regions.mask_BN))
        # the text attends to a missing image's placeholder, whose norms are of zeros
        if regions.mask_BN is not None:
            has_image_B11 = regions.mask_BN.any(dim=1)[:, None, None]
            states_BPD = torch.where(has_image_B11, states_BPD, states_BPD.detach())
        return Tokens(states_BPD, regions.mask_BN)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Encode the tokens; CLS alone remains of a sample without a text."""
        features = self.text_encoder(ids_BT, keep_first(mask_BT, has_text_B))
        return Tokens(features.tokens_BTD, features.mask_BT)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        for layer in self.cross_layers:
            text, image = layer(text, image)
        return Fused(text, image, self.pooler(text.states_BND))

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        *below, last = self.cross_layers
        for layer in below:
            text, image = layer(text, image)
        attention: Any = last.cross_attention
        weights_BHTP = attention.weights(
            text.states_BND, image.states_BND, padding_mask(image.mask_BN)
        )
        maps_BTP = weights_BHTP.mean(dim=1)
        return AttentionMaps(maps_BTP[:, 0], maps_BTP).cells(image, leading=0)

    def unread_by_pooled(self) -> Sequence[nn.Module]:
        last: Any = self.cross_layers[-1]
        return last.image_attention, last.image_feed_forward

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Mask both sides in the pass that matches them."""
        regions = self.read_regions(self.image_input_of(batch), batch.has_image_B)
        mask = self.mask_of(corruption)
        assert mask is not None
        encoded, fused, image_B = self.fuse_together(
            batch, corruption, self.embed_regions(regions, mask)
        )
        truth = self.masked_regions(fused, regions, mask, batch, image_B)
        altered = self.config.mirror_weight or self.config.denial_weight
        whole = self.embed_regions(regions) if altered else encoded.image
        return dataclasses.replace(encoded, image=whole, regions=truth)
