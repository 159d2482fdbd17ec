"""Scores of images against prompts: images are encoded once, whatever the number of prompt sets and classes.

A score depends on its own image and on the prompts, never on the other images of the test set; but for the scoring
"gloria_published", which is named for it.

Shape letters: N images, M sentences, B batch, L labels or classes, E shared embedding.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass
from medvl.eval.core.interfaces import Loader, Model, encode_batch
from medvl.eval.core.metrics import Array
from medvl.eval.zero_shot_classification.prompts import PromptSet
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch, Embeddings

_TEXT_BATCH = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Predictions:
    """What one pass over a loader gives, in the loader's order."""

    keys: tuple[str, ...]
    scores_NL: tuple[Array, ...]
    """One array a prompt set, one column a class of it."""
    labels_NL: Array
    """As in the table: 1, 0, -1 or NaN, one column a name in `label_names`."""
    label_names: tuple[str, ...]
    unreadable: Mapping[str, int]
    """Samples that the loader skipped, by reason: with the keys they make up the whole source."""


def predict(
    model: Model | Sequence[Model],
    loader: Loader,
    prompt_sets: Sequence[PromptSet],
    *,
    autocast: torch.dtype | None = None,
) -> Predictions:
    """Scores of every image of the loader under every prompt set.

    Several models are an ensemble: an image is read once, each model scores it, and the scores are averaged. Under
    "pair_softmax" that is CheXzero's mean over checkpoints of a softmax of two cosines.

    Raises `EvaluationError` when the loader does not give every sample exactly once, or a score is not finite.
    """
    members = list(model) if isinstance(model, Sequence) else [model]
    if not members:
        raise EvaluationError("an ensemble needs at least one model")
    given = FullPass(loader)
    labels: list[Tensor] = []
    scores: list[list[Tensor]] = []
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(evaluating(member))
        scorers = [_MemberScorer(member, prompt_sets, autocast) for member in members]
        for batch in given:
            by_member = [scorer(batch) for scorer in scorers]
            scores.append([torch.stack(of_members).mean(dim=0) for of_members in zip(*by_member, strict=True)])
            labels.append(batch.labels_BL)
    return Predictions(
        keys=tuple(given.keys),
        scores_NL=tuple(
            _of_set(prompts, [batch[place] for batch in scores]) for place, prompts in enumerate(prompt_sets)
        ),
        labels_NL=torch.cat(labels).double().numpy(),
        label_names=tuple(loader.source.label_names),
        unreadable=given.unreadable,
    )


def _of_set(prompts: PromptSet, parts: Sequence[Tensor]) -> Array:
    """The scores of all images under one set, from those of the batches. Raises where one is not finite."""
    scores_NL = _over_images(torch.cat(list(parts)).numpy(), prompts)
    if not np.isfinite(scores_NL).all():
        bad = int((~np.isfinite(scores_NL)).any(axis=1).sum())
        raise EvaluationError(
            f"the model's scores of {bad} of {len(scores_NL)} images under {prompts.name!r} are not finite: "
            "look at its weights, or evaluate without autocast"
        )
    return scores_NL


def _over_images(scores_NL: Array, prompts: PromptSet) -> Array:
    """The scores as they are; or standardised over the images, where that is the protocol."""
    if prompts.scoring != "gloria_published":
        return scores_NL
    spread_L = scores_NL.std(axis=0)
    if not spread_L.all():
        raise EvaluationError(
            f"prompt set {prompts.name!r} standardises scores over the images, and these {len(scores_NL)} all have the "
            "same: give it a whole test set"
        )
    standardised_NL: Array = (scores_NL - scores_NL.mean(axis=0)) / spread_L
    return standardised_NL


class _MemberScorer:
    """One model's scores of a batch under every prompt set."""

    def __init__(self, model: Model, prompt_sets: Sequence[PromptSet], autocast: torch.dtype | None) -> None:
        self._model, self._autocast = model, autocast
        self._device = next(model.parameters()).device
        self._scorers = [PromptScorer(model, prompts) for prompts in prompt_sets]

    def __call__(self, batch: Batch) -> list[Tensor]:
        images = encode_batch(self._model, batch, self._device, self._autocast)
        return [scorer(images) for scorer in self._scorers]


