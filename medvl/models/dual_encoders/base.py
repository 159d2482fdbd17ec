"""The base of dual-encoders: image and text are embedded apart and compared in one space."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.gather import gather
from medvl.losses.mim import mask_patches
from medvl.losses.positives import name_ids, text_ids
from medvl.models.base import TwoTowers
from medvl.schema import Batch, Embeddings, Losses

Positives = Literal["own", "study", "text", "either"]
"""Which texts of a batch are an image's positives, and the other way round: its own, as published; those of its study
as well, or those that read the same, or either. What is no positive is a negative."""


class DualEncoder(TwoTowers):
    """Two towers with a head each. A system adds its loss, and its similarity where that is more than the cosine.

    `tokenizer` may be None in a model that is given token ids only; `encode_text` and `embed_texts` of strings then
    raise ConfigError.

    Attributes:
        patch_dropout: share of an image's patches that training leaves out, where the configuration has one.
    """

    image_encoder: ImageEncoder

    def __init__(
        self,
        config: Any,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        image_head: nn.Module,
        text_head: nn.Module,
        *,
        transform: EvalTransform,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, transform=transform, tokenizer=tokenizer)
        self.image_head, self.text_head = image_head, text_head
        self.patch_dropout: float = getattr(config, "patch_dropout", 0.0)
        if self.patch_dropout and not image_encoder.can_drop_patches:
            raise ConfigError(
                f"patch_dropout is {self.patch_dropout}, but {image_encoder.name} needs all patches: take a vision "
                "Transformer, or 0"
            )

    def encode_image(self, image_BCHW: Tensor) -> Tensor:
        """(B, E), L2-normalised, float32. Takes uint8 pixels, or floats that are already normalised."""
        features = self.image_encoder(image_BCHW, self._draw_patches(image_BCHW))
        return F.normalize(self.image_head(features.pooled_BD).float(), dim=-1)

    def encode_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """(B, E), L2-normalised, float32. Takes strings, or token ids (B, T) with their mask."""
        ids_BT, mask_BT = self.tokenize(texts, mask_BT)
        features = self.text_encoder(ids_BT, mask_BT)
        return F.normalize(self.text_head(features.pooled_BD).float(), dim=-1)

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Images as `similarity` takes them."""
        return Embeddings(self.encode_image(image_BCHW))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Texts as `similarity` takes them."""
        return Embeddings(self.encode_text(texts))

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """(N, M): the cosine of every image with every text.

        Takes embeddings, or pixels (N, C, H, W) and strings: encode once with `embed_images` and `embed_texts` where
        one side is compared more than once.
        """
        image_embeddings = images if isinstance(images, Embeddings) else self.embed_images(images)
        text_embeddings = texts if isinstance(texts, Embeddings) else self.embed_texts(texts)
        return image_embeddings.global_NE @ text_embeddings.global_NE.T

    def _draw_patches(self, image_BCHW: Tensor) -> Tensor | None:
        """(B, K) int64: the patches of each image that are encoded, drawn in training; None for all of them."""
        if not (self.training and self.patch_dropout):
            return None
        height, width = self.image_encoder.grid(image_BCHW.shape[2], image_BCHW.shape[3])
        device = (
            image_BCHW.device
        )  # its own generator, which the step seeds too: a draw of the CPU's would be waited for
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        return mask_patches(len(image_BCHW), height * width, self.patch_dropout, generator, device).kept_BK


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """All that a contrastive loss asks of a batch: images and texts, row for row."""

    images: Embeddings
    texts: Embeddings
    groups: tuple[Tensor, ...] = ()
    """(B,) int64 each, of `groups_of`: rows that agree in any of them are each other's positives."""

    def embeddings(self) -> list[Tensor]:
        """The tensors that have a gradient, in an order of their own."""
        both = (self.images.global_NE, self.images.local_NPE, self.texts.global_NE, self.texts.local_NPE)
        return [tensor for tensor in both if tensor is not None]

    def rows(self, row_K: Tensor) -> Self:
        """Some of the pairs."""
        groups = tuple(group_B[row_K] for group_B in self.groups)
        return type(self)(_rows(self.images, row_K), _rows(self.texts, row_K), groups)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The pairs of all parts, in order; differentiable. Words are padded to the longest text of all."""
        groups = zip(*(part.groups for part in parts), strict=True)
        return cls(
            _cat([part.images for part in parts]),
            _cat([part.texts for part in parts]),
            tuple(torch.cat(group) for group in groups),
        )


class ContrastiveEncoder(DualEncoder):
    """A dual-encoder whose loss asks nothing of a batch but its embeddings.

    So its forward pass has two halves: one that may be done in parts, and one that wants all pairs at once. The trainer
    can encode a large batch part by part (`medvl.train.TrainConfig.grad_cache`).
    """

    @abc.abstractmethod
    def encode_pairs(self, batch: Batch) -> Pairs:
        """The embeddings of a batch or of a part of it. Rows that take no part in the loss are left out."""

    @abc.abstractmethod
    def compare_pairs(self, pairs: Pairs) -> Losses:
        """The losses of this rank's pairs among those of all ranks."""

    def forward(self, batch: Batch) -> Losses:
        """Negatives are all other pairs of the global batch, of every rank, with gradient."""
        return self.compare_pairs(self.encode_pairs(batch))


