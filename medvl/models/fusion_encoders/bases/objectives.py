"""Interface of the pretraining objectives of fusion-encoders.

An objective has three verbs: `corrupt` samples the masks or wrong pairs of a step, `predict` scores
it from the states that the model computed once for all objectives, `loss` compares predictions and
truth. A model lists its objectives:

    self.mlm = MaskedLanguageModeling(config.mlm_weight, self.mask_words, self.score_words)
    self.itm = ImageTextMatching(config.itm_weight, self.sample_pairs, self.itm_head)
    self.objectives = (self.mlm, self.itm)

Objectives hold no parameters; heads belong to the model. Pass bound methods and modules, not
lambdas, so that a deep copy of the model uses its own heads.

In this folder: N masked positions, M pairs, K complete samples, G those of all ranks, P patches, C
values of a patch; other letters as in `medvl.schema`.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from medvl import losses
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.losses.masked import PatchMask, mask_patches, patchify, standardize
from medvl.losses.pairs.image_text import Keys, MatchingPairs
from medvl.models.base import MaskedWords
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.models.fusion_encoders.parts.heads import PixelDecoder
from medvl.schema import Batch


class MaskedRegions(NamedTuple):
    """The masked regions of a batch."""

    states_ND: Tensor
    """Fused states."""
    features_ND: Tensor
    """True features, without gradient."""
    classes_NK: Tensor | None
    """The detector's distributions over its classes; None without a detector."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The states that all objectives of a training step share."""

    batch: Batch
    image: Tokens
    """Images before fusion."""
    text: Tokens
    """Texts before fusion: unmasked, or masked in systems that encode only those."""
    word_states_ND: Tensor
    """Fused states of the masked texts at the masked positions."""
    pooled_MD: Tensor
    """Pooled vectors of the sampled pairs; of all rows in systems that sample none."""
    own: Fused | None = None
    """The masked texts fused with their own images; None in systems that match masked texts."""
    pairs: Fused | None = None
    """The sampled pairs, fused, for objectives that read their words and patches; None in systems
    that match masked texts.
    """
    matched_M: Tensor | None = None
    """bool: which of `pairs` match."""
    regions: MaskedRegions | None = None
    """The masked regions, in systems that mask some."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlignedEncoded(Encoded):
    """The shared states of a system with contrastive embeddings."""

    image_KE: Tensor
    text_KE: Tensor
    """L2-normalised float32 embeddings of the complete samples, unmasked."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveEncoded(AlignedEncoded):
    """The shared states of a system with contrastive embeddings and a moving-average teacher."""

    row_K: Tensor
    """int64: the complete samples."""
    image_GE: Tensor
    text_GE: Tensor
    """Embeddings of the complete samples of all ranks."""
    keys: Keys
    """The teacher's embeddings of all ranks and of its queue, with which those are compared."""
    teacher_words_NV: Tensor
    """The teacher's scores of the vocabulary at the masked positions."""
    alpha: float | Tensor
    """Weight of the teacher's targets at this step."""


E = TypeVar("E", bound=Encoded, contravariant=True)
C = TypeVar("C")
P = TypeVar("P")


