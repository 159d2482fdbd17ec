"""Base classes of all systems."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import medvl
from medvl.common.compilation import FEW_ROWS, filling_rows, round_up
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import TextMasking
from medvl.encoders import (
    ImageEncoder,
    TextEncoder,
    VolumeEncoder,
    create_image_encoder,
    create_text_encoder,
    create_volume_encoder,
)
from medvl.encoders.pretrained import Pretrained
from medvl.errors import ConfigError, WeightsError
from medvl.losses.common import mean_of, no_gather
from medvl.losses.masked import IGNORED, masked_positions
from medvl.schema import Batch, ImageFeatures, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """Base of the settings of a system."""

    system: ClassVar[str]
    """Name of the system; set by `medvl.models.registry.register_system`."""
    former: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Fields of earlier versions, and the constants that replaced them: settings that hold these
    are still read (`medvl.common.config_io.from_dict`).
    """


EncoderArguments = Mapping[
    str, bool | int | float | str | tuple[int, ...] | tuple[float, ...] | None
]
"""Arguments of `create_image_encoder` or `create_text_encoder` and of their library's constructor:
`{"layers": 11}`, `{"num_hidden_layers": 3}`, `{"mean": 0.5, "std": 0.5, "pad_type": "same"}`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(SystemConfig):
    """Base of the settings of a system with an image encoder."""

    image_weights: str | None = None
    """Initial weights of the image encoder: a file, a folder with one, or
    `OWNER/NAME@COMMIT[:FILE]` on the hub; with `#NAME` at its end for one of several sets of
    weights in the file. None takes those that `pretrained` selects. `create_model` reads them; a
    checkpoint has weights of its own.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowersConfig(ImageConfig):
    """Base of the settings of a system with an image encoder and a text encoder."""

    image_encoder: str
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    """Arguments of the image encoder that the system does not set itself, by its library's
    names.
    """
    text_encoder: str
    text_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_weights: str | None = None
    """Initial weights of the text encoder, as `image_weights`; for `static`, a file of word
    vectors.
    """


TOWERS: tuple[str, ...] = ("image_encoder", "text_encoder")
"""Names of both encoders in every system that has them (`System.shared_encoders`)."""
LORA_FIELDS = {
    "image_encoder": "lora_image",
    "text_encoder": "lora_text",
    "language": "lora_language",
}
"""Module -> field of the configuration with the rank of its low-rank updates, where it has one."""


_CREATE: Mapping[type[nn.Module], Any] = {
    ImageEncoder: create_image_encoder,
    TextEncoder: create_text_encoder,
    VolumeEncoder: create_volume_encoder,
}
"""Class of an encoder -> function that creates it."""


def without_lora(config: Any) -> Any:
    """Return the configuration of a system whose low-rank updates are merged."""
    ranks = {field: 0 for field in LORA_FIELDS.values() if getattr(config, field, 0)}
    return dataclasses.replace(config, **ranks) if ranks else config


class Parts(TypedDict):
    """Arguments that constructors of systems pass to the base class: the attributes of `System`
    with these names.
    """

    transform: EvalTransform
    tokenizer: Tokenizer | None


