"""MutualInfo: the mutual information of radiograph and report is maximised (Liao et al., arXiv
2103.04537).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medvl import encoders
from medvl.common.config_io import check_choice, check_weights, check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses import SeparableCritic, information_bound
from medvl.models.dual_encoders.bases.base import BertDualConfig, Positives
from medvl.models.dual_encoders.bases.local import SentenceDualEncoder, local_features
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_side, negatives
from medvl.models.registry import register_system
from medvl.schema import Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutualInfoConfig(BertDualConfig):
    """Settings of the released code: the global part alone. Its text vector is the output of BERT's
    pooler; here it is the state of [CLS], as in the paper. `projection_dim` has no effect.
    """

    image_encoder: str = "resnet256"
    image_size: int = 256
    image_channels: int = 1
    text_encoder: str = "clinicalbert"
    max_tokens: int = 320
    text_pool: Literal["cls", "max"] = "cls"
    """Text vector: the state of [CLS], which random weights make almost equal, or the maximum
    over tokens.
    """
    bound: Literal["dv", "info_nce"] = "dv"
    """Bound of the mutual information: Donsker-Varadhan, or InfoNCE with the positive in its
    sum, unlike released.
    """
    critic_hidden: tuple[int, ...] = (1024, 512)
    positives: Positives = "study"
    """Pairs that are not negatives of each other: those of one study, as published."""
    global_weight: float = 1.0
    local_weight: float = 0.0
    """Weight of regions and sentences; 0 leaves them out. `global_weight` 0 is the paper's local
    version, in which nothing trains the last stage of the image encoder.
    """
    patch_level: int = -2
    """Stage of the image encoder that regions come from: 8x8x128 of resnet256."""
    text_lr_mult: float = 0.04
    """Learning rate of the text encoder, the only part with weight decay, over that of the
    others: 2e-5 / 5e-4.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.bound, ("dv", "info_nce"), "bound")
        check_choice(self.text_pool, ("cls", "max"), "text_pool")
        check_within(self, "(0, inf)", "text_lr_mult")
        check_weights(self, "global_weight", "local_weight")


@register_system("mutual_info")
class MutualInfo(SentenceDualEncoder):
    """Lower bounds of mutual information, from critics' scores of all pairs of the batch (section
    2).

    The similarity is the weighted sum of the critics' scores; `Embeddings.global_NE` is their
    input, not L2-normalised. A sentence is the mean of its tokens in the report (the paper encodes
    each sentence alone). Its score is that of its best region; the scores of sentences are summed.
    """

    Config = MutualInfoConfig
    normalized = False

    def __init__(self, config: MutualInfoConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        image = self.image_encoder
        text = self.text_encoder
        local = config.local_weight > 0
        self.inputs = Inputs(sentences=local)
        self.embeds_regions = local
        self.critic = SeparableCritic(image.feature_dim, text.feature_dim, config.critic_hidden)
        self.local_critic = (
            SeparableCritic(image.patch_dim, text.token_dim, config.critic_hidden)
            if local
            else None
        )

    @classmethod
    def encoder_arguments(
        cls, config: MutualInfoConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"in_channels": config.image_channels, "patch_level": config.patch_level}, {
            "pool": config.text_pool
        }

    @classmethod
    def make_heads(
        cls, config: MutualInfoConfig, image: ImageEncoder, text: TextEncoder
    ) -> dict[str, nn.Module]:
        """Return no heads: the critics take the encoders' own features."""
        return {"image_head": nn.Identity(), "text_head": nn.Identity()}

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of an optimiser (`MutualInfoConfig.text_lr_mult`)."""
        others = nn.ModuleList(
            module for name, module in self.named_children() if name != "text_encoder"
        )
        text = encoders.parameter_groups(
            self.text_encoder, lr * self.config.text_lr_mult, weight_decay
        )
        return [*encoders.parameter_groups(others, lr, 0.0), *text]

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Score a rank's own images with the texts of all ranks."""
        scores = self._scores(pairs.images, gather_side(pairs.texts))
        sides = negatives(pairs)
        terms = {
            name: (-information_bound(each, *sides, self.config.bound), weight)
            for name, each, weight in scores
        }
        return Losses.weighted(**terms)

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the critics' scores with the weights of their losses; of any size and
        sign.
        """
        parts = self._scores(*self.embedded(images, texts))
        return torch.stack([weight * scores_NM for _, scores_NM, weight in parts]).sum(dim=0)

    def _scores(self, images: Embeddings, texts: Embeddings) -> list[tuple[str, Tensor, float]]:
        """Return the name, the scores (N, M) and the weight of each part."""
        parts = [
            ("global", self.critic(images.global_NE, texts.global_NE), self.config.global_weight)
        ]
        if self.local_critic is not None:
            scores_NM = self.local_critic.local(local_features(images)[0], *local_features(texts))
            parts.append(("local", scores_NM, self.config.local_weight))
        return parts

    def attention_maps(
        self,
        image_BCHW: Tensor,
        texts: Sequence[str],
        original_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[Tensor]:
        """Return `sentence_maps` of the local critic. Raises ConfigError without a local part."""
        if self.local_critic is None:
            raise ConfigError(
                "no regions: train with local_weight above 0", "unsupported", field="local_weight"
            )
        return self.sentence_maps(self.local_critic, image_BCHW, texts, original_sizes)
