"""The base of fusion-encoders: image and text are encoded separately, once, and then attend to
each other.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self, cast

import torch
from torch import Tensor, nn

from medvl.common.compilation import untraced
from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import TextMasking
from medvl.data.transforms.operations import Kernel
from medvl.encoders import (
    ImageEncoder,
    TextEncoder,
    create_image_encoder,
    create_text_encoder,
    parameter_groups,
)
from medvl.encoders.regions import BoxCode, RegionEncoder
from medvl.errors import ConfigError
from medvl.losses.pairs.image_text import MatchingPairs
from medvl.models.base import (
    TOWERS,
    MaskedWords,
    System,
    TowersConfig,
    WordHead,
    evaluating,
    init_weights,
    sample_masked_words,
    text_masking,
    zero_loss,
)
from medvl.models.fusion_encoders.bases.objectives import (
    AlteredKind,
    AlteredTextMatching,
    Corruption,
    Encoded,
    ImageTextMatching,
    MaskedLanguageModeling,
    Objective,
)
from medvl.models.fusion_encoders.parts.encoder import (
    AttentionMaps,
    Fused,
    ImageTimes,
    Tokens,
    join,
)
from medvl.models.fusion_encoders.parts.inputs import ImageSource, sample_pairs
from medvl.models.fusion_encoders.parts.transformer import ATTENTIONS, AttentionKind, Sizes
from medvl.schema import Batch, Losses


class DecoderLayers(Protocol):
    """The part of an answer decoder that a fusion-encoder can initialise."""

    sizes: Sizes
    layers: nn.ModuleList
    word_head: WordHead


class FusionModel(System):
    """Encode each input once with `image_tokens` and `text_tokens`, keep the result, and `fuse` any
    pairs of them.

    The objectives are masked words (`mlm`) and image-text matching (`itm`), which a system creates
    by `add_heads` when it has its layers, or others that it sets. With `config.mirror_weight` and
    `config.denial_weight`, matching of altered texts follows them. Negatives are other images of
    the batch.

    `encode` computes the states that the objectives share. By default it is `encode_apart`: masked
    texts with their own images, and whole texts with the images that are sampled for them (METER,
    ViLT). A system whose masked texts are also those that are matched (BERT, VisualBERT, LXMERT,
    MedViLL) returns `encode_together`.

    Attributes:
        objectives: terms of the pretraining loss, in the order in which they sample and predict.
        mlm, itm: those of masked words and of matching.
        pooled_dim: width of `Fused.pooled_BD`, for heads.
        fused_dim: width of the fused states of image and text.
        itm_head: (B, pooled_dim) to (B, 2): no match, match.
        can_match: whether `itm_head` is trained, so that the scores of `match` are meaningful.
    """

    shared_encoders = TOWERS
    text_encoder: TextEncoder
    objectives: tuple[Objective[Any, Any, Any], ...]
    mlm: Objective[Any, MaskedWords, Any]
    itm: Objective[Any, Any, Any]
    pooled_dim: int
    fused_dim: int
    itm_head: nn.Module
    can_match: bool = True
    numbers_cells: bool = False
    """Whether an image's cells have numbers as positions, which move with the grid's size."""
    masks_closing_token: bool = False
    """Whether the closing token of a text is masked like its words."""
    image_times: ImageTimes | None
    image_between_text_tokens: ClassVar[bool] = False
    """Whether `Fused.image` starts and ends with a text token (CLS and SEP)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.image_times = None
        if config.mirror_weight or config.denial_weight:
            self.inputs = dataclasses.replace(
                self.inputs,
                mirrored_text=config.mirror_weight > 0,
                denied_text=config.denial_weight > 0,
            )
        if isinstance(self.image_encoder, RegionEncoder):
            self.inputs = dataclasses.replace(self.inputs, regions=True)

    def add_heads(self, fused_dim: int, pooled_dim: int, *, tied: bool = False) -> None:
        """Create the heads and the objectives; with `tied`, words are scored by the table of
        word embeddings.
        """
        self.fused_dim = fused_dim
        self.pooled_dim = pooled_dim
        self.mlm_head = WordHead(fused_dim, self.text_encoder.vocab_size, tied=tied)
        self.itm_head = nn.Linear(pooled_dim, 2)
        init_weights(self.itm_head)
        self.mlm = MaskedLanguageModeling(self.config.mlm_weight, self.mask_words, self.score_words)
        self.itm = ImageTextMatching(self.config.itm_weight, self.sample_pairs, self.itm_head)
        self.objectives = (self.mlm, self.itm)

    @property
    def _all_objectives(self) -> tuple[Objective[Any, Any, Any], ...]:
        config = self.config
        weights: dict[AlteredKind, float] = {
            "mirrored": config.mirror_weight,
            "denied": config.denial_weight,
        }
        altered = [
            AlteredTextMatching(weight, self, kind) for kind, weight in weights.items() if weight
        ]
        return (*self.step_objectives, *altered)

    @property
    def step_objectives(self) -> tuple[Objective[Any, Any, Any], ...]:
        """The objectives of this step: all, unless a system trains one task per step."""
        return self.objectives

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of `objectives`.

        Where samples lack an image or a text, or the step leaves objectives out, unused parameters
        get zero gradients, so that DDP does not hang.
        """
        corruption = self.corrupt(batch)
        losses = self.losses(self.predict(batch, corruption), corruption)
        is_whole = len(self.step_objectives) == len(self.objectives)
        if batch.has_image_B is None and batch.has_text_B is None and is_whole:
            return losses
        return Losses(total=losses.total + zero_loss(self), terms=losses.terms)

    @untraced  # can trace neither the CPU's generator nor the number of masked words
    def corrupt(self, batch: Batch) -> Corruption:
        """Sample the corruption of each objective."""
        return Corruption(
            {objective.name: objective.corrupt(batch) for objective in self._all_objectives}
        )

    def predict(self, batch: Batch, corruption: Corruption) -> dict[str, Any]:
        """Return objective name -> its predictions."""
        encoded = self.encode(batch, corruption)
        return {
            objective.name: objective.predict(encoded, corruption.of(objective))
            for objective in self._all_objectives
        }

    def losses(self, predictions: Mapping[str, Any], corruption: Corruption) -> Losses:
        """Return the weighted sum of the objectives' losses and its terms, which are not weighted.

        Terms of objectives that the step leaves out are 0.
        """
        terms = {
            objective.name: objective.loss(predictions[objective.name], corruption.of(objective))
            for objective in self._all_objectives
        }
        products = [objective.weight * terms[objective.name] for objective in self._all_objectives]
        total = functools.reduce(torch.add, products)
        left_out = {objective.name: torch.zeros_like(total) for objective in self.objectives}
        return Losses(total=total, terms=left_out | terms)

    @abc.abstractmethod
    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Encode images (B, C, H, W), or precomputed regions (B, P, D) where the model takes
        those, for `fuse`.
        """

    @abc.abstractmethod
    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Encode texts for `fuse`."""

    @abc.abstractmethod
    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """Fuse row i of the text with row i of the image by attention."""

    @abc.abstractmethod
    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Return the attention of row i of the text to the grid cells (or regions) of row i of the
        images.

        The text has one row for each of the `ids_BT` from which `text` was encoded.
        """

    def features(self, batch: Batch) -> Fused:
        """Fuse every text of a batch with its own image, nothing masked: the input of downstream
        heads.
        """
        return self.fuse(self.texts_of(batch), self.images_of_rows(batch))

    def texts_of(self, batch: Batch) -> Tokens:
        """Encode the texts of a batch; a system may also read what else the loader adds, such as
        their entities.
        """
        return self.text_tokens(batch.ids_BT, batch.mask_BT, batch.has_text_B)

    def images_of_rows(self, batch: Batch) -> Tokens:
        """Encode the image of each row; an image that several rows share is encoded once."""
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        image = self.with_earlier_images(image, batch)
        return image if batch.image_of_B is None else image.rows(batch.image_of_B)

    def read_earlier_images(self) -> None:
        """Make the model read the patient's earlier image (`Batch.prior_BCHW`) as tokens behind
        those of the current image, each plus a learned vector of its time.
        """
        side = self.config.image_size
        pixels_1CHW = torch.zeros(1, 1, side, side, dtype=torch.uint8, device=self.device)
        with evaluating(self):
            width = self.image_tokens(pixels_1CHW).states_BND.shape[2]
        self.image_times = ImageTimes(width).to(self.device)

    def with_earlier_images(self, image: Tokens, batch: Batch) -> Tokens:
        """Add the tokens of the earlier images, where the model reads these. Raises ConfigError."""
        if self.image_times is None:
            return image
        if batch.prior_BCHW is None:
            message = "expected earlier images: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="prior_BCHW")
        earlier = self.image_tokens(batch.prior_BCHW, batch.has_prior_B)
        return self.image_times.join(image, earlier)

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""
        logits_B2: Tensor = self.itm_head(self.fuse(text, image).pooled_BD)
        return logits_B2

    def for_reading(self) -> Self:
        """Return the model for a head that reads images and texts: without the draws and masks of
        the pretraining.

        Where the configuration has `image_tokens`, all tokens of an image are read in training as
        well.
        """
        if getattr(self.config, "image_tokens", None) is not None:
            self.config = dataclasses.replace(self.config, image_tokens=None)
        return self

    def answer_memory(self, fused: Fused) -> Tokens:
        """Return the states that an answer decoder attends to: those of the text, then those of
        the image.
        """
        return join(fused.text, fused.image)

    def unread_by_pooled(self) -> Sequence[nn.Module]:
        """Return modules that `Fused.pooled_BD` does not depend on; a head that reads it alone
        freezes them.
        """
        return ()

    def init_decoder(self, decoder: DecoderLayers) -> None:
        """Initialise the layers of an answer decoder from the fusion-encoder, where the paper does
        so.

        By default they keep their random weights. Raises ConfigError when the sizes do not fit.
        """

    def image_input_of(self, batch: Batch) -> Tensor:
        """Return the pixels, or the regions in a model that takes those.

        Raises ConfigError when the model needs regions and the batch has none.
        """
        if not isinstance(self.image_encoder, RegionEncoder):
            return batch.image_BCHW
        return self.image_encoder.read(batch)

    def mask_words(self, batch: Batch) -> MaskedWords:
        """Mask words of every text of a batch. Raises ConfigError as `masking` does."""
        return sample_masked_words(batch, self.masking)

    @functools.cached_property
    def masking(self) -> TextMasking:
        """Masking of words in pretraining.

        Raises ConfigError when the model has no tokenizer, or a vocabulary without a mask token.
        """
        return text_masking(
            self,
            rate=self.config.mlm_probability,
            whole_words=self.config.whole_words,
            mask_end=self.masks_closing_token,
        )

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimiser groups: encoders at `lr`, the fusion-encoder and the heads at their
        multiples of it.

        A child module is a head if its name ends in `head`. Biases and norms are not decayed.
        """
        groups: list[dict[str, Any]] = []
        for name, child in self.named_children():
            rate = 1.0 if name in TOWERS else self.config.fusion_lr_mult
            if name.endswith("head"):
                rate = self.config.head_lr_mult
            groups += [
                {**group, "name": f"{name}: {group['name']}"}
                for group in parameter_groups(child, lr * rate, weight_decay)
            ]
        return groups

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)

    def sample_pairs(self, batch: Batch) -> MatchingPairs:
        """Keep the image of half of the complete samples; give the others a wrong image of the
        batch.
        """
        return sample_pairs(batch)

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the vocabulary from fused states of the text."""
        backbone: Any = self.text_encoder.backbone
        table_VD = backbone.get_input_embeddings().weight if self.mlm_head.words is None else None
        scores_NV: Tensor = self.mlm_head(states_ND, table_VD)
        return scores_NV

    def word_states(self, fused: Fused, position_N: Tensor, width: int) -> Tensor:
        """(N, D): fused states at positions of the flattened (B * `width`) token ids; none may
        be the first.
        """
        row_N, column_N = position_N // width, position_N % width
        return fused.text.states_BND[row_N, column_N]

    def masked_text_tokens(self, batch: Batch, masked_ids_BT: Tensor) -> Tokens:
        """Encode the masked texts of a batch."""
        return self.text_tokens(masked_ids_BT, batch.mask_BT, batch.has_text_B)

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Compute the states that the objectives share: every image and every text is encoded
        once.
        """
        return self.encode_apart(batch, corruption)

    def encode_apart(
        self,
        batch: Batch,
        corruption: Corruption,
        image: Tokens | None = None,
        own_image: Tokens | None = None,
    ) -> Encoded:
        """Fuse masked texts with their images and whole texts with sampled ones, in one pass of
        twice the rows.

        `image` are the encoded images, if they exist already; `own_image` the images of masked
        texts, if they differ.
        """
        words = corruption.of(self.mlm)
        pairs = corruption.of(self.itm)
        image = image or self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        masked, text = self.masked_and_unmasked(batch, words)
        own, sampled = self.fuse_all(
            (masked, own_image or image), (text.rows(pairs.text_N), image.rows(pairs.image_N))
        )
        return Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=self.word_states(own, words.position_N, batch.ids_BT.shape[1]),
            pooled_MD=sampled.pooled_BD,
            own=own,
            pairs=sampled,
            matched_M=pairs.matched_N,
        )

    def encode_together(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Fuse every masked text with the image sampled for it, or its own in a system without
        matching.
        """
        image = self.image_tokens(self.image_input_of(batch), batch.has_image_B)
        return self.fuse_together(batch, corruption, image)[0]

    def fuse_together(
        self, batch: Batch, corruption: Corruption, image: Tokens
    ) -> tuple[Encoded, Fused, Tensor]:
        """See `encode_together`; also return the fused sequences, and the image of each row
        (B,).
        """
        words = corruption.of(self.mlm)
        text = self.masked_text_tokens(batch, words.ids_BT)
        row_B = image_B = torch.arange(len(batch), device=batch.ids_BT.device)
        if self.itm in self.objectives:
            pairs = corruption.of(self.itm)
            image_B = row_B.index_copy(0, pairs.text_N, pairs.image_N)
            row_B = pairs.text_N
        fused = self.fuse(text, image.rows(image_B))
        encoded = Encoded(
            batch=batch,
            image=image,
            text=text,
            word_states_ND=self.word_states(fused, words.position_N, batch.ids_BT.shape[1]),
            pooled_MD=fused.pooled_BD[row_B],
        )
        return encoded, fused, image_B

    def fuse_all(self, *inputs: tuple[Tokens, Tokens]) -> list[Fused]:
        """Fuse several batches of texts and images in one pass."""
        texts, images = zip(*inputs, strict=True)
        text: Tokens = functools.reduce(Tokens.beside, texts)
        image: Tokens = functools.reduce(Tokens.beside, images)
        return self.fuse(text, image).split([len(tokens.states_BND) for tokens in texts])

    def masked_and_unmasked(self, batch: Batch, words: MaskedWords) -> tuple[Tokens, Tokens]:
        """Encode the texts masked and unmasked in one pass of the text encoder."""
        twice = dataclasses.replace(
            batch,
            ids_BT=torch.cat([words.ids_BT, batch.ids_BT]),
            mask_BT=batch.mask_BT.repeat(2, 1),
            has_text_B=None if batch.has_text_B is None else batch.has_text_B.repeat(2),
        )
        masked, text = self.texts_of(twice).split([len(batch), len(batch)])
        return masked, text


