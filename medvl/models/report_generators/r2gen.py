"""R2Gen: a Transformer with a relational memory that writes reports (Chen et al., arXiv
2010.16056, EMNLP 2020).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, Parts
from medvl.models.fusion_encoders.parts.encoder import Tokens, join
from medvl.models.fusion_encoders.parts.inputs import encode_present
from medvl.models.fusion_encoders.parts.transformer import Sizes, padding_mask
from medvl.models.registry import register_system
from medvl.models.report_generators.base import (
    Attention,
    DecoderLayer,
    ImageLayers,
    Norm,
    ReportConfig,
    ReportGenerator,
    WritingState,
    groups_by_part,
    sines,
)
from medvl.schema import Batch, Inputs

# The relational memory of R2Gen, and the decoder that it drives.
#
# Letters: as in `medvl.models.report_generators.base`; V words.


class RelationalMemory(nn.Module):
    """Slots that attend to themselves and to each new token, and are gated (R2Gen, section 2.2).

    M' = M + Attention(M, [M; y]); M'' = M' + MLP(M'); i, f = sigmoid(W y + U tanh(M)); M <- i
    tanh(M'') + f M
    """

    def __init__(self, sizes: Sizes, slots: int, heads: int) -> None:
        super().__init__()
        width = sizes.width
        self.slots = slots
        self.attention = Attention(width, heads, sizes.dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.token_gates = nn.Linear(width, 2 * width)
        self.memory_gates = nn.Linear(width, 2 * width)

    def start(self, samples: int) -> Tensor:
        """(B, M, D): the memory before the first token: an identity matrix, padded with zeros."""
        weight = self.token_gates.weight
        return torch.eye(
            self.slots, weight.shape[1], device=weight.device, dtype=weight.dtype
        ).expand(samples, -1, -1)

    def forward(self, tokens_RTD: Tensor, memory_RMD: Tensor) -> Tensor:
        """(R, T, M, D): the memory after each token. A step depends on the memory before it and
        on its token only.
        """
        token_keys, token_values = self.attention.keys_values(tokens_RTD)
        token_gates_RTF = self.token_gates(tokens_RTD)
        after = []
        for step in range(tokens_RTD.shape[1]):
            keys, values = self.attention.keys_values(memory_RMD)
            context = (
                torch.cat([keys, token_keys[:, :, step : step + 1].to(keys.dtype)], dim=2),
                torch.cat([values, token_values[:, :, step : step + 1].to(values.dtype)], dim=2),
            )
            next_RMD = memory_RMD + self.attention.attend(memory_RMD, context)
            next_RMD = next_RMD + self.mlp(next_RMD)
            gates_RMF = token_gates_RTF[:, step, None] + self.memory_gates(memory_RMD.tanh())
            input_gate, forget_gate = gates_RMF.sigmoid().chunk(2, dim=2)
            memory_RMD = input_gate * next_RMD.tanh() + forget_gate * memory_RMD
            after.append(memory_RMD)
        return torch.stack(after, dim=1)


class MemoryDecoder(nn.Module):
    """Causal Transformer over words whose norms depend on a relational memory.

    Args:
        sizes: sizes of the layers.
        vocab_size: V.
        slots, memory_heads: numbers of slots and of attention heads of the memory.
    """

    def __init__(self, sizes: Sizes, vocab_size: int, slots: int, memory_heads: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.words = nn.Embedding(vocab_size, sizes.width)
        self.memory = RelationalMemory(sizes, slots, memory_heads)
        self.layers = nn.ModuleList(DecoderLayer(sizes, slots) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)

    def read(self, image: Tokens) -> WritingState:
        """Return the state before the first token, with the keys and values of the images."""
        layers: Any = self.layers
        read = tuple(layer.cross_attention.keys_values(image.states_BND) for layer in layers)
        return WritingState(
            read, padding_mask(image.mask_BN), None, self.memory.start(len(image.states_BND))
        )

    def forward(self, ids_RT: Tensor, state: WritingState) -> tuple[Tensor, WritingState]:
        """Append tokens to the texts; return their states (R, T, D) and the state after them."""
        tokens = ids_RT.shape[1]
        before = 0 if state.written is None else state.written[0][0].shape[2]
        place_T = torch.arange(before, before + tokens, device=ids_RT.device)
        width = self.sizes.width
        words_RTD = self.words(ids_RT) * math.sqrt(width) + sines(place_T, width)
        memory_RTMD = self.memory(
            F.dropout(words_RTD, self.sizes.dropout, self.training), state.memory_RMD
        )
        states_RTD = F.dropout(words_RTD, self.sizes.dropout, self.training)
        earlier_1TK = None
        if tokens > 1:
            earlier_1TK = (torch.arange(before + tokens, device=ids_RT.device) <= place_T[:, None])[
                None
            ]
        keys_values = []
        for number, layer in enumerate(self.layers):
            old = None if state.written is None else state.written[number]
            states_RTD, new = layer(
                states_RTD, memory_RTMD, old, earlier_1TK, state.read[number], state.read_mask_B1P
            )
            keys_values.append(new)
        after = state._replace(written=tuple(keys_values), memory_RMD=memory_RTMD[:, -1])
        return self.norm(states_RTD), after


class MemoryWriter:
    """A `NextToken` of a `MemoryDecoder`: each step computes one token; keys, values and memory
    are cached.
    """

    def __init__(
        self, decoder: MemoryDecoder, word_head: nn.Linear, image: Tokens, first_id: int
    ) -> None:
        self._decoder = decoder
        self._word_head = word_head
        self._first_id = first_id
        self._state = decoder.read(image)

    def first(self) -> Tensor:
        """See `NextToken`."""
        memory_BMD = self._state.memory_RMD
        return self._step(torch.full((len(memory_BMD),), self._first_id, device=memory_BMD.device))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """See `NextToken`."""
        self._state = self._state.rows(parent_R)
        return self._step(ids_R)

    def _step(self, ids_R: Tensor) -> Tensor:
        states_R1D, self._state = self._decoder(ids_R[:, None], self._state)
        scores_RV: Tensor = self._word_head(states_R1D[:, 0])
        return scores_RV


@dataclasses.dataclass(frozen=True, kw_only=True)
class R2GenConfig(ReportConfig):
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
    """Including the first and the last token: 59 words, as the released code's max_seq_length of
    60.
    """
    vocab_size: int | None = None
    """None: the value of the tokenizer."""

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_within(self, "[1, 2]", "views")
        check_within(self, "[0, 1)", "dropout", "cell_dropout")
        check_within(
            self, "(0, inf)", "layers", "intermediate", "slots", "image_lr_mult", "max_tokens"
        )
        if self.width % 2 or self.width % self.heads or self.width % self.memory_heads:
            message = (
                f"width must be even and a multiple of heads and memory_heads, got {self.width}"
            )
            raise ConfigError(message, "conflict", field="width")


@register_system("r2gen")
class R2Gen(ReportGenerator):
    """Cells of one or two images, encoded together; the words of the report, each from those before
    it.

    Each view goes through the image encoder by itself, so that batch norms see the views apart, as
    released. Differences: `<unk>` is never written; torchvision's second ImageNet weights instead
    of its first; biases and norms are not decayed; finished hypotheses of a beam search stay among
    the others (`medvl.models.text_decoding`).
    """

    Config = R2GenConfig

    def __init__(
        self,
        config: R2GenConfig,
        image_encoder: ImageEncoder,
        vocab_size: int,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, **parts)
        self.inputs = Inputs(other_views=config.views - 1)
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
        """Raises ConfigError without a vocabulary."""
        if config.vocab_size is None and tokenizer is None:
            message = (
                "r2gen needs a vocabulary; use create_model(..., tokenizer=FOLDER), of "
                "`medvl vocab --kind words`"
            )
            raise ConfigError(message, "missing", field="tokenizer")
        arguments: Mapping[str, Any] = config.image_arguments
        image_encoder = create_image_encoder(
            config.image_encoder, pretrained=pretrained, image_size=config.image_size, **arguments
        )
        words = (
            config.vocab_size
            if tokenizer is None or config.vocab_size is not None
            else tokenizer.vocab_size
        )
        assert words is not None
        config = dataclasses.replace(config, vocab_size=words)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, words, transform=transform, tokenizer=tokenizer)

    def read(self, batch: Batch) -> Tokens:
        if batch.other_views_BVCHW is None:
            return self.image_tokens(batch.image_BCHW)
        has_other_BV = batch.has_other_view_BV
        return self.image_tokens(
            batch.image_BCHW,
            batch.other_views_BVCHW[:, 0],
            None if has_other_BV is None else has_other_BV[:, 0],
        )

    def image_tokens(
        self, image: Tensor, other: Tensor | None = None, has_other_B: Tensor | None = None
    ) -> Tokens:
        """Encode images, and with two `views` the others where `has_other_B` is True (None:
        everywhere).
        """
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
        scores_BTV: Tensor = self.word_head(self.decoder(ids_BT, self.decoder.read(image))[0])
        return scores_BTV

    def writer(self, image: Tokens, first_id: int) -> MemoryWriter:
        return MemoryWriter(self.decoder, self.word_head, image, first_id)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of `groups_by_part`."""
        return groups_by_part(self, self.config.image_lr_mult, lr, weight_decay)