def groups_of(batch: Batch, positives: Positives) -> tuple[Tensor, ...]:
    """By what rows of a batch are each other's positives, (B,) int64 each: the same numbers on every rank.

    Raises ConfigError where studies should tell and the batch does not know them.
    """
    groups = []
    if positives in ("study", "either"):
        if batch.studies is None:
            raise ConfigError(f"positives is {positives!r}, but these batches know no studies: take 'text' or 'own'")
        groups.append(name_ids(batch.studies).to(batch.ids_BT.device))
    if positives in ("text", "either"):
        groups.append(text_ids(batch.ids_BT, batch.mask_BT))
    return tuple(groups)


def gather_global(pairs: Pairs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Images' and texts' vectors and the groups, of all ranks."""
    groups = [gather(group_B) for group_B in pairs.groups]
    return gather(pairs.images.global_NE), gather(pairs.texts.global_NE), groups


def _rows(side: Embeddings, row_K: Tensor) -> Embeddings:
    local_NPE, mask_NP = (None if part is None else part[row_K] for part in (side.local_NPE, side.mask_NP))
    return Embeddings(side.global_NE[row_K], local_NPE, mask_NP)


def _cat(parts: Sequence[Embeddings]) -> Embeddings:
    whole_NE = torch.cat([part.global_NE for part in parts])
    local = [part.local_NPE for part in parts if part.local_NPE is not None]
    masks = [part.mask_NP for part in parts if part.mask_NP is not None]
    longest = max((part_NPE.shape[1] for part_NPE in local), default=0)
    local_NPE = [F.pad(part_NPE, (0, 0, 0, longest - part_NPE.shape[1])) for part_NPE in local]
    mask_NP = [F.pad(part_NP, (0, longest - part_NP.shape[1])) for part_NP in masks]
    return Embeddings(whole_NE, torch.cat(local_NPE) if local else None, torch.cat(mask_NP) if masks else None)


def projection_head(in_features: int, out_features: int, hidden: int | None = None) -> nn.Sequential:
    """Linear, ReLU, Linear; inside as wide as `hidden`, or as its input."""
    inside = hidden or in_features
    return nn.Sequential(nn.Linear(in_features, inside), nn.ReLU(inplace=True), nn.Linear(inside, out_features))


def attention_arguments(dropout: float | None) -> dict[str, Any]:
    """What `create_text_encoder` is told of `attention_dropout`. Raises ConfigError unless it is a probability."""
    if dropout is None:
        return {}
    if not 0 <= dropout < 1:
        raise ConfigError(f"attention_dropout is {dropout}: it must be 0 or above and below 1")
    return {"attention_probs_dropout_prob": dropout}


def check_patch_dropout(share: float) -> None:
    """Raises ConfigError unless something is left."""
    if not 0 <= share < 1:
        raise ConfigError(f"patch_dropout is {share}: it must be 0 or above and below 1")


def check_positives(positives: str) -> None:
    """Raises ConfigError, naming what there is."""
    if positives not in get_args(Positives):
        raise ConfigError(f"positives is {positives!r}: known are {', '.join(get_args(Positives))}")
