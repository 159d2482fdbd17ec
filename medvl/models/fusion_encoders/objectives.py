"""Pretraining objectives of fusion-encoders.

An objective has three verbs: `corrupt` samples what a step masks or mixes up, `predict` scores it from the states that
the model computed once for all objectives, `loss` compares predictions and truth. A model lists its objectives:

    self.mlm = MaskedLanguageModeling(config.mlm_weight, self.mask_words, self.score_words)
    self.itm = ImageTextMatching(config.itm_weight, self.sample_pairs, self.itm_head)
    self.objectives = (self.mlm, self.itm)

Objectives hold no parameters; heads belong to the model. Pass bound methods and modules, not lambdas, so that a deep
copy of the model uses its own heads.

N masked positions, M pairs, K complete samples, P patches, C values of a patch; other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from medvl import losses
from medvl.errors import ConfigError
from medvl.losses.itm import MatchingPairs
from medvl.losses.mim import PatchMask, mask_patches, patchify, standardize
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.models.masked_words import MaskedWords
from medvl.schema import Batch


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveEncoded(Encoded):
    """The shared states of a system with contrastive embeddings and a moving-average teacher."""

    row_K: Tensor
    """int64: the complete samples."""
    image_KE: Tensor
    text_KE: Tensor
    """L2-normalised float32 embeddings of the complete samples, unmasked."""
    teacher_image_KE: Tensor
    teacher_text_KE: Tensor
    teacher_words_NV: Tensor
    """The teacher's scores of the vocabulary at the masked positions."""
    alpha: float
    """Weight of the teacher's targets at this step."""


E = TypeVar("E", bound=Encoded, contravariant=True)
C = TypeVar("C")
P = TypeVar("P")


class Objective(abc.ABC, Generic[E, C, P]):
    """One term of a pretraining loss. Generic over the shared states, the corruption and the predictions.

    Attributes:
        name: key of the term in `Losses.terms`.
        weight: factor of the term in the total loss.
    """

    name: ClassVar[str]

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @abc.abstractmethod
    def corrupt(self, batch: Batch) -> C:
        """Sample what this step masks or mixes up, from torch's CPU generator."""

    @abc.abstractmethod
    def predict(self, encoded: E, corruption: C) -> P:
        """Predict what was corrupted."""

    @abc.abstractmethod
    def loss(self, predictions: P, corruption: C) -> Tensor:
        """Return the scalar loss, averaged over the samples that have what the objective needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Corruption:
    """Corruption of one batch by all objectives."""

    parts: Mapping[str, Any]
    """Objective name -> what its `corrupt` returned."""

    def of(self, objective: Objective[Any, C, Any]) -> C:
        """Return the part of one objective."""
        part: C = self.parts[objective.name]
        return part


class _WordObjective(Objective[E, MaskedWords, P]):
    """Masked words.

    Args:
        weight: factor of the term.
        mask_words: samples the masked words of a batch.
        score_words: states (N, D) to scores of the vocabulary (N, V).
    """

    name = "mlm"

    def __init__(
        self, weight: float, mask_words: Callable[[Batch], MaskedWords], score_words: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(weight)
        self.mask_words, self.score_words = mask_words, score_words

    def corrupt(self, batch: Batch) -> MaskedWords:
        """Mask words of every text."""
        return self.mask_words(batch)


class MaskedLanguageModeling(_WordObjective[Encoded, Tensor]):
    """Masked words from the text and its image (MLM)."""

    def predict(self, encoded: Encoded, corruption: MaskedWords) -> Tensor:
        """(N, V): scores of the vocabulary at the masked positions."""
        return self.score_words(encoded.word_states_ND)

    def loss(self, predictions: Tensor, corruption: MaskedWords) -> Tensor:
        """Cross-entropy with the original ids."""
        return losses.mlm(predictions, corruption.target_N)


class DistilledWords(NamedTuple):
    """Scores of the vocabulary at the masked positions by the model and by its teacher."""

    words_NV: Tensor
    teacher_NV: Tensor
    alpha: float


class DistilledLanguageModeling(_WordObjective[ContrastiveEncoded, DistilledWords]):
    """Masked words with soft targets of a moving-average teacher (ALBEF, equation 7)."""

    def predict(self, encoded: ContrastiveEncoded, corruption: MaskedWords) -> DistilledWords:
        """Score the vocabulary at the masked positions."""
        return DistilledWords(self.score_words(encoded.word_states_ND), encoded.teacher_words_NV, encoded.alpha)

    def loss(self, predictions: DistilledWords, corruption: MaskedWords) -> Tensor:
        """Cross-entropy with the original ids and the teacher's distribution."""
        words_NV, teacher_NV, alpha = predictions
        return losses.mlm_distilled(words_NV, corruption.target_N, teacher_NV, alpha)


