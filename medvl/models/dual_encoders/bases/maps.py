"""Maps of texts over the cells of an image, trained on the boxes of phrases or, without boxes, on
the labels of the image.
"""

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.common import mean_over_ranks
from medvl.losses.local.within_sample import label_entropy, place_divergence, place_entropy
from medvl.losses.supervised import known_labels
from medvl.models.dual_encoders.bases.pairs import Pairs, take
from medvl.schema import FINDINGS, Batch, Embeddings

_BOXES = ("phrases", "places")
_LABELS = "label_maps"
SIDES = (*_BOXES, _LABELS)
"""Sides of `Pairs` with the phrases of the images, the cover of their cells, and the loss of each
label's map.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxConfig:
    """Settings of training from phrases with boxes, to inherit beside those of a system."""

    box_weight: float = 0.0
    """Weight of the loss of each phrase's heat map against the boxes of the phrase, of samples that
    have sentences, phrases or labels with boxes (`medvl.data.annotations.all_phrases_of`): the
    divergence of attention from the covered cells, or the cross-entropy of each cell's log-odds. A
    phrase without a box has its say: its attention is uniform, or all its cells are negative.
    Several boxes are one target. 0, as published, reads no boxes.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelMapConfig:
    """Settings of training heat maps from the labels of images, to inherit beside those of a
    system.
    """

    label_map_weight: float = 0.0
    """Weight of the cross-entropy of each label with the pooled similarity of its text and the
    cells of the image (`losses.label_entropy`), so that maps point without boxes. Labels that a
    sample with labels does not mention are absent. 0, as published, reads no labels.
    """
    label_map_sharpness: float = 1.0
    """Sharpness of the pooling: near 0 the mean of the cells, above 10 nearly their maximum."""
    label_map_texts: tuple[str, ...] = FINDINGS
    """Texts of the maps: one for each label column of the shards, in their order."""


def reads_labels(config: Any) -> bool:
    """Return whether a system trains heat maps from labels."""
    return bool(getattr(config, "label_map_weight", 0.0))


def reads_boxes(config: Any) -> bool:
    """Return whether a system trains from phrases with boxes."""
    return bool(getattr(config, "box_weight", 0.0))


def phrases_of_batch(model: Any, batch: Batch) -> tuple[list[str], Tensor, Tensor]:
    """Return the phrases of all images, the row of each (N,), and the cover of the cells of the
    model's grid (N, P) in 0..1.

    Raises ConfigError for a batch without phrases.
    """
    if batch.phrases is None or batch.phrase_cover_BSHW is None:
        message = "expected Batch.phrases: open the loader with inputs=model.inputs"
        raise ConfigError(message, "missing", field="phrases")
    texts = list(itertools.chain.from_iterable(batch.phrases))
    counts = torch.tensor([len(phrases) for phrases in batch.phrases])
    real_BS = torch.arange(batch.phrase_cover_BSHW.shape[1]) < counts[:, None]
    row_N = torch.arange(len(counts)).repeat_interleave(counts).to(batch.ids_BT.device)
    cover_NHW = batch.phrase_cover_BSHW[real_BS.to(batch.ids_BT.device)].float() / 255
    side = model.config.image_size
    grid = model.image_encoder.grid(side, side)
    cells_NP = F.adaptive_avg_pool2d(cover_NHW[:, None], grid).flatten(1)
    return texts, row_N, cells_NP


def embed_maps(model: Any, images: Embeddings, batch: Batch) -> dict[str, Embeddings]:
    """Return the sides of `Pairs` that `map_terms` reads; none for a system that trains no maps."""
    sides: dict[str, Embeddings] = {}
    if reads_boxes(model.config):
        sides |= _embed_phrases(model, batch)
    if reads_labels(model.config):
        sides[_LABELS] = Embeddings(_label_losses(model, images, batch))
    return sides


def map_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean losses of the maps of all ranks and their weights, from the sides of
    `embed_maps`.
    """
    terms: dict[str, tuple[Tensor, float]] = {}
    if reads_boxes(model.config):
        terms |= _box_terms(model, pairs)
    if reads_labels(model.config):
        assert pairs.labels_BL is not None, "the base class adds the labels of the batch"
        loss_BL = pairs.others[_LABELS].global_NE
        known_BL = known_labels(mentioned_or_absent(pairs.labels_BL))
        mean = mean_over_ranks(loss_BL.flatten(), known_BL.flatten())
        terms["labels"] = mean, model.config.label_map_weight
    return terms


def mentioned_or_absent(labels_BL: Tensor) -> Tensor:
    """Return labels with 0 where a row with labels does not mention one."""
    unmentioned_BL = labels_BL.isnan()
    return labels_BL.masked_fill(unmentioned_BL & ~unmentioned_BL.all(dim=1, keepdim=True), 0.0)


def _label_losses(model: Any, images: Embeddings, batch: Batch) -> Tensor:
    """Return (B, L): the loss of each label's map, from the model's `text_scores(images, texts)`,
    the log-odds of every text in the cells of every image.

    Raises ConfigError unless there is a text for each label.
    """
    config: Any = model.config
    labels_BL = batch.labels_BL
    if labels_BL.shape[1] != len(config.label_map_texts):
        message = (
            f"expected a label column for each of {len(config.label_map_texts)} texts, got "
            f"{labels_BL.shape[1]}: set label_map_texts"
        )
        raise ConfigError(message, "mismatch", field="label_map_texts")
    scores_BLP = model.text_scores(images, model.embed_texts(config.label_map_texts))
    return label_entropy(scores_BLP, mentioned_or_absent(labels_BL), config.label_map_sharpness)


def _embed_phrases(model: Any, batch: Batch) -> dict[str, Embeddings]:
    """Return the phrases of the images of a batch and the cover of their cells."""
    texts, row_N, cells_NP = phrases_of_batch(model, batch)
    inputs = model.tokenize_inputs(texts) if texts else (batch.ids_BT[:1], batch.mask_BT[:1])
    embedded = take(model.embed_ids(*inputs), slice(0, len(texts)))
    phrases = dataclasses.replace(embedded, pair_N=row_N)
    return dict(zip(_BOXES, (phrases, Embeddings(cells_NP, pair_N=row_N)), strict=True))


def _box_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean loss of the phrases of all ranks and its weight.

    The model's `text_maps(images, texts)` are log-odds where its `map_log_odds` is set, else
    attention.
    """
    phrases, places = (pairs.others[name] for name in _BOXES)
    assert phrases.pair_N is not None, "_embed_phrases numbers the images"
    maps_NP = model.text_maps(take(pairs.images, phrases.pair_N), phrases)
    loss = place_entropy if model.map_log_odds else place_divergence
    return mean_box_loss(loss(maps_NP, places.global_NE), model.config.box_weight)


def mean_box_loss(loss_N: Tensor, weight: float) -> dict[str, tuple[Tensor, float]]:
    """Return the term of the losses of a rank's phrases."""
    counted_N = torch.ones_like(loss_N, dtype=torch.bool)
    return {"boxes": (mean_over_ranks(loss_N, counted_N), weight)}
