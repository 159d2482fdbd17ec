"""MGCA: instances, words and regions, and prototypes aligned (Wang et al., NeurIPS 2022, arXiv
2210.06044).
"""

import dataclasses
import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.models.base import EncoderArguments
from medvl.models.dual_encoders.bases.local import LocalDualConfig, LocalDualEncoder, local_features
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_global
from medvl.models.dual_encoders.parts.layers import (
    BatchNormHead,
    attend,
    attention_weights,
    clip_to_percentiles,
)
from medvl.models.registry import register_system
from medvl.schema import Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MGCAConfig(LocalDualConfig):
    """Published settings: ResNet-50, half a Bio_ClinicalBERT. A ViT has encoder_size None,
    patch_level -1.
    """

    fit: Literal["crop", "pad", "squash"] = "pad"
    margin: int = 16
    encoder_size: int | None = 299
    pixel_mean: float | None = 0.5
    pixel_std: float | None = 0.5
    patch_level: int = -2
    text_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"num_hidden_layers": 6}
    )
    text_pool: Literal["mean", "cls"] = "cls"
    text_token: bool = False
    local_feature_norm: float | None = 1.0
    projection_dim: int = 128
    hidden_dim: int = 2048
    max_tokens: int = 112
    softmax_temperature: float = 0.07
    local_temperature: float = 0.1
    num_prototypes: int = 500
    proto_temperature: float = 0.2
    freeze_prototypes_steps: int = 1300
    """First steps, in which prototypes are not trained: an epoch of MIMIC-CXR, 187,147 pairs in
    batches of 144.
    """
    global_weight: float = 1.0
    local_weight: float = 1.0
    prototype_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(
            self, "(0, inf)", "softmax_temperature", "local_temperature", "proto_temperature"
        )
        check_within(self, "[1, inf)", "hidden_dim", "num_prototypes")
        check_within(
            self,
            "[0, inf)",
            "freeze_prototypes_steps",
            "global_weight",
            "local_weight",
            "prototype_weight",
        )


@register_system("mgca")
class MGCA(LocalDualEncoder):
    """Alignment of instances, tokens and prototypes (sections 3.2 to 3.4).

    Unlike here, the released code compares the pairs of a rank alone, has padding among words and
    in batch norm, weighs a word by the attention to the next token, has [SEP] as a word and no
    punctuation, and does not normalise the attended vector of a ViT's patch.
    """

    Config = MGCAConfig
    weighs_words = True

    def __init__(
        self, config: MGCAConfig, *args: Any, prototype_layer: nn.Linear, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.prototype_layer = prototype_layer
        self.before_step(config.freeze_prototypes_steps)

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        inputs = {"image": image_encoder.feature_dim, "region": image_encoder.patch_dim}
        inputs |= {"text": text_encoder.feature_dim, "word": text_encoder.token_dim}
        sizes = config.projection_dim, config.hidden_dim
        heads = {
            f"{name}_head": BatchNormHead(width, *sizes, norm_output=True)
            for name, width in inputs.items()
        }
        return {
            **heads,
            "prototype_layer": nn.Linear(config.projection_dim, config.num_prototypes, bias=False),
        }

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Normalise the prototypes; they are not trained in the first `freeze_prototypes_steps`."""
        self.prototypes_frozen = step < self.config.freeze_prototypes_steps
        self.prototype_layer.weight.copy_(F.normalize(self.prototype_layer.weight, dim=1))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Compare words and regions within their pair; they are not gathered."""
        config, weight_KE, (image_NE, text_NE, _) = (
            self.config,
            self.prototype_layer.weight,
            gather_global(pairs),
        )
        if self.prototypes_frozen:
            # a gradient of zeros, because DDP waits for one
            weight_KE = weight_KE.detach() + 0 * weight_KE
        own = pairs.images.global_NE, pairs.texts.global_NE, weight_KE
        return Losses.weighted(
            ita=(
                2 * losses.clip(image_NE, text_NE, 1 / config.softmax_temperature),
                config.global_weight,
            ),
            token=(self.token_alignment(pairs.images, pairs.texts), config.local_weight),
            prototype=(
                losses.prototype_swap(*own, config.proto_temperature),
                config.prototype_weight,
            ),
        )

    def token_alignment(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return the contrast of words with their attended vectors, plus that of regions
        (section 3.3).
        """
        (regions_BPE, _), (words_BWE, mask_BW) = local_features(images), local_features(texts)
        # without words, nothing to attend to
        mask_BP = mask_BW.any(dim=1, keepdim=True).expand(regions_BPE.shape[:2])
        temperature = self.config.local_temperature
        contrast = functools.partial(
            losses.within_sample_nce, temperature=temperature, symmetric=True
        )
        for_words_BWE = attend(words_BWE, regions_BPE, None, 1 / temperature)
        for_regions_BPE = attend(regions_BPE, words_BWE, mask_BW, 1 / temperature)
        word = contrast(
            words_BWE, for_words_BWE, mask_BW, clip_to_percentiles(texts.weight_NP, mask_BW)
        )
        return word + contrast(
            regions_BPE, for_regions_BPE, mask_BP, clip_to_percentiles(images.weight_NP, mask_BP)
        )

    def attend(self, regions_BPE: Tensor, words_BWE: Tensor, mask_BW: Tensor) -> Tensor:
        weight_BWP = attention_weights(
            words_BWE, regions_BPE, scale=1 / self.config.local_temperature
        )
        return weight_BWP.masked_fill(~mask_BW[:, :, None], 0.0)

    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return the softmax of the words' matches at the temperature of their contrast; MGCA
        defines no such rule.
        """
        return (
            (match_BW / self.config.local_temperature)
            .masked_fill(~mask_BW, -torch.inf)
            .softmax(dim=1)
            .nan_to_num()
        )