class Objective(abc.ABC, Generic[E, C, P]):
    """One term of a pretraining loss. Generic over the shared states, the corruption and the
    predictions.

    Attributes:
        name: key of the term in `Losses.terms`.
        weight: factor of the term in the total loss.
    """

    name: str

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @abc.abstractmethod
    def corrupt(self, batch: Batch) -> C:
        """Sample the masks or wrong pairs of this step, from torch's CPU generator."""

    @abc.abstractmethod
    def predict(self, encoded: E, corruption: C) -> P:
        """Predict the corrupted parts."""

    @abc.abstractmethod
    def loss(self, predictions: P, corruption: C) -> Tensor:
        """Return the scalar loss, averaged over the samples that have the inputs of the
        objective.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Corruption:
    """Corruption of one batch by all objectives."""

    parts: Mapping[str, Any]
    """Objective name -> result of its `corrupt`."""

    def of(self, objective: Objective[Any, C, Any]) -> C:
        """Return the part of one objective."""
        part: C = self.parts[objective.name]
        return part


# Alignment of words and patches (WPA) by optimal transport.


class TransportedPairs(NamedTuple):
    """Distances (M,) of words and patches of sampled pairs, and whether the pairs match (M,)."""

    distance_M: Tensor
    matched_M: Tensor


WPA_WEIGHT = 0.1
"""Weight of word-patch alignment in UNITER and ViLT, as published."""


class WordPatchAlignment(Objective[Encoded, None, TransportedPairs]):
    """Distance of the fused words and patches of matching pairs, minus the distance of the others
    (UNITER, ViLT).

    The pairs are shared with image-text matching; the model fuses them once for both objectives.

    Args:
        weight: factor of the term; 0.1 in both papers.
        text_ends: whether the first and last token of a text (CLS and SEP) take part, as in
            UNITER's released code.
        image_prefix: number of image tokens before the patches, which take no part: 1 for ViLT's
            class token.
    """

    name = "wpa"

    def __init__(self, weight: float, *, text_ends: bool, image_prefix: int = 0) -> None:
        super().__init__(weight)
        self.text_ends = text_ends
        self.image_prefix = image_prefix

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing: the pairs belong to image-text matching."""

    def predict(self, encoded: Encoded, corruption: None) -> TransportedPairs:
        """Return the distances of the sampled pairs."""
        pairs = encoded.pairs
        matched_M = encoded.matched_M
        assert pairs is not None, "the model fuses whole texts for matching"
        assert matched_M is not None
        real_MT = pairs.text.real_BN()
        real_MP = pairs.image.real_BN()
        if not self.text_ends:
            place_T = torch.arange(real_MT.shape[1], device=real_MT.device)
            real_MT = (place_T > 0) & (place_T < real_MT.sum(dim=1, keepdim=True) - 1)
        real_MP = real_MP & (
            torch.arange(real_MP.shape[1], device=real_MP.device) >= self.image_prefix
        )
        distance_M, _ = losses.word_patch_alignment(
            pairs.text.states_BND, pairs.image.states_BND, ~real_MT, ~real_MP
        )
        return TransportedPairs(distance_M, matched_M)

    def loss(self, predictions: TransportedPairs, corruption: None) -> Tensor:
        """(sum over matching pairs - sum over the others) / number of pairs; 0 without a pair."""
        distance_M, matched_M = predictions
        return torch.where(matched_M, distance_M, -distance_M).sum() / max(len(distance_M), 1)


# Contrastive alignment before fusion: images with texts (ITC), and each modality with itself.


class ImageTextContrast(Objective[E, None, Any]):
    """Contrastive alignment of images and texts (ITC).

    Args:
        weight: factor of the term.
        head: the loss of the shared states, which contain the embeddings.
    """

    name = "itc"

    def __init__(self, weight: float, head: Callable[[E], Tensor]) -> None:
        super().__init__(weight)
        self.head = head

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: E, corruption: None) -> Any:
        """Return the embeddings, which are shared already."""
        return encoded

    def loss(self, predictions: Any, corruption: None) -> Tensor:
        """Contrast the complete samples with those of all ranks."""
        return self.head(predictions)


class UnimodalContrast(ImageTextContrast[E]):
    """Contrast of images with images and of texts with texts, as encoded by the teacher (MUMC)."""

    name = "unimodal"


# Masked words (MLM), also with soft targets of a teacher.


