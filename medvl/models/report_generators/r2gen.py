"""R2Gen: a Transformer with a relational memory that writes reports (Chen et al., arXiv 2010.16056, EMNLP 2020)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.resizing import Kernel
from medvl.encoders import ImageEncoder, create_image_encoder, parameter_groups
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, ImageConfig, Parts
from medvl.models.fusion_encoders.parts.encoder import Tokens, join
from medvl.models.fusion_encoders.parts.inputs import encode_present
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.registry import register_system
from medvl.models.report_generators.base import ReportGenerator
from medvl.models.report_generators.layers import ImageLayers
from medvl.models.report_generators.relational_memory import MemoryDecoder, MemoryWriter
from medvl.schema import Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class R2GenConfig(ImageConfig):
    """Published settings for IU X-ray. MIMIC-CXR: one view and `max_tokens` 101."""

    image_encoder: str = "torchvision:resnet101"
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "squash"
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    views: int = 2
    """Images of a study that are read: 1, or 2, which may be missing."""
    width: int = 512
    layers: int = 3
    """Layers of the encoder, and of the decoder."""
    heads: int = 8
    intermediate: int = 512
    dropout: float = 0.1
    cell_dropout: float = 0.5
    """Dropout of the projected cells of the images."""
    slots: int = 3
    """Rows of the relational memory."""
    memory_heads: int = 8
    image_lr_mult: float = 0.5
    """Learning rate of the image encoder, as a multiple of the other parts'."""
    max_tokens: int = 61
    """Including the first and the last token: 59 words, as the released code's max_seq_length of 60."""
    vocab_size: int | None = None
    """None: the value of the tokenizer."""

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_within(self, "[1, 2]", "views")
        check_within(self, "[0, 1)", "dropout", "cell_dropout")
        check_within(self, "(0, inf)", "layers", "intermediate", "slots", "image_lr_mult", "max_tokens")
        if self.width % 2 or self.width % self.heads or self.width % self.memory_heads:
            message = f"width must be even and a multiple of heads and memory_heads, got {self.width}"
            raise ConfigError(message, "conflict", field="width")


@register_system("r2gen")
class R2Gen(ReportGenerator):
    """Cells of one or two images, encoded together; the words of the report, each from those before it.

    Each view goes through the image encoder by itself, so that batch norms see the views apart, as released.
    Differences: `<unk>` is never written; torchvision's second ImageNet weights instead of its first; biases and norms
    are not decayed; finished hypotheses of a beam search stay among the others (`medvl.models.text_decoding`).
    """

    Config = R2GenConfig

    def __init__(
        self, config: R2GenConfig, image_encoder: ImageEncoder, vocab_size: int, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, **parts)
        self.inputs = Inputs(other_view=config.views == 2)
        sizes = Sizes.of(config, config.width)
        self.image_encoder = image_encoder
        self.image_input = nn.Linear(image_encoder.patch_dim, config.width)
        self.image_layers = ImageLayers(sizes)
        self.decoder = MemoryDecoder(sizes, vocab_size, config.slots, config.memory_heads)
        self.word_head = nn.Linear(config.width, vocab_size)
        for module in (self.image_layers, self.decoder):
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)

    @classmethod
    def build(cls, config: R2GenConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class. Raises ConfigError without a vocabulary."""
        if config.vocab_size is None and tokenizer is None:
            message = "r2gen needs a vocabulary; use create_model(..., tokenizer=FOLDER), of `medvl vocab --kind words`"
            raise ConfigError(message, "missing", field="tokenizer")
        arguments: Mapping[str, Any] = config.image_arguments
        image_encoder = create_image_encoder(
            config.image_encoder, pretrained=pretrained, image_size=config.image_size, **arguments
        )
        words = config.vocab_size if tokenizer is None or config.vocab_size is not None else tokenizer.vocab_size
        assert words is not None
        config = dataclasses.replace(config, vocab_size=words)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, words, transform=transform, tokenizer=tokenizer)

    def image_tokens(self, image: Tensor, other: Tensor | None = None, has_other_B: Tensor | None = None) -> Tokens:
        """See the base class."""
        tokens = self._cells(image)
        if self.config.views == 2 and other is not None:
            second = encode_present(has_other_B, self.config.width, self._cells, other)
            if has_other_B is not None:
                second = Tokens(second.states_BND, second.real_BN() & has_other_B[:, None])
            tokens = join(tokens, second)
        encoded: Tokens = self.image_layers(tokens)
        return encoded

    def _cells(self, image: Tensor) -> Tokens:
        cells_BPD = F.relu(self.image_input(self.image_encoder(image).patches_BPD))
        return Tokens(F.dropout(cells_BPD, self.config.cell_dropout, self.training), None)

    def score_next(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        """See the base class."""
        scores_BTV: Tensor = self.word_head(self.decoder(ids_BT, self.decoder.read(image))[0])
        return scores_BTV

    def writer(self, image: Tokens, first_id: int) -> MemoryWriter:
        """See the base class."""
        return MemoryWriter(self.decoder, self.word_head, image, first_id)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: the image encoder at `image_lr_mult` times the rate of all other parts."""
        groups: list[dict[str, Any]] = []
        for name, child in self.named_children():
            rate = lr * (self.config.image_lr_mult if name == "image_encoder" else 1.0)
            groups += [
                {**each, "name": f"{name}: {each['name']}"} for each in parameter_groups(child, rate, weight_decay)
            ]
        return groups