class ImageTextMatching(Objective[Encoded, MatchingPairs, Tensor]):
    """Whether an image and a text belong together, with random negatives (ITM).

    Args:
        weight: factor of the term.
        sample_pairs: samples matching and wrong pairs of a batch.
        head: pooled vectors (M, D) to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self, weight: float, sample_pairs: Callable[[Batch], MatchingPairs], head: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(weight)
        self.sample_pairs, self.head = sample_pairs, head

    def corrupt(self, batch: Batch) -> MatchingPairs:
        """Sample matching and wrong pairs of the complete samples."""
        return self.sample_pairs(batch)

    def predict(self, encoded: Encoded, corruption: MatchingPairs) -> Tensor:
        """(M, 2): logits of "no match" and "match"."""
        return self.head(encoded.pooled_MD)

    def loss(self, predictions: Tensor, corruption: MatchingPairs) -> Tensor:
        """Mean cross-entropy of the pairs."""
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
        sample_pairs: samples pairs from the batch, the embeddings of its complete rows and those rows.
        match: text and image tokens to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self,
        weight: float,
        sample_pairs: Callable[[Batch, Tensor, Tensor, Tensor], MatchingPairs],
        match: Callable[[Tokens, Tokens], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_pairs, self.match = sample_pairs, match

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing before the batch is encoded."""

    def predict(self, encoded: ContrastiveEncoded, corruption: None) -> MatchedPairs:
        """Sample pairs, fuse them and score them."""
        pairs = self.sample_pairs(encoded.batch, encoded.image_KE, encoded.text_KE, encoded.row_K)
        logits_M2 = self.match(encoded.text.rows(pairs.text_N), encoded.image.rows(pairs.image_N))
        return MatchedPairs(logits_M2, pairs.matched_N)

    def loss(self, predictions: MatchedPairs, corruption: None) -> Tensor:
        """Mean cross-entropy of the pairs."""
        return losses.itm(predictions.logits_M2, predictions.matched_M)


class MirroredTexts(NamedTuple):
    """The texts of a batch with left and right exchanged."""

    ids_BT: Tensor
    mask_BT: Tensor
    counted_B: Tensor
    """bool: complete samples whose text names a side."""


class PairModel(Protocol):
    """A model that scores pairs of an image and a text."""

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """Encode texts before fusion."""

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""


class MirroredTextMatching(Objective[Encoded, MirroredTexts, Tensor]):
    """Matching of a text with its image against the same text with left and right exchanged.

    The text is a match and its mirror is none, so that both classes are equally frequent. Texts without a side, and
    samples without an image or a text, do not count. Both texts are encoded unmasked; the images are those of the other
    objectives.

    Args:
        weight: factor of the term.
        model: scores pairs.
    """

    name = "itm_mirror"

    def __init__(self, weight: float, model: PairModel) -> None:
        super().__init__(weight)
        self.model = model

    def corrupt(self, batch: Batch) -> MirroredTexts:
        """Return the loader's mirrored texts. Raises ConfigError for a batch without them."""
        ids_BT, mask_BT, counted_B = batch.mirrored_ids_BT, batch.mirrored_mask_BT, batch.has_mirror_B
        if ids_BT is None or mask_BT is None or counted_B is None:
            message = "mirror_weight needs batches with mirrored texts (Inputs.mirrored_text)"
            raise ConfigError(message, "missing", field="mirrored_ids_BT")
        for has_B in (batch.has_image_B, batch.has_text_B):
            counted_B = counted_B if has_B is None else counted_B & has_B
        return MirroredTexts(ids_BT, mask_BT, counted_B)

    def predict(self, encoded: Encoded, corruption: MirroredTexts) -> Tensor:
        """(2 B, 2): logits of the texts, then of their mirrors, each with its own image."""
        batch = encoded.batch
        ids_MT, mask_MT = torch.cat([batch.ids_BT, corruption.ids_BT]), torch.cat([batch.mask_BT, corruption.mask_BT])
        twice_M = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        text = self.model.text_tokens(ids_MT, mask_MT, twice_M)
        return self.model.match(text, encoded.image.beside(encoded.image))

    def loss(self, predictions: Tensor, corruption: MirroredTexts) -> Tensor:
        """Mean cross-entropy of the pairs that count."""
        counted_B = corruption.counted_B
        matched_M = torch.arange(len(predictions), device=counted_B.device) < len(counted_B)
        return losses.itm(predictions, matched_M, counted_B.repeat(2))


