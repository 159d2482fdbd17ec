"""LViT: a U-Net and a branch of Transformer blocks that reads the image's text (Li et al., arXiv 2206.14718)."""

import dataclasses
from typing import Any, Literal, Self, get_args

from torch import Tensor

from medvl import losses
from medvl.common.checks import check_choice, check_labels, check_multiple, check_within
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, SystemConfig
from medvl.models.downstream.lvit_network import PATCHES, LViTNetwork, UNet
from medvl.models.downstream.lvit_text import encode_words
from medvl.models.downstream.lvit_unlabelled import PseudoLabels, References
from medvl.models.downstream.mask_model import MaskModel
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

Network = Literal["lvit", "unet"]
Text = Literal["first_level", "off"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTConfig(SystemConfig):
    """Settings of LViT; the defaults are the published ones."""

    labels: tuple[str, ...]
    image_size: int = 224
    """A multiple of 16; images are squeezed to a square, as published."""
    network: Network = "lvit"
    """`unet` is the paper's baseline, which reads no text."""
    text: Text = "first_level"
    """`off` leaves the text out of LViT's network (the paper's ablation)."""
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_weights: str | None = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    frozen_text: bool = True
    """Leave the text encoder as it is, in eval mode."""
    words: int = 10
    """Words of a text that the network reads; longer texts are cut. 10 end before the places of long descriptions."""
    width: int = 64
    """Channels of the first level, a multiple of 8."""
    unlabelled: int = 0
    """Number of unlabelled training images (`DenseDataConfig.unlabelled_images`)."""
    labelled_steps: int = 0
    """Steps on labelled images alone, before the first pseudo labels."""
    beta: float = 0.99
    """Weight of the past in a pseudo label."""
    lv_weight: float = 0.1
    """Weight of the LV loss of unlabelled images, which needs texts."""
    references: int = 14
    """Number of labelled images whose texts are compared with the text of an unlabelled image (LV)."""

    def __post_init__(self) -> None:
        check_labels(self.labels, "labels")
        check_choice(self.network, get_args(Network), "network")
        check_choice(self.text, get_args(Text), "text")
        check_within(self, "[0, 1]", "beta")
        check_within(self, "[0, inf)", "unlabelled", "labelled_steps", "lv_weight")
        check_within(self, "[1, inf)", "words", "references", "width", "image_size", "vocab_size")
        check_multiple(self, PATCHES[0], "image_size")
        check_multiple(self, 8, "width")

    @property
    def reads_text(self) -> bool:
        """Whether the network reads the text."""
        return self.network == "lvit" and self.text != "off"


@register_system("lvit")
class LViT(MaskModel):
    """Masks from an image and its text, trained by `losses.lvit`; unlabelled images by pseudo labels and the LV loss.

    The text encoder is frozen, and gives one vector for each word, the mean of its tokens, as the library that the
    authors used. Differences from the released code: modules that it creates and never calls are left out (10,025,312
    of its 39,933,345 parameters), and the 1 x 1 convolutions before a skip connection run on tokens instead of pixels,
    with equal results. Masks are 1 where they cover at least half of a pixel. The released code has no training on
    unlabelled images; see `lvit_unlabelled` for how the paper's is filled in.
    """

    Config = LViTConfig

    def __init__(self, config: LViTConfig, text_encoder: TextEncoder | None, tokenizer: Tokenizer | None) -> None:
        super().__init__(config, transform=EvalTransform(size=config.image_size, fit="squash"), tokenizer=tokenizer)
        size, labels = config.image_size, len(config.labels)
        self.grid = (size, size)
        self.text_encoder = text_encoder
        if text_encoder is not None and config.frozen_text:
            text_encoder.freeze()
        text = None if text_encoder is None else (config.words, text_encoder.token_dim)
        is_lvit = config.network == "lvit"
        self.network = LViTNetwork(3, labels, config.width, size, text) if is_lvit else UNet(3, labels, config.width)
        self.pseudo_labels = PseudoLabels(config.unlabelled, labels, size, config.beta) if config.unlabelled else None
        compares = bool(config.unlabelled and config.lv_weight)
        self.references = References(config.references, text[1], labels, size) if text and compares else None
        self._step = 0

    @classmethod
    def build(cls, config: LViTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class."""
        if not config.reads_text:
            return cls(config, None, None)
        if tokenizer is None:
            raise ConfigError("LViT reads words: give the tokenizer of its text encoder", "missing", field="tokenizer")
        arguments: dict[str, Any] = {"vocab_size": config.vocab_size, **config.text_arguments}
        return cls(config, create_text_encoder(config.text_encoder, pretrained=pretrained, **arguments), tokenizer)

    def before_step(self, step: int) -> None:
        """See the base class."""
        self._step = step

    def mask_logits(self, batch: Batch) -> Tensor:
        """See the base class."""
        return self._predict(batch)[0]

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a `DenseBatch` with masks."""
        assert isinstance(batch, DenseBatch)
        assert batch.masks_BLhw is not None
        logits_BLHW, text_BD = self._predict(batch)
        prob_BLHW, mask_BLHW = logits_BLHW.float().sigmoid(), (batch.masks_BLhw > 127).float()
        if self.pseudo_labels is None or batch.unlabelled_B is None or not self.training:
            return Losses.sum(lvit=losses.lvit(prob_BLHW, mask_BLHW))
        labelled_B, started = batch.unlabelled_B < 0, self._step >= self.config.labelled_steps
        used_B = labelled_B | started
        if started:
            mask_BLHW = self.pseudo_labels.fill(mask_BLHW, prob_BLHW, batch.unlabelled_B, batch.turn_B22)
        supervised = losses.lvit(prob_BLHW, mask_BLHW, used_B)
        if self.references is None or text_BD is None:
            return Losses.sum(lvit=supervised)
        has_text_B = True if batch.has_text_B is None else batch.has_text_B
        lv = self.references.loss(prob_BLHW, text_BD, ~labelled_B & used_B & has_text_B)
        self.references.enter(text_BD, mask_BLHW, labelled_B & has_text_B)
        return Losses.weighted(lvit=(supervised, 1.0), lv=(lv, self.config.lv_weight))

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, L, H, W), and the mean token of each text (B, D) if the network reads text."""
        image_BCHW = batch.image_BCHW.float().expand(-1, 3, -1, -1) / 255
        if self.text_encoder is None or self.tokenizer is None:
            return self.network(image_BCHW), None
        words_BWD, text_BD = encode_words(self.text_encoder, self.tokenizer, batch, self.config.words)
        return self.network(image_BCHW, words_BWD), text_BD
