"""Scores of images for prompt sets; images are encoded once for all prompt sets and classes.

A score depends only on its image and the prompts, except under GLoRIA's scorings
(`prompts.STANDARDIZED`).

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
from medvl.eval.core.full_pass import FullPass, Loader, Model, column, embed_texts, encode_batch
from medvl.eval.core.metrics import Array
from medvl.eval.zero_shot_classification.prompts import STANDARDIZED, PromptSet
from medvl.models.base import evaluating
from medvl.schema import Batch, Embeddings


@dataclasses.dataclass(frozen=True, slots=True)
class Predictions:
    """Scores and labels of one pass over a loader, in the order of the loader."""

    keys: tuple[str, ...]
    scores_NL: tuple[Array, ...]
    """One array per prompt set, with one column per class."""
    labels_NL: Array
    """Labels of the table: 1, 0, -1 or NaN, one column per name in `label_names`."""
    label_names: tuple[str, ...]
    unreadable: Mapping[str, int]
    """Counts of samples that the loader skipped, by reason; with `keys` they cover the whole
    source.
    """


def predict(
    model: Model | Sequence[Model],
    loader: Loader,
    prompt_sets: Sequence[PromptSet],
    *,
    autocast: torch.dtype | None = None,
) -> Predictions:
    """Score every image of the loader under every prompt set.

    The scores of several models are averaged (ensemble); each image is read once. Under
    "pair_softmax" this is CheXzero's mean over checkpoints of a softmax of two cosines.

    Raises `EvaluationError` if the loader does not yield every sample once, or a score is not
    finite.
    """
    members = list(model) if isinstance(model, Sequence) else [model]
    if not members:
        raise EvaluationError("expected at least one model", "empty", field="model")
    batches = FullPass(loader)
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(evaluating(member))
        scorers = [_MemberScorer(member, prompt_sets, autocast) for member in members]

        def score(batch: Batch) -> dict[str, Tensor]:
            by_member = [scorer(batch) for scorer in scorers]
            means = [
                torch.stack(of_members).mean(dim=0) for of_members in zip(*by_member, strict=True)
            ]
            return {
                "labels": batch.labels_BL,
                **{str(index): mean for index, mean in enumerate(means)},
            }

        parts = batches.compute(score)
    return Predictions(
        keys=tuple(batches.keys),
        scores_NL=tuple(
            _set_scores(prompts, column(parts, str(index)))
            for index, prompts in enumerate(prompt_sets)
        ),
        labels_NL=column(parts, "labels").double().numpy(),
        label_names=tuple(loader.source.label_names),
        unreadable=batches.unreadable,
    )


def _set_scores(prompts: PromptSet, raw_NL: Tensor) -> Array:
    """Return the final scores of all images under one prompt set. Raises `EvaluationError` if
    one is not finite.
    """
    scores_NL = _standardize(raw_NL.numpy(), prompts)
    if not np.isfinite(scores_NL).all():
        bad = int((~np.isfinite(scores_NL)).any(axis=1).sum())
        message = (
            f"expected finite scores, got others for {bad} of {len(scores_NL)} images; "
            f"check weights and autocast"
        )
        raise EvaluationError(message, "nonfinite")
    return scores_NL


def _standardize(scores_NL: Array, prompts: PromptSet) -> Array:
    """Standardise the scores over the images under GLoRIA's scorings; return other scores
    unchanged.
    """
    if prompts.scoring not in STANDARDIZED:
        return scores_NL
    std_L = scores_NL.std(axis=0)
    if not std_L.all():
        message = (
            f"{prompts.name!r} standardises over images, but all scores are equal; "
            f"evaluate a complete test set"
        )
        raise EvaluationError(message, "empty")
    standardised_NL: Array = (scores_NL - scores_NL.mean(axis=0)) / std_L
    return standardised_NL


class _MemberScorer:
    """Scores of a batch by one model under every prompt set."""

    def __init__(
        self, model: Model, prompt_sets: Sequence[PromptSet], autocast: torch.dtype | None
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._device = next(model.parameters()).device
        self._scorers = [PromptScorer(model, prompts) for prompts in prompt_sets]

    def __call__(self, batch: Batch) -> list[Tensor]:
        images = encode_batch(self._model, batch, self._device, self._autocast)
        return [scorer(images) for scorer in self._scorers]


class PromptScorer:
    """Scorer of images for one prompt set, whose sentences are embedded once."""

    def __init__(self, model: Model, prompts: PromptSet) -> None:
        self.prompts = prompts
        embed, self._compare = _text_functions(model, prompts)
        texts = prompts.texts()
        self.texts = embed_texts(model, texts, embed)
        index_of = {text: index for index, text in enumerate(texts)}
        classes = prompts.classes.values()
        self._positive = [
            torch.tensor([index_of[text] for text in sides.positive]) for sides in classes
        ]
        self._negative = [
            torch.tensor([index_of[text] for text in sides.negative])
            for sides in classes
            if sides.negative
        ]
        if prompts.ensemble == "embedding_mean":
            self._average_embeddings(self.texts.global_NE)
        if prompts.ensemble == "embedding_mean_raw":
            self._average_embeddings(_projections(model, texts))

    def __call__(self, images: Embeddings) -> Tensor:
        """Return scores_BL in float64 on the CPU."""
        similarity_BM = self._compare(images, self.texts).cpu().double()
        positive_BL = self._pool(similarity_BM, self._positive)
        if self.prompts.scoring in ("positive", *STANDARDIZED):
            return positive_BL
        if self.prompts.scoring == "class_softmax":
            return torch.softmax(positive_BL / self.prompts.temperature, dim=1)
        margin_BL = positive_BL - self._pool(similarity_BM, self._negative)
        if self.prompts.scoring == "margin":
            return margin_BL
        return torch.sigmoid(margin_BL / self.prompts.temperature)  # softmax over the two sides

    def _pool(self, similarity_BM: Tensor, sentences: Sequence[Tensor]) -> Tensor:
        of_class = (similarity_BM[:, columns] for columns in sentences)
        if self.prompts.ensemble == "similarity_max":
            return torch.stack([similarity.amax(dim=1) for similarity in of_class], dim=1)
        return torch.stack([similarity.mean(dim=1) for similarity in of_class], dim=1)

    def _average_embeddings(self, sentence_ME: Tensor) -> None:
        """Replace the sentences by one normalised mean per class and side."""
        if self.texts.local_NPE is not None:
            message = (
                "a model with local similarity cannot average embeddings; use the "
                "ensemble similarity_mean"
            )
            raise EvaluationError(message, "unsupported", field="ensemble")
        if not torch.allclose(
            self.texts.global_NE.float().norm(dim=1), torch.ones(()).to(sentence_ME), atol=1e-2
        ):
            message = (
                "a model that compares vectors of any length cannot average embeddings of "
                "unit length; use the "
            )
            raise EvaluationError(
                f"{message}ensemble similarity_mean", "unsupported", field="ensemble"
            )
        sides = [*self._positive, *self._negative]
        means = [sentence_ME[columns.to(sentence_ME.device)].mean(dim=0) for columns in sides]
        self.texts = Embeddings(F.normalize(torch.stack(means), dim=1))
        single = list(torch.arange(len(sides))[:, None])
        self._positive, self._negative = (
            single[: len(self._positive)],
            single[len(self._positive) :],
        )


def _projections(model: Model, texts: Sequence[str]) -> Tensor:
    """Return (M, E): the sentences' vectors before they are normalised."""
    project = getattr(model, "unnormalized_text", None)
    if project is None:
        message = (
            "the ensemble embedding_mean_raw needs a dual-encoder with unnormalized_text; "
            "use embedding_mean"
        )
        raise EvaluationError(message, "unsupported", field="ensemble")
    return embed_texts(model, texts, lambda some: Embeddings(project(some))).global_NE


_METHODS = {
    "gloria_best_word": ("embed_texts", "best_word_similarity"),
    "gloria_published": ("published_prompts", "published_similarity"),
}
"""Scorings with their own methods of the model: to embed the prompts, and to compare them with
images.
"""


def _text_functions(
    model: Model, prompts: PromptSet
) -> tuple[Callable[[Sequence[str]], Embeddings], Callable[[Embeddings, Embeddings], Tensor]]:
    """Return the model's functions that embed the prompts and compare them with images."""
    embed, compare = (
        getattr(model, name, None)
        for name in _METHODS.get(prompts.scoring, ("embed_texts", "similarity"))
    )
    if embed is None or compare is None:
        message = (
            f"prompt set {prompts.name!r} needs GLoRIA's own similarity; use another one "
            f"for this model"
        )
        raise EvaluationError(message, "unsupported", field="prompts")
    return embed, compare
