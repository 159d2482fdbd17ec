"""Base classes of dual-encoders, which embed images and texts apart, in one shared space."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, Unpack, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.data.reports.sentences import sentence_spans
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders import (
    ImageEncoder,
    TextEncoder,
    create_image_encoder,
    create_text_encoder,
    freeze_batch_norm_statistics,
    freeze_layers,
)
from medvl.errors import ConfigError
from medvl.losses.common import rows_by_rank
from medvl.losses.masked import mask_patches
from medvl.losses.pairs.blockwise import label_ids, name_ids, text_ids
from medvl.models.base import (
    TOWERS,
    Parts,
    System,
    TowersConfig,
    complete_rows,
    list_of_texts,
    stored_features,
)
from medvl.models.dual_encoders.bases.pairs import (
    ALTERED_SIDES,
    MAP_SIDES,
    Pairs,
    altered_kinds,
    altered_terms,
    embed_altered,
    embed_maps,
    map_terms,
    reads_boxes,
    reads_labels,
)
from medvl.schema import Batch, Embeddings, ImageFeatures, Losses

_MORE_SIDES = (*ALTERED_SIDES, *MAP_SIDES)
ALL = -1
"""`frozen_image_layers` for all layers."""
Positives = Literal["own", "study", "text", "either", "labels"]
"""Positives of an image among the texts of a batch, and vice versa: its own text only, as
published; also those of the same study; also equal texts; or both; or equal texts, and texts of
samples with the same positive labels (UniCL, Yang et al., arXiv 2204.03610), one or more. All
others are negatives.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSpaceConfig(TowersConfig):
    """Settings of two encoders with a shared space, of images or volumes and of texts."""

    text_encoder: str = "bioclinicalbert"
    projection_dim: int = 512
    """E, dimension of the shared space."""
    max_tokens: int = 128
    vocab_size: int | None = None
    """Embeddings of the text encoder; None takes the tokenizer's size where one is given, else
    the preset's.
    """

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "projection_dim")
        check_choice(getattr(self, "positives", "own"), get_args(Positives), "positives")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualEncoderConfig(SharedSpaceConfig):
    """Settings that every dual-encoder of images has."""

    image_encoder: str = "resnet50"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    pad_first: bool = False
    """Add the borders of an image before its resize, for "pad" alone: as the released code of
    MedCLIP does.
    """

    def transform(self, **settings: Any) -> EvalTransform:
        """Return the preparation of an image for inference, with further settings of
        `EvalTransform`.
        """
        return EvalTransform(
            size=self.image_size,
            fit=self.fit,
            resize=self.resize,
            pad_first=self.pad_first,
            **settings,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlteredTextConfig(DualEncoderConfig):
    """Settings of a dual-encoder that compares each text with the same text altered."""

    mirror_weight: float = 0.0
    """Weight of the cross-entropy of each text that names a side against the same text with left
    and right exchanged, with its image (`losses.altered_texts`). Other texts of the batch seldom
    differ only by a side; 0, as published, turns it off.
    """
    denial_weight: float = 0.0
    """The same for each text that names a finding, and the same text with its findings denied
    (`medvl.data.reports.denials`), which images that contradict the text prefer. Other texts of the
    batch seldom differ by a "no" alone. With single sentences as texts, 0.3 brought ConVIRT's right
    choices between a statement and its denial from 0.59-0.67 to 0.71 on the phantom
    (`recipes/convirt_mimic.py denials`); with whole impressions it made them rarer. 0, as
    published, turns it off.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "mirror_weight", "denial_weight")


class DualEncoder(System):
    """Two encoders with a projection head each; a system adds its loss, and its similarity unless
    it is the cosine.

    Most systems implement `compare_pairs`, a loss that depends on a batch through its embeddings
    only, and `embed_pairs` if they embed more than images and texts. The two are separate so that
    the trainer can encode a large batch part by part (`medvl.train.TrainConfig.grad_cache`). Other
    systems set `compares_pairs` to False and implement `forward`.

    Attributes:
        compares_pairs: whether the loss is `compare_pairs`.
        needs_pairs: leave out rows that lack an image or a text. A system that sets it to False
            gives each side of `embed_pairs` the rows that have it (`Embeddings.pair_N`).
        learns_scale: whether the temperature is learned, with the settings of
            `TemperatureConfig`.
        logit_scale: logarithm of the inverse temperature, where it is learned.
        patch_dropout: share of each image's patches that training drops, where the configuration
            has one.
        reads_features: whether training batches may have the stored output of the frozen image
            encoder in place of pixels (`image_features`).
        map_log_odds: whether `text_maps`, of systems that train from boxes, are log-odds.
        zero_shot_prompts: prompt set of evaluations that name none (`medvl list prompts`);
            "statements" for systems that are trained on statements or questions, and not on whole
            reports.
    """

    shared_encoders = TOWERS
    compares_pairs: ClassVar[bool] = True
    needs_pairs: ClassVar[bool] = True
    learns_scale: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False
    map_log_odds: ClassVar[bool] = False
    zero_shot_prompts: ClassVar[str] = "chexpert_ensemble"
    image_encoder: ImageEncoder
    text_encoder: TextEncoder
    logit_scale: nn.Parameter

    def __init__(
        self,
        config: Any,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        image_head: nn.Module,
        text_head: nn.Module,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.image_head = image_head
        self.text_head = text_head
        if self.learns_scale:
            self.logit_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        self.patch_dropout: float = getattr(config, "patch_dropout", 0.0)
        if self.patch_dropout and not image_encoder.can_drop_patches:
            message = (
                f"{image_encoder.name} cannot drop patches: take a vision Transformer, or "
                f"patch_dropout 0"
            )
            raise ConfigError(message, "conflict", field="patch_dropout")
        kinds, boxes, labels = altered_kinds(config), reads_boxes(config), reads_labels(config)
        if kinds or boxes or labels:
            self.inputs = dataclasses.replace(
                self.inputs,
                mirrored_text="mirrored" in kinds,
                denied_text="denied" in kinds,
                boxed_phrases=boxes,
                labels=self.inputs.labels or labels,
            )

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        image, text = cls.encoder_arguments(config)
        dropout = getattr(config, "attention_dropout", None)
        if dropout is not None:
            text = {**text, "attention_probs_dropout_prob": dropout}
        encoders = cls.make_encoders(
            config,
            {"pretrained": pretrained, **image},
            {"pretrained": pretrained, "vocab_size": config.vocab_size, **text},
        )
        frozen = getattr(config, "frozen_text_layers", 0)
        freeze_layers(encoders[1], frozen, eval_mode=False)
        frozen = getattr(config, "frozen_image_layers", 0)
        freeze_layers(encoders[0], "all" if frozen == ALL else frozen)
        heads: dict[str, Any] = {**cls.make_heads(config, *encoders)}
        return cls(
            config, *encoders, **heads, transform=cls.make_transform(config), tokenizer=tokenizer
        )

    @classmethod
    def make_encoders(
        cls, config: Any, image: Mapping[str, Any], text: Mapping[str, Any]
    ) -> tuple[Any, TextEncoder]:
        """Return both encoders, from the arguments that the system sets and those of the
        configuration.
        """
        return create_encoders(config, {"image_size": config.image_size, **image}, text)

    @classmethod
    def encoder_arguments(cls, config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return arguments of `create_image_encoder` and `create_text_encoder` that this system
        sets.
        """
        return {}, {}

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        """Return the modules behind the encoders, by name of the constructor's argument:
        image_head, text_head, ...; by default linear maps without a bias.
        """
        return {
            "image_head": nn.Linear(image_encoder.feature_dim, config.projection_dim, bias=False),
            "text_head": nn.Linear(text_encoder.feature_dim, config.projection_dim, bias=False),
        }

    @classmethod
    def make_transform(cls, config: Any) -> EvalTransform:
        """Return the preparation of an image for inference."""
        transform: EvalTransform = config.transform()
        return transform

    def encode_image(self, image_BCHW: Tensor, *, normalize: bool = True) -> Tensor:
        """Return (B, E), float32, from uint8 pixels or from normalised floats; L2-normalised unless
        `normalize=False`.

        open_clip's `encode_image` does not normalise by default.
        """
        vector_BE = self.unnormalized_image(image_BCHW)
        return F.normalize(vector_BE, dim=-1) if normalize else vector_BE

    def encode_text(
        self,
        texts: Sequence[str] | Tensor,
        mask_BT: Tensor | None = None,
        *,
        normalize: bool = True,
    ) -> Tensor:
        """Return (B, E), float32, from strings or from token ids (B, T) with their mask, as
        `encode_image`.

        Raises ConfigError for an empty list, for strings without a tokenizer, and for ids without a
        mask.
        """
        vector_BE = self.unnormalized_text(texts, mask_BT)
        return F.normalize(vector_BE, dim=-1) if normalize else vector_BE

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, E) float32: `encode_image` before the normalisation."""
        features = self.image_encoder(image_BCHW, self._draw_patches(image_BCHW))
        projected_BE: Tensor = self.image_head(features.pooled_BD)
        return projected_BE.float()

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """Return (B, E) float32: `encode_text` before the normalisation. Arguments and errors
        are the same.
        """
        ids_BT, mask_BT = self.tokenize(texts, mask_BT)
        projected_BE: Tensor = self.text_head(self.text_encoder(ids_BT, mask_BT).pooled_BD)
        return projected_BE.float()

    def image_features(self, batch: Batch) -> ImageFeatures:
        """Return the output of the image encoder: that of the pixels, of some patches with
        `patch_dropout`, or the stored one of a batch without pixels.

        A system that trains from this alone sets `reads_features`.
        """
        if batch.regions_BPD is None:
            patches_BK = self._draw_patches(batch.image_BCHW)
            features: ImageFeatures = self.image_encoder(batch.image_BCHW, patches_BK)
            return features
        return stored_features(batch, self.image_encoder)

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them."""
        return Embeddings(self.encode_image(image_BCHW))

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        """Return texts as `similarity` takes them, from token ids and their mask."""
        return Embeddings(self.encode_text(ids_BT, mask_BT))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return texts as `similarity` takes them. Raises ConfigError without a tokenizer."""
        return self.embed_ids(*self.tokenize_inputs(texts))

    def tokenize_inputs(self, texts: Sequence[str]) -> tuple[Tensor, ...]:
        """Return ids_BT and mask_BT of strings, and sentence_BT, the number of each token's
        sentence, where the system needs sentences (`Inputs.sentences`).
        """
        texts = list_of_texts(texts)
        ids_BT, mask_BT = self.tokenize(texts)
        if not self.inputs.sentences or self.tokenizer is None:
            return ids_BT, mask_BT
        sentence_BT = self.tokenizer.sentence_ids(texts, [sentence_spans(text) for text in texts])
        return ids_BT, mask_BT, sentence_BT.to(ids_BT.device)

    def text_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `tokenize_inputs` of the texts of a batch. Raises ConfigError for a batch without
        the sentences of its tokens, where the system needs them.
        """
        if not self.inputs.sentences:
            return batch.ids_BT, batch.mask_BT
        if batch.sentence_BT is None:
            message = (
                f"{self.name} needs the sentence of each token: open the loader with "
                f"inputs=model.inputs"
            )
            raise ConfigError(message, "missing", field="sentence_BT")
        return batch.ids_BT, batch.mask_BT, batch.sentence_BT

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the similarity of every image with every text; by default the cosine.

        Takes embeddings, or pixels (N, C, H, W) and strings. Encode once with `embed_images` and
        `embed_texts` where one side is compared more than once.
        """
        image_embeddings, text_embeddings = self.embedded(images, texts)
        return image_embeddings.global_NE @ text_embeddings.global_NE.T

    def pair_similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (N,): the similarity of each image with the text of the same index."""
        return self.similarity(images, texts).diagonal()

    def embedded(
        self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]
    ) -> tuple[Embeddings, Embeddings]:
        """Return both arguments of `similarity` as embeddings."""
        return (
            images if isinstance(images, Embeddings) else self.embed_images(images),
            texts if isinstance(texts, Embeddings) else self.embed_texts(texts),
        )

    def _draw_patches(self, image_BCHW: Tensor) -> Tensor | None:
        """Return (B, K) int64, the patches of each image to encode, drawn at random in training;
        None for all.
        """
        if not (self.training and self.patch_dropout):
            return None
        height, width = self.image_encoder.grid(image_BCHW.shape[2], image_BCHW.shape[3])
        device = image_BCHW.device
        # The device's own generator, seeded by the training step too: a draw on the CPU would make
        # the device wait.
        generator = (
            torch.cuda.default_generators[device.index]
            if device.type == "cuda"
            else torch.default_generator
        )
        return mask_patches(
            len(image_BCHW), height * width, self.patch_dropout, generator, device
        ).kept_BK

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Return the embeddings of all rows of a batch, or of a part of it."""
        texts = self.embed_ids(*self.text_inputs(batch))  # first: packing waits for the device
        return Pairs(images=self.embed_images(batch.image_BCHW), texts=texts)

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Return the losses of the global batch; `pairs` are the pairs of this rank, which may have
        none.

        At least one rank has a pair. Gather other ranks' embeddings with
        `medvl.losses.common.gather` or `Pairs.gather`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs compare_pairs or forward")

    @final
    def encode_pairs(self, batch: Batch) -> Pairs:
        """Return the embeddings of a batch, or of a part of it; where `needs_pairs`, of its
        complete rows.

        Other rows are not encoded, so that their placeholders do not enter batch norms. Where no
        row is complete, all rows are encoded, because every rank must use all weights. Running
        statistics are not updated in this case, nor from a single row.
        """
        row_K = None
        statistics: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.needs_pairs and not (batch.has_image_B is None and batch.has_text_B is None):
            row_K = complete_rows(batch)
            if len(row_K) < 2:
                statistics = freeze_batch_norm_statistics(self)
            if len(row_K):
                batch = batch.rows(row_K.tolist())
                row_K = None
        with statistics:
            pairs = self.embed_pairs(batch)
            more = embed_altered(self, batch) | embed_maps(self, pairs.images, batch)
        pairs = dataclasses.replace(pairs, others={**pairs.others, **more})
        groups = groups_of(batch, getattr(self.config, "positives", "own"))
        pairs = dataclasses.replace(pairs, groups=groups, labels_BL=batch.labels_BL)
        return pairs if row_K is None else pairs.rows(row_K)

    @final
    def pair_losses(self, pairs: Pairs) -> Losses:
        """Return the losses of this rank's pairs among those of all ranks.

        Where no rank has a pair, losses are 0 and all trained parameters get zero gradients, so
        that DDP does not hang.
        """
        if sum(rows_by_rank(len(pairs))):
            return self._compare_all(pairs)
        losses = self._compare_all(pairs.placeholder())
        return Losses(0 * losses.total, {name: 0 * term for name, term in losses.terms.items()})

    def _compare_all(self, pairs: Pairs) -> Losses:
        """Return the losses of `compare_pairs`, and those of altered texts and of maps."""
        own = {name: side for name, side in pairs.others.items() if name not in _MORE_SIDES}
        result = self.compare_pairs(dataclasses.replace(pairs, others=own))
        more = altered_terms(self, pairs) | map_terms(self, pairs)
        total = sum((weight * value for value, weight in more.values()), start=result.total)
        return Losses(total, {**result.terms, **{name: value for name, (value, _) in more.items()}})

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch; negatives come from the global batch of all ranks, with
        gradient.
        """
        return self.pair_losses(self.encode_pairs(batch))

    def scale(self) -> Tensor:
        """Return the factor of cosines, a scalar; in training, limit the parameter first."""
        if self.training:
            self.clamp_scale()
        return self.logit_scale.exp()

    def clamp_scale(self) -> None:
        """Limit the scale to its bounds in place: beyond a clamp in the loss, the scale would
        have no gradient.
        """
        least, most = (
            None if bound is None else math.log(bound)
            for bound in (self.config.min_scale, self.config.max_scale)
        )
        if least is not None or most is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(min=least, max=most)