class System(nn.Module, abc.ABC):
    """Base of everything that `create_model` creates and a checkpoint holds.

    Attributes:
        image_encoder, text_encoder: of systems that have them; the same names everywhere, so that
            the encoders of a checkpoint can start another system (`medvl.models.load_towers`).
        config: settings, sufficient to build the system again.
        transform: preparation of an image for inference.
        tokenizer: None in a model that takes token ids only.
        provenance: how the weights were trained, as the checkpoint that they were loaded from
            records it; else empty.
        trained_on: manifests of the shards that the weights of a loaded checkpoint were trained on,
            as JSON objects; encoders, which other systems take, have their own
            (`medvl.models.checkpoint_folder`).
    """

    name: ClassVar[str]
    """Name for `create_model`; set by `medvl.models.registry.register_system`."""
    Config: ClassVar[type[SystemConfig]]
    """Frozen dataclass of settings."""
    weights_version: ClassVar[int] = 1
    """Version of the layout of the weights; checkpoints of another one are refused."""
    shared_encoders: ClassVar[tuple[str, ...]] = ()
    """Encoders that a checkpoint of another system can initialise."""
    optional_parts: ClassVar[tuple[str, ...]] = ()
    """Names of modules that may be missing in a checkpoint that a model starts from, or in the
    model.
    """
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Module -> last parts of the names of its layers that get low-rank updates; default as
    `medvl.encoders.add_lora`.
    """
    inputs: Inputs = Inputs()
    """Optional parts of a batch that `forward` needs; loaders of a training run make them."""

    image_encoder: nn.Module
    text_encoder: Any

    def __init__(
        self,
        config: Any,
        image_encoder: nn.Module | None = None,
        text_encoder: TextEncoder | None = None,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__()
        if image_encoder is not None:
            self.image_encoder = image_encoder
        if text_encoder is not None:
            self.text_encoder = text_encoder
        self.config = config
        self.transform = transform
        self.tokenizer = tokenizer
        self.provenance: Mapping[str, Any] = {}
        self.trained_on: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    @abc.abstractmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Build the system from its settings; with `pretrained`, from the encoders' published
        weights.

        Raises ConfigError and WeightsError as `create_model` does.
        """

    @classmethod
    def loaded_config(cls, config: Any) -> Any:
        """Return the configuration of a loaded model, whose low-rank updates are merged."""
        return without_lora(config)

    @classmethod
    def outside_files(cls, config: Any) -> list[Path]:
        """Return safetensors files that a model is built from beside its checkpoint."""
        return []

    def outside_weights(self) -> dict[str, Tensor]:
        """Return the weights from `outside_files`, which a checkpoint leaves out."""
        return {}

    @abc.abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a training batch."""

    @classmethod
    def from_pretrained(cls, name: Path | str, *, revision: str | None = None) -> Self:
        """Load a model of this class in eval mode (`medvl.from_pretrained`). Raises ConfigError
        for another system.
        """
        model = medvl.models.from_pretrained(name, revision=revision)
        if not isinstance(model, cls):
            message = f"expected a {cls.__name__}, got a {model.name} in {name}; use medvl.load"
            raise ConfigError(message, "wrong_type", field="name")
        return model

    def save_pretrained(self, folder: Path | str, **options: Any) -> Path:
        """Write the model into a new folder that `medvl.load` reads
        (`medvl.models.save_pretrained`).
        """
        return medvl.models.save_pretrained(self, folder, **options)

    def push_to_hub(self, hub_id: str, **options: Any) -> str:
        """Upload the model to the Hugging Face hub (`medvl.models.push_to_hub`)."""
        return medvl.models.push_to_hub(self, hub_id, **options)

    def load_encoders(self, image: Pretrained, text: Pretrained) -> None:
        """Load initial weights of the encoders; an encoder whose source is False keeps its own.

        Raises ConfigError where the system has no such encoder, WeightsError as
        `create_image_encoder` does.
        """
        for part, source in (("image", image), ("text", text)):
            if source is not False:
                try:
                    self._load_encoder(f"{part}_encoder", source)
                except WeightsError as error:
                    raise WeightsError(str(error), error.code, field=f"{part}_weights") from error

    def _load_encoder(self, part: str, source: Pretrained) -> None:
        encoder: Any = getattr(self, part, None)
        if not isinstance(encoder, ImageEncoder | TextEncoder | VolumeEncoder):
            message = f"{self.name} has no {part} that reads weights"
            raise ConfigError(message, "unsupported", field=part.replace("encoder", "weights"))
        create: Any = next(make for kind, make in _CREATE.items() if isinstance(encoder, kind))
        arguments = {**encoder.config, "name": getattr(self.config, part, encoder.name)}
        if arguments["name"] == "static" and self.tokenizer is not None:
            arguments["vocabulary"] = self.tokenizer.vocabulary
        encoder.load_state_dict(create(**arguments, pretrained=source).state_dict())

    def loss_counts(self, batch: Batch) -> Tensor | None:
        """Return how many elements each loss of a batch is a sum over, on its device; None for
        losses of whole batches.

        The training step sets `batch.mean_counts_K` to the mean counts of an update's batches over
        all ranks.
        """
        return None

    def before_step(self, step: int) -> None:
        """Update state before the forward pass of optimiser step `step`, from 0: clamps,
        freezing, normalisation.
        """

    def after_step(self, step: int) -> None:
        """Update state after optimiser step `step`, from 0, unless it was skipped: moving
        averages.
        """

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def tokenize(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (ids_BT, mask_BT) on the model's device, from strings or from ids with their mask.

        Raises ConfigError for an empty list, for strings without a tokenizer, and for ids without a
        mask.
        """
        if isinstance(texts, Tensor):
            if mask_BT is None:
                raise ConfigError(
                    "token ids need a mask: encode_text(ids_BT, mask_BT)",
                    "missing",
                    field="mask_BT",
                )
            return texts, mask_BT
        ids_BT, mask_BT = self.require_tokenizer("text in place of token ids")(list_of_texts(texts))
        return ids_BT.to(self.device), mask_BT.to(self.device)

    def require_tokenizer(self, use: str) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError without one, with the use that needs it."""
        if self.tokenizer is None:
            message = (
                f"{self.name}: {use} needs a tokenizer; use create_model(..., tokenizer=FOLDER)"
            )
            raise ConfigError(message, "missing", field="tokenizer")
        return self.tokenizer

    def make_batch(
        self, image_BCHW: Tensor, questions: Sequence[str], ids_BT: Tensor, mask_BT: Tensor
    ) -> Batch:
        """Return a batch on the model's device of images with a question each, which has the
        tokens `ids_BT`.

        Raises ConfigError for unequal numbers of images and questions.
        """
        count = len(questions)
        if len(image_BCHW) != count:
            message = f"expected as many images as questions, got {len(image_BCHW)} and {count}"
            raise ConfigError(message, "mismatch", field="questions")
        return Batch(
            keys=[str(number) for number in range(count)],
            image_BCHW=image_BCHW,
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.empty(count, 0),
            texts=list(questions),
        ).to(self.device)


def has_towers(model: System) -> bool:
    """Return whether a model has both an image encoder and a text encoder to share."""
    return {*TOWERS} <= {*model.shared_encoders}


def list_of_texts(texts: Sequence[str]) -> list[str]:
    """Return a text or several as a list. Raises ConfigError for an empty list."""
    if not len(texts) and not isinstance(texts, str):
        raise ConfigError("expected at least one text, got an empty list", "empty", field="texts")
    return [texts] if isinstance(texts, str) else list(texts)


def mean_count(batch: Batch) -> Tensor | None:
    """Return the mean count of a model with one of `loss_counts`; None outside of the training
    step.
    """
    return None if batch.mean_counts_K is None else batch.mean_counts_K[0]


def update_mean(batch: Batch, total: Tensor, count: Tensor) -> Tensor:
    """Return a summed loss divided by the mean count of the update; outside of the training step
    by `count`.
    """
    mean = mean_count(batch)
    return mean_of(total, count if mean is None else mean)


def zero_loss(model: nn.Module) -> Tensor:
    """Return 0 with zero gradients for all trained parameters, so that DDP does not wait for
    those that are unused.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Sharded parameters (FSDP) are of another type, and no rank waits for their gradients.
    return (
        0
        * torch.stack(
            [parameter.flatten()[0] for parameter in trained if type(parameter) is nn.Parameter]
        ).sum()
    )