class WordObjective(Objective[E, MaskedWords, P]):
    """Masked words.

    Args:
        weight: factor of the term.
        mask_words: samples the masked words of a batch.
        score_words: maps states (N, D) to scores of the vocabulary (N, V).
    """

    name = "mlm"

    def __init__(
        self,
        weight: float,
        mask_words: Callable[[Batch], MaskedWords],
        score_words: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self.mask_words = mask_words
        self.score_words = score_words

    def corrupt(self, batch: Batch) -> MaskedWords:
        """Mask words of every text."""
        return self.mask_words(batch)


class MaskedLanguageModeling(WordObjective[Encoded, Tensor]):
    """Masked words from the text and its image (MLM)."""

    def predict(self, encoded: Encoded, corruption: MaskedWords) -> Tensor:
        """(N, V): scores of the vocabulary at the masked positions."""
        return self.score_words(encoded.word_states_ND)

    def loss(self, predictions: Tensor, corruption: MaskedWords) -> Tensor:
        """Return the cross-entropy with the original ids."""
        return losses.mlm(predictions, corruption.target_N)


class DistilledWords(NamedTuple):
    """Scores of the vocabulary at the masked positions by the model and by its teacher."""

    words_NV: Tensor
    teacher_NV: Tensor
    alpha: float | Tensor


class DistilledLanguageModeling(WordObjective[ContrastiveEncoded, DistilledWords]):
    """Masked words with soft targets of a moving-average teacher (ALBEF, equation 7)."""

    def predict(self, encoded: ContrastiveEncoded, corruption: MaskedWords) -> DistilledWords:
        """Score the vocabulary at the masked positions."""
        return DistilledWords(
            self.score_words(encoded.word_states_ND), encoded.teacher_words_NV, encoded.alpha
        )

    def loss(self, predictions: DistilledWords, corruption: MaskedWords) -> Tensor:
        """Return the cross-entropy with the original ids and the teacher's distribution."""
        words_NV, teacher_NV, alpha = predictions
        return losses.mlm_distilled(words_NV, corruption.target_N, teacher_NV, alpha)


# Image-text matching (ITM): random negatives, hard negatives, altered texts.


class ImageTextMatching(Objective[Encoded, MatchingPairs, Tensor]):
    """Image-text matching with random negatives (ITM).

    Args:
        weight: factor of the term.
        sample_pairs: samples matching and wrong pairs of a batch.
        head: maps pooled vectors (M, D) to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self,
        weight: float,
        sample_pairs: Callable[[Batch], MatchingPairs],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_pairs = sample_pairs
        self.head = head

    def corrupt(self, batch: Batch) -> MatchingPairs:
        """Sample matching and wrong pairs of the complete samples."""
        return self.sample_pairs(batch)

    def predict(self, encoded: Encoded, corruption: MatchingPairs) -> Tensor:
        """(M, 2): logits of "no match" and "match"."""
        return self.head(encoded.pooled_MD)

    def loss(self, predictions: Tensor, corruption: MatchingPairs) -> Tensor:
        """Return the mean cross-entropy of the pairs."""
        return losses.itm(predictions, corruption.matched_N)


class MatchedPairs(NamedTuple):
    """Logits (M, 2) of sampled pairs, and whether they match (M,)."""

    logits_M2: Tensor
    matched_M: Tensor


class HardNegativeMatching(Objective[ContrastiveEncoded, None, MatchedPairs]):
    """Image-text matching with negatives sampled by similarity (ALBEF, section 3.2).

    Negatives depend on the embeddings, so they are sampled in `predict`.

    Args:
        weight: factor of the term.
        sample_pairs: samples pairs from the batch, the embeddings of its complete rows and those
            rows.
        match: function from text and image tokens to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self,
        weight: float,
        sample_pairs: Callable[[Batch, Tensor, Tensor, Tensor], MatchingPairs],
        match: Callable[[Tokens, Tokens], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_pairs = sample_pairs
        self.match = match

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing before the batch is encoded."""

    def predict(self, encoded: ContrastiveEncoded, corruption: None) -> MatchedPairs:
        """Sample pairs, fuse them and score them."""
        pairs = self.sample_pairs(encoded.batch, encoded.image_KE, encoded.text_KE, encoded.row_K)
        logits_M2 = self.match(encoded.text.rows(pairs.text_N), encoded.image.rows(pairs.image_N))
        return MatchedPairs(logits_M2, pairs.matched_N)

    def loss(self, predictions: MatchedPairs, corruption: None) -> Tensor:
        """Return the mean cross-entropy of the pairs."""
        return losses.itm(predictions.logits_M2, predictions.matched_M)


AlteredKind = Literal["mirrored", "denied"]


class AlteredTexts(NamedTuple):
    """The texts of a batch with left and right exchanged, or with their findings denied."""

    ids_BT: Tensor
    mask_BT: Tensor
    counted_B: Tensor
    """bool: complete samples whose altered text is another one; of denied texts, those that an
    image of the batch contradicts.
    """
    other_B: Tensor
    """Row of the next image that contradicts a denied text; of mirrored ones, its own."""


class PairModel(Protocol):
    """A model that scores pairs of an image and a text."""

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Encode texts before fusion."""

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""


class AlteredTextMatching(Objective[Encoded, AlteredTexts, Tensor]):
    """Matching of a text with its image against the same text with left and right exchanged, or
    with its findings denied.

    The text is a match and the altered one is none, so that both classes are equally frequent. With
    the next image of the batch that contradicts it (`losses.denial_holds`), a denied text is a
    match and the text is none: the texts alone do not tell what matches, though released ones
    affirm and altered ones deny. Texts that are not altered, denied ones that no image contradicts,
    and samples without an image or a text do not count. Both texts are encoded unmasked; the images
    are those of the other objectives.

    Args:
        weight: factor of the term.
        model: scores pairs.
        kind: "mirrored" (left and right), or "denied" (`medvl.data.reports.denials`).
    """

    def __init__(self, weight: float, model: PairModel, kind: AlteredKind) -> None:
        super().__init__(weight)
        self.name = {"mirrored": "itm_mirror", "denied": "itm_denial"}[kind]
        self.model = model
        self.kind = kind

    def corrupt(self, batch: Batch) -> AlteredTexts:
        """Return the loader's altered texts. Raises ConfigError for a batch without them."""
        if self.kind == "mirrored":
            ids_BT, mask_BT = batch.mirrored_ids_BT, batch.mirrored_mask_BT
            counted_B = batch.has_mirror_B
        else:
            ids_BT, mask_BT = batch.denied_ids_BT, batch.denied_mask_BT
            counted_B = batch.has_denial_B
        if ids_BT is None or mask_BT is None or counted_B is None:
            message = (
                f"{self.name} needs batches with {self.kind} texts: open the loader with "
                f"inputs=model.inputs"
            )
            raise ConfigError(message, "missing", field=f"{self.kind}_ids_BT")
        for has_B in (batch.has_image_B, batch.has_text_B):
            counted_B = counted_B if has_B is None else counted_B & has_B
        row_B = torch.arange(len(counted_B), device=counted_B.device)
        if self.kind == "mirrored":
            return AlteredTexts(ids_BT, mask_BT, counted_B, row_B)
        if batch.turned_BL is None or batch.found_BL is None:
            message = "expected findings of the texts: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="turned_BL")
        holds_BB = losses.denial_holds(batch.turned_BL, batch.found_BL)
        if batch.has_image_B is not None:
            holds_BB = holds_BB & batch.has_image_B
        next_BB = (row_B[None, :] - row_B[:, None] - 1) % len(row_B)  # 0: the row behind
        other_B = next_BB.masked_fill(~holds_BB, len(row_B)).argmin(dim=1)
        return AlteredTexts(ids_BT, mask_BT, counted_B & holds_BB.any(dim=1), other_B)

    def predict(self, encoded: Encoded, corruption: AlteredTexts) -> Tensor:
        """(2 B, 2): logits of the texts, then of the altered ones, each with its own image; of
        denied texts (4 B, 2), the same again, each with an image that contradicts the text.
        """
        batch = encoded.batch
        ids_MT = torch.cat([batch.ids_BT, corruption.ids_BT])
        mask_MT = torch.cat([batch.mask_BT, corruption.mask_BT])
        twice_M = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        text = self.model.text_tokens(ids_MT, mask_MT, twice_M)
        row_B = torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)
        if self.kind == "mirrored":
            return self.model.match(text, encoded.image.rows(row_B.repeat(2)))
        image_M = torch.cat([row_B.repeat(2), corruption.other_B.repeat(2)])
        text_M = torch.arange(2 * len(row_B), device=row_B.device).repeat(2)
        return self.model.match(text.rows(text_M), encoded.image.rows(image_M))

    def loss(self, predictions: Tensor, corruption: AlteredTexts) -> Tensor:
        """Return the mean cross-entropy of the pairs that count."""
        counted_B = corruption.counted_B
        own_B = torch.ones_like(counted_B)
        matched = [own_B, ~own_B]
        counted = [counted_B, counted_B]
        if self.kind == "denied":
            matched += [~own_B, own_B]
            counted += [counted_B, counted_B]
        return losses.itm(predictions, torch.cat(matched), torch.cat(counted))


# Masked image modeling (MIM): pixels of removed patches.


class PatchPredictions(NamedTuple):
    """Predicted and true pixels of all patches, for the samples that have an image."""

    pixels_BPC: Tensor
    """Each patch in units of its own mean and deviation where `MaskedImageModeling`
    standardises, else as the truth.
    """
    true_BPC: Tensor
    """The encoder's input: normalised, not standardised per patch."""
    masked_BP: Tensor
    """bool: the removed patches."""


class PatchModel(Protocol):
    """A model that reconstructs masked patches; `image_encoder` normalises the pixels that are
    their truth.
    """

    image_encoder: ImageEncoder
    mim_head: PixelDecoder

    def reconstruct(
        self, image_BCHW: Tensor, image: Tokens, text: Tokens, patches: PatchMask
    ) -> Tensor:
        """(B, P, C): pixels of all patches from the kept ones and the texts; `image`, `text` as
        in `Encoded`.
        """


class MaskedImageModeling(Objective[Encoded, PatchMask, PatchPredictions]):
    """Pixels of removed patches from the kept ones, and from the text in models that use it (MIM).

    Args:
        weight: factor of the term.
        model: reconstructs the patches.
        ratio: share of patches that are removed.
        standardized: whether the truth is in units of each patch's own mean and deviation, else
            normalised pixels.
    """

    name = "mim"

    def __init__(
        self, weight: float, model: PatchModel, ratio: float, *, standardized: bool = True
    ) -> None:
        super().__init__(weight)
        self.model = model
        self.ratio = ratio
        self.standardized = standardized

    def corrupt(self, batch: Batch) -> PatchMask:
        """Sample the removed patches of every image."""
        patches = math.prod(self.model.mim_head.patches.grid)
        return mask_patches(
            len(batch), patches, self.ratio, torch.default_generator, batch.image_BCHW.device
        )

    def predict(self, encoded: Encoded, corruption: PatchMask) -> PatchPredictions:
        """Reconstruct the patches of the samples that have an image."""
        return self.predict_patches(encoded.batch, encoded.image, encoded.text, corruption)

    def predict_patches(
        self, batch: Batch, image: Tokens, text: Tokens, patches: PatchMask
    ) -> PatchPredictions:
        """See `predict`; `image` and `text` are the batch before fusion."""
        image_BCHW = batch.image_BCHW
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            patches = PatchMask(
                *(getattr(patches, field.name)[index_K] for field in dataclasses.fields(patches))
            )
            image = image.rows(index_K)
            text = text.rows(index_K)
            image_BCHW = image_BCHW[index_K]
        true_BPC = patchify(
            self.model.image_encoder.normalize(image_BCHW), self.model.mim_head.patches.side
        )
        if len(image_BCHW) == 0:  # a vision Transformer cannot encode an empty batch
            blank_BPC = true_BPC.new_zeros(1, *true_BPC.shape[1:])
            return PatchPredictions(
                blank_BPC, blank_BPC, patches.masked_BP.new_zeros(blank_BPC.shape[:2])
            )
        return PatchPredictions(
            self.model.reconstruct(image_BCHW, image, text, patches), true_BPC, patches.masked_BP
        )

    def loss(self, predictions: PatchPredictions, corruption: PatchMask) -> Tensor:
        """Return the mean squared error of the removed patches' pixels."""
        true_BPC = standardize(predictions.true_BPC) if self.standardized else predictions.true_BPC
        return losses.mim(predictions.pixels_BPC, true_BPC, predictions.masked_BP)
