"""The published settings of fusion-encoders, side by side."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from medvl.errors import ConfigError
from medvl.models.base import SystemConfig

Attention = Literal["bidirectional", "seq2seq", "bar", "mixed", "non_cross"]
"""Who attends to whom in a single stream (`medvl.models.fusion_encoders.layers.attention_masks`)."""
ATTENTIONS: tuple[Attention, ...] = ("bidirectional", "seq2seq", "bar", "mixed", "non_cross")
WRITERS: tuple[Attention, ...] = ("seq2seq", "bar", "mixed")
"""Under which text learns to follow an image and the words before it: what can write."""
Objective = Literal["pretraining", "report"]
OBJECTIVES: tuple[Objective, ...] = ("pretraining", "report")
"""What MedViLL is trained for."""
Arguments = Mapping[str, int | float | bool | str]
"""Sizes for an encoder's constructor, by its library's names: `{"layers": 11}`, `{"num_hidden_layers": 3}`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig(SystemConfig):
    """What every fusion-encoder is told. The learning rates of new weights are multiples of the encoders' own."""

    image_encoder: str = "clip_vit_b16"
    """An image encoder's name, or `regions:WIDTH` for features of regions that were computed beforehand
    (`Batch.regions_BPD`)."""
    image_arguments: Arguments = dataclasses.field(default_factory=dict)
    text_encoder: str = "roberta"
    text_arguments: Arguments = dataclasses.field(default_factory=dict)
    image_size: int = 288
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    mlm_probability: float = 0.15
    """Share of words (or tokens, where `whole_words` is off) that the masked language model must guess."""
    whole_words: bool = True
    """Mask all pieces of a word or none."""
    mlm_weight: float = 1.0
    itm_weight: float = 1.0
    fusion_lr_mult: float = 5.0
    """Learning rate of the fusion-encoder and of what leads into it, as a multiple of the encoders'."""
    head_lr_mult: float = 5.0
    """Learning rate of the heads, as a multiple of the encoders'."""
    max_tokens: int = 64
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        if not 0 < self.mlm_probability < 1:
            raise ConfigError(f"mlm_probability must be within (0, 1), got {self.mlm_probability}")
        for name in ("mlm_weight", "itm_weight", "fusion_lr_mult", "head_lr_mult"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig(FusionConfig):
    """A fusion-encoder of its own on top of two encoders, both layouts alike."""

    width: int = 768
    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Of hidden states and of attention."""
    image_positions: bool = False
    """Learn a position for every region of the grid. A vision Transformer's tokens know theirs already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.width, self.layers, self.heads, self.intermediate) < 1 or self.width % self.heads:
            raise ConfigError(
                f"width {self.width} must be a multiple of heads {self.heads}, and layers {self.layers} and "
                f"intermediate {self.intermediate} positive"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be within [0, 1), got {self.dropout}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualStreamConfig(StreamConfig):
    """Two streams with co-attention: METER (Dou et al., arXiv 2111.02387) by default, LXMERT's kin by option."""

    system: ClassVar[str] = "dual_stream"

    image_arguments: Arguments = dataclasses.field(default_factory=lambda: {"layers": 11})
    """METER leaves the last block of CLIP's image tower out."""
    max_tokens: int = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleStreamConfig(StreamConfig):
    """One Transformer over image and text tokens alike, on any two encoders (VisualBERT, UNITER, ViLT by option)."""

    system: ClassVar[str] = "single_stream"

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_positions: bool = True
    attention: Attention = "bidirectional"
    seq2seq_share: float = 0.5
    """Of `mixed`: the share of samples that are trained with the sequence-to-sequence mask."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, self.seq2seq_share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class M3AEConfig(DualStreamConfig):
    """M3AE (Chen et al., arXiv 2209.07098, MICCAI 2022)."""

    system: ClassVar[str] = "m3ae"

    max_tokens: int = 64
    mask_ratio: float = 0.75
    """Share of the patches that are taken away before the image encoder's first block."""
    mim_layer: int = 3
    """The decoder reads the image stream after so many co-attention layers."""
    mim_weight: float = 1.0
    decoder_width: int = 384
    decoder_layers: int = 4
    decoder_heads: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_ratio < 1 or self.mim_weight <= 0:
            raise ConfigError("mask_ratio must be within (0, 1) and mim_weight above 0")
        if not 1 <= self.mim_layer <= self.layers:
            raise ConfigError(f"mim_layer is {self.mim_layer}: there are layers 1 to {self.layers}")
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4 or self.decoder_layers < 1:
            raise ConfigError(
                f"decoder_width {self.decoder_width} must be a multiple of 4 and of decoder_heads {self.decoder_heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedViLLConfig(FusionConfig):
    """MedViLL (Moon et al., arXiv 2105.11333, JBHI 2022): BERT itself is the joint Transformer."""

    system: ClassVar[str] = "medvill"

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_size: int = 512
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    frozen_image_layers: int = 1
    """The stem and so many stages above it are not trained; 0 trains everything."""
    image_tokens: int = 180
    """Cells of the grid that a training step draws; all of them where there are no more, and in eval mode."""
    attention: Attention = "bar"
    seq2seq_share: float = 0.5
    """Of `mixed`: the share of samples that are trained with the sequence-to-sequence mask."""
    objective: Objective = "pretraining"
    """"pretraining": masked words and matching. "report": fine-tuning for writing reports, by masked words alone, every
    text beside its own image and its closing token masked as words are (the paper's is with `seq2seq`)."""
    max_tokens: int = 255
    """With its first and its last token: 253 words' pieces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, self.seq2seq_share)
        if self.image_tokens < 1 or self.frozen_image_layers < 0:
            raise ConfigError("image_tokens must be positive and frozen_image_layers must not be negative")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective is {self.objective!r}: known are {', '.join(OBJECTIVES)}")
        if self.objective == "report" and self.attention not in WRITERS:
            raise ConfigError(f"objective 'report' goes with attention {' or '.join(WRITERS)}, not {self.attention!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ALBEFConfig(FusionConfig):
    """ALBEF (Li et al., arXiv 2107.07651, NeurIPS 2021); M2I2 and MUMC are built alike."""

    system: ClassVar[str] = "albef"

    image_encoder: str = "vit_b16"
    text_encoder: str = "bert"
    text_arguments: Arguments = dataclasses.field(default_factory=lambda: {"num_hidden_layers": 6})
    """The lower half of BERT encodes the text; the upper one is the fusion-encoder, `layers` layers of it."""
    image_size: int = 256
    whole_words: bool = False
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    max_tokens: int = 25
    layers: int = 6
    """Of the fusion-encoder, as wide as the text encoder."""
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Of the fusion-encoder's hidden states and attention."""
    projection_dim: int = 256
    """E, of the shared space."""
    itc_weight: float = 1.0
    temperature: float = 0.07
    """Where the learned one starts."""
    queue_size: int = 65_536
    """Pairs of the past that serve as negatives; 0 leaves those of the batch alone."""
    momentum: float = 0.995
    """Of the moving average that is the teacher; it moves once in every training forward pass."""
    alpha: float = 0.4
    """Weight of the teacher's targets, in the contrastive loss and for masked words."""
    ramp_steps: int = 10_000
    """Forward passes in which alpha grows from 0: the paper's first epoch, 5.1 million pairs in batches of 512."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.layers, self.heads, self.intermediate, self.projection_dim) < 1:
            raise ConfigError("layers, heads, intermediate and projection_dim must be positive")
        for name in ("dropout", "momentum", "alpha"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be within [0, 1), got {getattr(self, name)}")
        if self.temperature <= 0 or self.itc_weight <= 0:
            raise ConfigError("temperature and itc_weight must be above 0")
        if self.queue_size < 0 or self.ramp_steps < 0:
            raise ConfigError("queue_size and ramp_steps must not be negative")


def _check_attention(attention: str, seq2seq_share: float) -> None:
    if attention not in ATTENTIONS:
        raise ConfigError(f"attention is {attention!r}: known are {', '.join(ATTENTIONS)}")
    if not 0 <= seq2seq_share <= 1:
        raise ConfigError(f"seq2seq_share must be within [0, 1], got {seq2seq_share}")