def groups_of(batch: Batch, positives: Positives) -> tuple[Tensor, ...]:
    """Return the groups by which rows are positives of each other, (B,) int64 each, with equal
    numbers on every rank.

    Raises ConfigError where positives come from studies or labels and the batch has none.
    """
    groups = []
    if positives in ("study", "either"):
        if batch.studies is None:
            message = (
                f"positives is {positives!r}, but the batches have no studies: take 'text' or 'own'"
            )
            raise ConfigError(message, "conflict", field="positives")
        groups.append(name_ids(batch.studies).to(batch.ids_BT.device))
    if positives in ("text", "either", "labels"):
        groups.append(text_ids(batch.ids_BT, batch.mask_BT))
    if positives == "labels":
        if not batch.labels_BL.shape[1]:
            message = "positives is 'labels', but the data have none: take 'text' or 'own'"
            raise ConfigError(message, "conflict", field="positives")
        groups.append(label_ids(batch.labels_BL, groups[-1]))
    return tuple(groups)


def projection_head(
    in_features: int, out_features: int, hidden: int | None = None
) -> nn.Sequential:
    """Return Linear, ReLU, Linear; the hidden width is `hidden`, by default the input width."""
    width = hidden or in_features
    return nn.Sequential(
        nn.Linear(in_features, width), nn.ReLU(inplace=True), nn.Linear(width, out_features)
    )


