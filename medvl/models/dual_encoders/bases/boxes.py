"""The map of each phrase of an image against its boxes, for systems that attend to places."""

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.common import mean_over_ranks
from medvl.losses.local.places import place_divergence, place_entropy
from medvl.models.dual_encoders.bases.pairs import Pairs, take
from medvl.schema import Batch, Embeddings

SIDES = ("phrases", "places")
"""Sides of `Pairs` with the phrases of the images, and the cover of their cells."""


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


def embed_phrases(model: Any, batch: Batch) -> dict[str, Embeddings]:
    """Return the phrases of the images of a batch and the cover of their cells, as sides of
    `Pairs`; nothing for a system that reads no boxes.
    """
    if not reads_boxes(model.config):
        return {}
    texts, row_N, cells_NP = phrases_of_batch(model, batch)
    inputs = model.tokenize_inputs(texts) if texts else (batch.ids_BT[:1], batch.mask_BT[:1])
    embedded = take(model.embed_ids(*inputs), slice(0, len(texts)))
    phrases = dataclasses.replace(embedded, pair_N=row_N)
    return dict(zip(SIDES, (phrases, Embeddings(cells_NP, pair_N=row_N)), strict=True))


def box_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean loss of the phrases of all ranks and its weight, from the sides of
    `embed_phrases`.

    The model's `text_maps(images, texts)` are log-odds where its `map_log_odds` is set, else
    attention.
    """
    if not reads_boxes(model.config):
        return {}
    phrases, places = (pairs.others[name] for name in SIDES)
    assert phrases.pair_N is not None, "embed_phrases numbers the images"
    maps_NP = model.text_maps(take(pairs.images, phrases.pair_N), phrases)
    loss = place_entropy if model.map_log_odds else place_divergence
    return mean_box_loss(loss(maps_NP, places.global_NE), model.config.box_weight)


def mean_box_loss(loss_N: Tensor, weight: float) -> dict[str, tuple[Tensor, float]]:
    """Return the term of the losses of a rank's phrases."""
    counted_N = torch.ones_like(loss_N, dtype=torch.bool)
    return {"boxes": (mean_over_ranks(loss_N, counted_N), weight)}