# Settings that all fusion-encoders share. Each system's own settings are in its file.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig(TowersConfig):
    """Settings of every fusion-encoder. The learning rates of new weights are multiples of the
    encoders' own.
    """

    image_encoder: str = "clip_vit_b16"
    """An image encoder's name; `patches:SIDE` for the pixels of patches, without an encoder (ViLT);
    or `regions:WIDTH` for precomputed region features (`Batch.regions_BPD`), `regions:WIDTH+4` or
    `regions:WIDTH+7` with a box code of 4 or 7 numbers after them.
    """
    text_encoder: str = "roberta"
    image_size: int = 288
    fit: Literal["crop", "pad", "squash"] = "crop"
    """Method that makes an image square for inference
    (`medvl.data.transforms.image.EvalTransform`).
    """
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    mlm_probability: float = 0.15
    """Share of words (or tokens, if `whole_words` is off) that are masked."""
    whole_words: bool = True
    """Mask all pieces of a word or none."""
    mlm_weight: float = 1.0
    itm_weight: float = 1.0
    mirror_weight: float = 0.0
    """Weight of matching each text that names a side, and the same text with left and right
    exchanged, with its image (`AlteredTextMatching`). Random negatives seldom differ only by a
    side; 0, as published, turns it off.
    """
    denial_weight: float = 0.0
    """The same for each text that names a finding, and the same text with its findings denied
    (`medvl.data.reports.denials`), as random negatives seldom differ by a "no" alone; with an image
    that contradicts the text, the denied text is the match.
    """
    fusion_lr_mult: float = 5.0
    """Learning rate of the fusion-encoder and of its input projections, as a multiple of the
    encoders'.
    """
    head_lr_mult: float = 5.0
    """Learning rate of the heads, as a multiple of the encoders'."""
    max_tokens: int = 64
    vocab_size: int | None = None
    """Vocabulary size of the text encoder; None is the preset's own, or the tokenizer's if one
    is given.
    """

    def __post_init__(self) -> None:
        check_within(self, "(0, 1)", "mlm_probability")
        check_within(self, "(0, inf)", "mlm_weight", "itm_weight", "fusion_lr_mult", "head_lr_mult")
        check_within(self, "[0, inf)", "mirror_weight", "denial_weight")


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
    """Learn a position for every region of the grid. The tokens of a vision Transformer have
    positions already.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "width", "layers", "heads", "intermediate")
        if self.width % self.heads:
            raise ConfigError(
                f"heads must divide width {self.width}, got {self.heads}", "conflict", field="width"
            )
        check_within(self, "[0, 1)", "dropout")


def check_attention(config: Any, *, unmatched: Collection[AttentionKind] = ()) -> None:
    """Raise ConfigError unless `attention` is known and `seq2seq_share` within [0, 1].

    `unmatched` are masks that the model cannot have, because ITM cannot learn under them: its
    pooled vector depends on no text.
    """
    check_choice(config.attention, ATTENTIONS, "attention")
    if config.attention in unmatched:
        message = (
            f"attention {config.attention!r} hides the text from the pooled token, so that ITM "
            "cannot learn; use 'bar', 'mixed' or 'bidirectional', or, to write reports, 'seq2seq' "
            "with MedViLL's objective 'report'"
        )
        raise ConfigError(message, "conflict", field="attention")
    check_within(config, "[0, 1]", "seq2seq_share")


# The image encoder and the text encoder below a fusion-encoder.

_REGIONS = re.compile(r"regions:([1-9][0-9]*)(?:\+([47]))?")


def create_encoders(config: FusionConfig, *, pretrained: bool) -> tuple[ImageSource, TextEncoder]:
    """Create the encoders that a configuration names; a `RegionEncoder` for `regions:WIDTH` and
    `regions:WIDTH+CODE`.

    Raises ConfigError and WeightsError as `create_image_encoder` and `create_text_encoder` do.
    """
    text_arguments: dict[str, Any] = dict(config.text_arguments)
    text_encoder = create_text_encoder(
        config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, **text_arguments
    )
    if config.image_encoder.startswith("regions:"):
        match = _REGIONS.fullmatch(config.image_encoder)
        if match is None or config.image_arguments:
            message = (
                "expected regions:WIDTH or regions:WIDTH+CODE as in regions:1024+7 (CODE 4 or 7 "
                f"numbers of a box), without image_arguments; got {config.image_encoder!r}"
            )
            raise ConfigError(message, "wrong_type", field="image_encoder")
        code = match[2] and cast(BoxCode, int(match[2]))
        return RegionEncoder(int(match[1]), code or None), text_encoder
    image_arguments: dict[str, Any] = {"image_size": config.image_size, **config.image_arguments}
    image_encoder = create_image_encoder(
        config.image_encoder, pretrained=pretrained, **image_arguments
    )
    return image_encoder, text_encoder


def create_pixel_encoders(
    config: FusionConfig, name: str, *, pretrained: bool
) -> tuple[ImageEncoder, TextEncoder]:
    """Create the encoders of a system that does not support precomputed regions.

    Raises ConfigError if the configuration sets regions, and otherwise as `create_encoders`.
    """
    image_encoder, text_encoder = create_encoders(config, pretrained=pretrained)
    return check_pixels(image_encoder, name), text_encoder


def check_pixels(image_encoder: ImageSource, name: str) -> ImageEncoder:
    """Return the encoder. Raises ConfigError unless it reads pixels."""
    if not isinstance(image_encoder, ImageEncoder):
        message = f"{name} takes no precomputed regions; choose an image encoder"
        raise ConfigError(message, "unsupported", field="image_encoder")
    return image_encoder