class ImageTextContrast(Objective[ContrastiveEncoded, None, ContrastiveEncoded]):
    """Contrastive alignment of images and texts before fusion (ITC).

    Args:
        weight: factor of the term.
        head: the loss over embeddings of model and teacher, with what it keeps between steps.
    """

    name = "itc"

    def __init__(self, weight: float, head: Callable[[ContrastiveEncoded], Tensor]) -> None:
        super().__init__(weight)
        self.head = head

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: ContrastiveEncoded, corruption: None) -> ContrastiveEncoded:
        """Return the embeddings, which are shared already."""
        return encoded

    def loss(self, predictions: ContrastiveEncoded, corruption: None) -> Tensor:
        """Contrast the complete samples with those of all ranks."""
        return self.head(predictions)


class PatchPredictions(NamedTuple):
    """Predicted and true pixels of all patches, for the samples that have an image."""

    pixels_BPC: Tensor
    """Each patch in units of its own mean and deviation."""
    true_BPC: Tensor
    """The encoder's input: normalised, not standardised per patch."""
    masked_BP: Tensor
    """bool: the removed patches."""


class PatchModel(Protocol):
    """A model that reconstructs masked patches."""

    grid: tuple[int, int]
    patch: int
    """Side of a patch in pixels."""

    def normalize(self, image_BCHW: Tensor) -> Tensor:
        """Images as the encoder's first layer sees them."""

    def reconstruct(self, image_BCHW: Tensor, text: Tokens, patches: PatchMask) -> Tensor:
        """(B, P, C): pixels of all patches from the kept ones and the texts."""


class MaskedImageModeling(Objective[Encoded, PatchMask, PatchPredictions]):
    """Pixels of removed patches from the kept ones and the text (MIM).

    Args:
        weight: factor of the term.
        model: reconstructs the patches.
        ratio: share of patches that are removed.
    """

    name = "mim"

    def __init__(self, weight: float, model: PatchModel, ratio: float) -> None:
        super().__init__(weight)
        self.model, self.ratio = model, ratio

    def corrupt(self, batch: Batch) -> PatchMask:
        """Sample the removed patches of every image."""
        patches = self.model.grid[0] * self.model.grid[1]
        return mask_patches(len(batch), patches, self.ratio, torch.default_generator, batch.image_BCHW.device)

    def predict(self, encoded: Encoded, corruption: PatchMask) -> PatchPredictions:
        """Reconstruct the patches of the samples that have an image."""
        return self.predict_patches(encoded.batch, encoded.text, corruption)

    def predict_patches(self, batch: Batch, text: Tokens, patches: PatchMask) -> PatchPredictions:
        """See `predict`; `text` are the texts of the batch before fusion."""
        image_BCHW = batch.image_BCHW
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            patches = PatchMask(*(getattr(patches, field.name)[index_K] for field in dataclasses.fields(patches)))
            text, image_BCHW = text.rows(index_K), image_BCHW[index_K]
        true_BPC = patchify(self.model.normalize(image_BCHW), self.model.patch)
        if len(image_BCHW) == 0:  # a vision Transformer cannot encode an empty batch
            blank_BPC = true_BPC.new_zeros(1, *true_BPC.shape[1:])
            return PatchPredictions(blank_BPC, blank_BPC, patches.masked_BP.new_zeros(blank_BPC.shape[:2]))
        return PatchPredictions(self.model.reconstruct(image_BCHW, text, patches), true_BPC, patches.masked_BP)

    def loss(self, predictions: PatchPredictions, corruption: PatchMask) -> Tensor:
        """Mean squared error of the removed patches' standardised pixels."""
        return losses.mim(predictions.pixels_BPC, standardize(predictions.true_BPC), predictions.masked_BP)
