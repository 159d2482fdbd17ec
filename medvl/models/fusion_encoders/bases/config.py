"""Settings that all fusion-encoders share. Each system's own settings are in its file."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from medvl.common.checks import check_choice, check_within
from medvl.data.transforms.resizing import Kernel
from medvl.errors import ConfigError
from medvl.models.base import TowersConfig
from medvl.models.fusion_encoders.parts.attention_masks import ATTENTIONS, Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig(TowersConfig):
    """Settings of every fusion-encoder. The learning rates of new weights are multiples of the encoders' own."""

    image_encoder: str = "clip_vit_b16"
    """An image encoder's name; `patches:SIDE` for the pixels of patches, without an encoder (ViLT); or `regions:WIDTH`
    for precomputed region features (`Batch.regions_BPD`), `regions:WIDTH+4` or `regions:WIDTH+7` with a box code of 4
    or 7 numbers after them."""
    text_encoder: str = "roberta"
    image_size: int = 288
    fit: Literal["crop", "pad", "squash"] = "crop"
    """Method that makes an image square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    mlm_probability: float = 0.15
    """Share of words (or tokens, if `whole_words` is off) that are masked."""
    whole_words: bool = True
    """Mask all pieces of a word or none."""
    mlm_weight: float = 1.0
    itm_weight: float = 1.0
    mirror_weight: float = 0.0
    """Weight of matching each text that names a side, and the same text with left and right exchanged, with its image
    (`MirroredTextMatching`). Random negatives seldom differ only by a side; 0, as published, turns it
    off."""
    fusion_lr_mult: float = 5.0
    """Learning rate of the fusion-encoder and of its input projections, as a multiple of the encoders'."""
    head_lr_mult: float = 5.0
    """Learning rate of the heads, as a multiple of the encoders'."""
    max_tokens: int = 64
    vocab_size: int | None = None
    """Vocabulary size of the text encoder; None is the preset's own, or the tokenizer's if one is given."""

    def __post_init__(self) -> None:
        check_within(self, "(0, 1)", "mlm_probability")
        check_within(self, "(0, inf)", "mlm_weight", "itm_weight", "fusion_lr_mult", "head_lr_mult")
        check_within(self, "[0, inf)", "mirror_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig(FusionConfig):
    """Settings of a separate fusion-encoder on top of two encoders, in either layout."""

    width: int = 768
    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Dropout of hidden states and of attention."""
    image_positions: bool = False
    """Learn a position for every region of the grid. The tokens of a vision Transformer have positions already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "width", "layers", "heads", "intermediate")
        if self.width % self.heads:
            raise ConfigError(f"heads must divide width {self.width}, got {self.heads}", "conflict", field="width")
        check_within(self, "[0, 1)", "dropout")


def check_attention(config: Any, *, unmatched: Collection[Attention] = ()) -> None:
    """Raise ConfigError unless `attention` is known and `seq2seq_share` within [0, 1].

    `unmatched` are masks that the model cannot have, because ITM cannot learn under them: its pooled vector depends on
    no text.
    """
    check_choice(config.attention, ATTENTIONS, "attention")
    if config.attention in unmatched:
        message = (
            f"attention {config.attention!r} hides the text from the pooled token, so that ITM cannot learn; use "
            "'bar', 'mixed' or 'bidirectional', or, to write reports, 'seq2seq' with MedViLL's objective 'report'"
        )
        raise ConfigError(message, "conflict", field="attention")
    check_within(config, "[0, 1]", "seq2seq_share")