def complete_rows(batch: Batch) -> Tensor:
    """Return (N,) int64: the rows of a batch that have both an image and a text."""
    if batch.has_image_B is None and batch.has_text_B is None:
        return torch.arange(len(batch.mask_BT), device=batch.mask_BT.device)  # without a wait
    complete_B = torch.ones_like(batch.mask_BT[:, 0])
    for has_B in (batch.has_image_B, batch.has_text_B):
        complete_B = complete_B if has_B is None else complete_B & has_B
    return complete_B.nonzero().squeeze(1)


def vector_rows(feature_dim: int, patch_dim: int) -> int:
    """Return the number of rows of the width of a patch that hold an image's vector."""
    return -(-feature_dim // patch_dim)


def stored_features(batch: Batch, encoder: ImageEncoder) -> ImageFeatures:
    """Return the output of a frozen image encoder that a batch has in place of pixels: the pooled
    vector and the patches, one after another in `Batch.regions_BPD` (`medvl regions --all-tokens`).

    A vector wider than a patch has several rows (`vector_rows`). A batch without any image gets
    zeros.
    """
    assert batch.regions_BPD is not None, "the batch has stored features"
    tokens_BKD = batch.regions_BPD.float()
    rows = vector_rows(encoder.feature_dim, encoder.patch_dim)
    if not tokens_BKD.shape[1]:
        tokens_BKD = tokens_BKD.new_zeros(len(tokens_BKD), rows + 1, encoder.patch_dim)
    vector_BD = tokens_BKD[:, :rows].flatten(1)[:, : encoder.feature_dim]
    return ImageFeatures(pooled_BD=vector_BD, patches_BPD=tokens_BKD[:, rows:], grid=None)


# Initialisation of layers as in BERT (Devlin et al., arXiv 1810.04805).

LAYER_NORM_EPS = 1e-12
"""As in BERT."""
INIT_STD = 0.02


def init_weights(module: nn.Module) -> None:
    """Initialise as BERT: linear layers and embeddings from N(0, 0.02), biases with zeros, norms
    with ones.
    """
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=INIT_STD)
        if isinstance(child, nn.LayerNorm):
            nn.init.ones_(child.weight)
        if isinstance(child, nn.Linear | nn.LayerNorm) and child.bias is not None:
            nn.init.zeros_(child.bias)