class PromptScorer:
    """Embeds the sentences of a prompt set once and scores images against them."""

    def __init__(self, model: Model, prompts: PromptSet) -> None:
        self.prompts = prompts
        self._compare = _similarity(model, prompts)
        texts = prompts.texts()
        self.texts = embed_texts(model, texts)
        place = {text: index for index, text in enumerate(texts)}
        classes = prompts.classes.values()
        self._positive = [torch.tensor([place[text] for text in sides.positive]) for sides in classes]
        self._negative = [torch.tensor([place[text] for text in sides.negative]) for sides in classes if sides.negative]
        if prompts.ensemble == "embedding_mean":
            self._average_embeddings()

    def __call__(self, images: Embeddings) -> Tensor:
        """scores_BL, float64, on the CPU."""
        similarity_BM = self._compare(images, self.texts).cpu().double()
        positive_BL = self._pool(similarity_BM, self._positive)
        if self.prompts.scoring == "gloria_published":
            return positive_BL
        if self.prompts.scoring == "class_softmax":
            return torch.softmax(positive_BL / self.prompts.temperature, dim=1)
        margin_BL = positive_BL - self._pool(similarity_BM, self._negative)
        if self.prompts.scoring == "margin":
            return margin_BL
        return torch.sigmoid(margin_BL / self.prompts.temperature)  # the softmax of the two

    def _pool(self, similarity_BM: Tensor, sentences: Sequence[Tensor]) -> Tensor:
        of_class = (similarity_BM[:, columns] for columns in sentences)
        if self.prompts.ensemble == "similarity_max":
            return torch.stack([similarity.amax(dim=1) for similarity in of_class], dim=1)
        return torch.stack([similarity.mean(dim=1) for similarity in of_class], dim=1)

    def _average_embeddings(self) -> None:
        """Replace the sentences by one normalised mean a class and side."""
        if self.texts.local_NPE is not None:
            raise EvaluationError(
                f"prompt set {self.prompts.name!r} averages embeddings, but this model also compares words with "
                "regions: use the ensemble similarity_mean"
            )
        sides = [*self._positive, *self._negative]
        means = [self.texts.global_NE[columns.to(self.texts.global_NE.device)].mean(dim=0) for columns in sides]
        self.texts = Embeddings(F.normalize(torch.stack(means), dim=1))
        single = list(torch.arange(len(sides))[:, None])
        self._positive, self._negative = single[: len(self._positive)], single[len(self._positive) :]


def _similarity(model: Model, prompts: PromptSet) -> Callable[[Embeddings, Embeddings], Tensor]:
    """What compares images with sentences: the model's own, or the one that the scoring names."""
    if prompts.scoring != "gloria_published":
        return model.similarity
    published: Callable[[Embeddings, Embeddings], Tensor] | None = getattr(model, "published_similarity", None)
    if published is None:
        raise EvaluationError(
            f"prompt set {prompts.name!r} is scored by GLoRIA's published code, which this model does not have: "
            "take another one"
        )
    return published


def embed_texts(model: Model, texts: Sequence[str]) -> Embeddings:
    """Embeddings of any number of texts, in chunks. Words of different chunks are padded to one length."""
    chunks = [model.embed_texts(texts[start : start + _TEXT_BATCH]) for start in range(0, len(texts), _TEXT_BATCH)]
    return concatenate(chunks)


def concatenate(parts: Sequence[Embeddings]) -> Embeddings:
    """Embeddings one after another; local features are padded to the longest with their mask at False."""
    global_NE = torch.cat([part.global_NE for part in parts])
    locals_ = [part.local_NPE for part in parts if part.local_NPE is not None]
    if not locals_:
        return Embeddings(global_NE)
    longest = max(local_NPE.shape[1] for local_NPE in locals_)
    local_NPE = torch.cat([F.pad(local, (0, 0, 0, longest - local.shape[1])) for local in locals_])
    masks = [
        torch.ones(local.shape[:2], dtype=torch.bool, device=local.device) if part.mask_NP is None else part.mask_NP
        for part, local in zip(parts, locals_, strict=True)
    ]
    mask_NP = torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks])
    return Embeddings(global_NE, local_NPE, mask_NP)