def create_encoders(
    config: Any, image: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[ImageEncoder, TextEncoder]:
    """Create both encoders of a system from the arguments that it sets and those of the
    configuration.

    Raises ConfigError where both set the same argument.
    """
    image_encoder = create_image_encoder(
        config.image_encoder, **merge_arguments("image_arguments", image, config)
    )
    return image_encoder, create_text_encoder(
        config.text_encoder, **merge_arguments("text_arguments", text, config)
    )


def merge_arguments(field: str, settings: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return an encoder's arguments with those of the configuration. Raises ConfigError where
    both set the same one.
    """
    arguments: Mapping[str, Any] = getattr(config, field)
    twice = sorted(name for name in arguments if settings.get(name) is not None)
    if twice:
        raise ConfigError(
            f"{field} cannot set {', '.join(twice)}: use the system's settings",
            "conflict",
            field=field,
        )
    return {**settings, **arguments}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertTextConfig(SharedSpaceConfig):
    """Settings of two encoders, of which the text's is like BERT."""

    frozen_text_layers: int = 0
    """Layers of the text encoder that are frozen, with the embeddings, from the bottom; 0 trains
    everything. They keep their dropout, as in LoVT's code.
    """
    frozen_image_layers: int = 0
    """Layers or stages of the image encoder that are frozen, with the stem, from the bottom; 0
    trains everything, -1 nothing (LiT, Zhai et al., arXiv 2111.07991). Frozen batch norms keep
    their statistics.
    """
    lora_image: int = 0
    """Rank of low-rank updates (LoRA, Hu et al., arXiv 2106.09685) of the image encoder: its layers
    that are not frozen train these in place of their weights; 0 for none. Checkpoints of a run hold
    both apart; `medvl.load`, `--init-from` and exports merge them.
    """
    lora_text: int = 0
    """The same for the text encoder."""
    attention_dropout: float | None = None
    """Dropout of the text encoder's attention in training; None is its default, 0.1 in BERT. At 0,
    packed text uses the GPU's kernel for sequences of unequal length.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[0, inf)", "frozen_text_layers")
        check_within(self, "[-1, inf)", "frozen_image_layers")
        check_within(self, "[0, 1)", "attention_dropout")
        check_within(self, "[0, inf)", "lora_image", "lora_text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertDualConfig(DualEncoderConfig, BertTextConfig):
    """Settings of a dual-encoder of images with a BERT-like text encoder."""


# The learned temperature that CLIP and its successors share.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureConfig(SharedSpaceConfig):
    """Settings of two encoders whose temperature is learned; CLIP's by default."""

    temperature: float = 0.07
    """Initial temperature; the logarithm of its inverse, the scale, is learned."""
    max_scale: float | None = 100.0
    """Upper bound of the scale, applied before each training step (CLIP, section 2.5); None has
    no bound.
    """
    min_scale: float | None = None
    """Lower bound of the scale, likewise; MedCLIP's is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature")
        check_within(self, f"(0, {1 / self.temperature}]", "min_scale")
        check_within(self, f"[{1 / self.temperature}, inf)", "max_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleConfig(DualEncoderConfig, TemperatureConfig):
    """Settings of a dual-encoder of images whose temperature is learned."""