# Masked words of a batch and the head that predicts them, for systems that keep masked language
# modelling.
#
#     words = sample_masked_words(batch, text_masking(model, rate=0.15, whole_words=True))
#     logits_NV = head(states_BTD.flatten(0, 1)[words.position_N], table_VD)
#     loss = losses.mlm(logits_NV, words.target_N)
#
# Words are sampled before any arithmetic, from torch's CPU generator, which the training step
# seeds: a batch is masked alike on every device.
#
# B batch, T text tokens, N masked positions, V vocabulary, D width.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedWords:
    """The texts of a batch with some words masked."""

    ids_BT: Tensor
    labels_BT: Tensor
    """int64: the original id at masked positions, -100 elsewhere."""
    position_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch, filled up to one of few numbers
    with a position that is not masked, whose label losses leave out.
    """

    @property
    def target_N(self) -> Tensor:
        """The original ids at the masked positions."""
        return self.labels_BT.flatten()[self.position_N]


def sample_masked_words(
    batch: Batch, masking: TextMasking, span_BT: Tensor | None = None
) -> MaskedWords:
    """Mask words of every text, all of a span or none (`TextMasking`); samples without a text
    have none.
    """
    mask_BT = (
        batch.mask_BT if batch.has_text_B is None else batch.mask_BT & batch.has_text_B[:, None]
    )
    masked = masking(batch.ids_BT, mask_BT, torch.default_generator, span_BT)
    position_N = masked_positions(masked.labels_BT)
    count = len(position_N)
    filling = min(round_up(count, 16, FEW_ROWS), mask_BT.numel()) - count
    if count > FEW_ROWS and filling:
        unmasked = (masked.labels_BT.flatten() == IGNORED).int().argmax()
        position_N = torch.cat([position_N, unmasked.expand(filling)])
    return MaskedWords(ids_BT=masked.ids_BT, labels_BT=masked.labels_BT, position_N=position_N)


def text_masking(
    model: System, *, rate: float, whole_words: bool, mask_end: bool = False, longest_span: int = 1
) -> TextMasking:
    """Return the masking of a model's texts.

    Raises ConfigError when the model has no tokenizer, or a vocabulary without a mask token.
    """
    tokenizer = model.require_tokenizer("masking words")
    return TextMasking(
        tokenizer, rate=rate, whole_words=whole_words, mask_end=mask_end, longest_span=longest_span
    )


class WordHead(nn.Module):
    """BERT's head over the vocabulary: dense, GELU, LayerNorm, a linear layer with a bias for every
    word.

    Args:
        width: D of the states.
        vocab_size: V.
        tied: use the text encoder's table of word embeddings, passed to `forward`, as the linear
            layer's matrix.
        table_width: width of that table, where it is another one (ALBERT).
        approximate: "tanh" for the approximation of GELU in ALBERT.
        eps: epsilon of the LayerNorm.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        tied: bool = False,
        table_width: int | None = None,
        approximate: Literal["none", "tanh"] = "none",
        eps: float = LAYER_NORM_EPS,
    ) -> None:
        super().__init__()
        inner = table_width or width
        self.approximate = approximate
        self.dense = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(inner, eps=eps)
        self.words = None if tied else nn.Linear(inner, vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        init_weights(self)

    def forward(self, states_ND: Tensor, table_VD: Tensor | None = None) -> Tensor:
        """(N, V): scores of every word. Pass the states of masked positions only: the head is
        expensive.
        """
        count = len(states_ND)
        states_RD = F.pad(states_ND, (0, 0, 0, filling_rows(count, states_ND.device)))
        hidden_RD = self.norm(F.gelu(self.dense(states_RD), approximate=self.approximate))
        if self.words is None:
            assert table_VD is not None, "a tied head needs the table of word embeddings"
            return F.linear(hidden_RD, table_VD, self.bias)[:count]
        scores_RV: Tensor = self.words(hidden_RD) + self.bias
        return scores_RV[:count]


# A context manager for inference with a model that may be in training.


class HasModules(Protocol):
    """An object with submodules: an `nn.Module`, or a wrapper of one."""

    def modules(self) -> Iterator[nn.Module]:
        """Return an iterator over all submodules, as `nn.Module.modules` does."""


@contextlib.contextmanager
def evaluating(model: HasModules, *, gradients: bool = False) -> Iterator[None]:
    """Switch to eval mode without gradients (unless `gradients`) and without gathering across
    ranks; restore each module's mode on exit.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.set_grad_enabled(gradients), no_gather():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
