"""The embeddings of a batch as contrastive losses compare them, operations on their rows, and the
sides that systems compare beside images and texts.

Altered texts: each text of a batch against the same text with left and right exchanged, or with its
findings denied. Maps: of texts over the cells of an image, trained on the boxes of phrases or,
without boxes, on the labels of the image.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.common import gather, gather_padded, mean_over_ranks, rows_by_rank
from medvl.losses.local.within_sample import label_entropy, place_divergence, place_entropy
from medvl.losses.pairs.contrastive import altered_texts, denial_holds
from medvl.losses.supervised import known_labels
from medvl.schema import FINDINGS, Batch, Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Named sides of B pairs: images, texts, and any others that a system compares.

    A side has one row per pair, or any number of rows with `Embeddings.pair_N`. Without labels, at
    least one side has one row per pair.
    """

    images: Embeddings
    texts: Embeddings
    others: Mapping[str, Embeddings] = dataclasses.field(default_factory=dict)
    """Further sides by name: second views, sentences, ..."""
    groups: tuple[Tensor, ...] = ()
    """(B,) int64 each: pairs that agree in any of them are positives of each other."""
    labels_BL: Tensor | None = None
    """Labels as in `Batch`."""

    @property
    def sides(self) -> dict[str, Embeddings]:
        """All sides by name, in a fixed order."""
        return {"images": self.images, "texts": self.texts, **self.others}

    def __len__(self) -> int:
        if self.labels_BL is not None:
            return len(self.labels_BL)
        return next(len(side) for side in self.sides.values() if side.pair_N is None)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that may have a gradient, in a fixed order."""
        parts = [(side.global_NE, side.local_NPE, side.weight_NP) for side in self.sides.values()]
        return [tensor for side in parts for tensor in side if tensor is not None]

    def rows(self, row_K: Tensor) -> Self:
        """Return the pairs of the given numbers, which must differ; differentiable."""
        place_B = row_K.new_full((len(self),), -1)
        place_B[row_K] = torch.arange(len(row_K), device=row_K.device)

        def of_side(side: Embeddings) -> Embeddings:
            if side.pair_N is None:
                return take(side, row_K)
            place_N = place_B[side.pair_N]
            side_K = (place_N >= 0).nonzero().squeeze(1)
            return dataclasses.replace(take(side, side_K), pair_N=place_N[side_K])

        return self._with_sides(
            {name: of_side(side) for name, side in self.sides.items()},
            tuple(group_B[row_K] for group_B in self.groups),
            None if self.labels_BL is None else self.labels_BL[row_K],
        )

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Return the pairs of all parts in order, local features padded to the longest;
        differentiable.
        """
        starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        names = parts[0].sides
        sides = {
            name: cat(
                [
                    _shift_rows(part.sides[name], start)
                    for part, start in zip(parts, starts, strict=False)
                ]
            )
            for name in names
        }
        groups = zip(*(part.groups for part in parts), strict=True)
        labels = [part.labels_BL for part in parts if part.labels_BL is not None]
        return parts[0]._with_sides(
            sides,
            tuple(torch.cat(group) for group in groups),
            torch.cat(labels) if labels else None,
        )

    def gather(self, *, local: bool = True) -> Self:
        """Return the pairs of all ranks in rank order, as `medvl.losses.common.gather` does.

        With `local` False, local features stay behind: regions of images are large.
        """
        counts = rows_by_rank(len(self))
        if len(counts) == 1:
            return self
        start = sum(counts[: torch.distributed.get_rank()])
        sides = {
            name: gather_side(_shift_rows(side, start), local=local)
            for name, side in self.sides.items()
        }
        labels_BL = None if self.labels_BL is None else gather(self.labels_BL)
        return self._with_sides(sides, tuple(map(gather, self.groups)), labels_BL)

    def placeholder(self) -> Self:
        """Return two pairs of constant embeddings with the sides of this one, whose tensors get
        zero gradients.
        """
        zero = torch.stack([tensor.float().sum() for tensor in self.tensors()]).sum() * 0

        def constant(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            shape = 2, *(max(size, 1) for size in tensor.shape[1:])
            return tensor.new_full(shape, shape[-1] ** -0.5) + zero.to(tensor.dtype)

        def of_side(side: Embeddings) -> Embeddings:
            mask_NP = (
                None
                if side.mask_NP is None
                else side.mask_NP.new_ones(2, max(side.mask_NP.shape[1], 1))
            )
            pair_N, group_N = (
                None if each is None else torch.arange(2, device=each.device)
                for each in (side.pair_N, side.group_N)
            )
            global_NE = constant(side.global_NE)
            assert global_NE is not None
            return Embeddings(
                global_NE,
                constant(side.local_NPE),
                mask_NP,
                constant(side.weight_NP),
                pair_N,
                group_N,
            )

        return self._with_sides(
            {name: of_side(side) for name, side in self.sides.items()},
            tuple(torch.arange(2, device=group_B.device) for group_B in self.groups),
            None
            if self.labels_BL is None
            else self.labels_BL.new_zeros(2, self.labels_BL.shape[1]),
        )

    def _with_sides(
        self, sides: Mapping[str, Embeddings], groups: tuple[Tensor, ...], labels_BL: Tensor | None
    ) -> Self:
        others = {name: side for name, side in sides.items() if name in self.others}
        return type(self)(
            images=sides["images"],
            texts=sides["texts"],
            others=others,
            groups=groups,
            labels_BL=labels_BL,
        )


def take(side: Embeddings, index: Tensor | slice) -> Embeddings:
    """Return some rows of a side; differentiable."""
    others = (side.local_NPE, side.mask_NP, side.weight_NP, side.pair_N, side.group_N)
    return Embeddings(
        side.global_NE[index], *(None if tensor is None else tensor[index] for tensor in others)
    )


def cat(parts: Sequence[Embeddings]) -> Embeddings:
    """Return the rows of all parts in order, local features padded with zeros to the longest;
    differentiable.
    """
    locals_ = [part.local_NPE for part in parts if part.local_NPE is not None]
    longest = max((local_NPE.shape[1] for local_NPE in locals_), default=0)

    def pad_rows(tensors: Sequence[Tensor | None], dims: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        before = (0, 0) * (dims - 2)
        return (
            torch.cat([F.pad(each, (*before, 0, longest - each.shape[1])) for each in present])
            if present
            else None
        )

    pair = [part.pair_N for part in parts if part.pair_N is not None]
    group = [part.group_N for part in parts if part.group_N is not None]
    return Embeddings(
        torch.cat([part.global_NE for part in parts]),
        pad_rows(locals_, 3),
        pad_rows([part.mask_NP for part in parts], 2),
        pad_rows([part.weight_NP for part in parts], 2),
        torch.cat(pair) if pair else None,
        torch.cat(group) if group else None,
    )


def gather_side(side: Embeddings, *, local: bool = True) -> Embeddings:
    """Return the rows of all ranks; with `local` False, without local features. `pair_N` is
    gathered as it is.
    """
    global_NE = gather(side.global_NE)
    pair_N, group_N = (
        None if each is None else gather(each) for each in (side.pair_N, side.group_N)
    )
    if side.local_NPE is None or not local:
        return Embeddings(global_NE, pair_N=pair_N, group_N=group_N)
    if side.mask_NP is None:  # regions: as many in every image
        weight_NP = None if side.weight_NP is None else gather(side.weight_NP)
        return Embeddings(global_NE, gather(side.local_NPE), None, weight_NP, pair_N, group_N)
    local_NPE, mask_NP = gather_padded(side.local_NPE, side.mask_NP)
    weight_NP = None if side.weight_NP is None else gather_padded(side.weight_NP, side.mask_NP)[0]
    return Embeddings(global_NE, local_NPE, mask_NP, weight_NP, pair_N, group_N)


def gather_global(pairs: Pairs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the vectors of images and texts and the groups, of all ranks."""
    groups = [gather(group_B) for group_B in pairs.groups]
    return gather(pairs.images.global_NE), gather(pairs.texts.global_NE), groups


def negatives(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return own_B, the row of each pair of this rank among those of all ranks, and other_BN.

    other_BN is True on the pairs of all ranks that are not the pair itself and agree with it in
    none of the groups.
    """
    counts = rows_by_rank(len(pairs))
    start = sum(counts[: torch.distributed.get_rank()]) if len(counts) > 1 else 0
    own_B = torch.arange(start, start + len(pairs), device=pairs.images.global_NE.device)
    other_BN = own_B[:, None] != torch.arange(sum(counts), device=own_B.device)
    for group_B in pairs.groups:
        other_BN &= group_B[:, None] != gather(group_B)
    return own_B, other_BN


def _shift_rows(side: Embeddings, start: int) -> Embeddings:
    return side if side.pair_N is None else dataclasses.replace(side, pair_N=side.pair_N + start)


ALTERED_SIDES = ("mirrored", "denied")
"""Sides of `Pairs` with altered texts."""
FINDINGS_SIDE = "findings"
"""Side of `Pairs` with the findings of each pair: `Batch.turned_BL`, then `Batch.found_BL`."""


def altered_kinds(config: Any) -> dict[str, float]:
    """Return the kinds of altered texts that a system compares with, and their weights."""
    weights = {
        "mirrored": getattr(config, "mirror_weight", 0.0),
        "denied": getattr(config, "denial_weight", 0.0),
    }
    return {kind: weight for kind, weight in weights.items() if weight}


def embed_altered(model: Any, batch: Batch) -> dict[str, Embeddings]:
    """Return the altered texts of each kind: one row for each text that the exchange alters, with
    its pair. Raises ConfigError for a batch without them.
    """
    fields = {
        "mirrored": (batch.mirrored_ids_BT, batch.mirrored_mask_BT, batch.has_mirror_B),
        "denied": (batch.denied_ids_BT, batch.denied_mask_BT, batch.has_denial_B),
    }
    sides = {}
    for kind in altered_kinds(model.config):
        ids_BT, mask_BT, altered_B = fields[kind]
        if ids_BT is None or mask_BT is None or altered_B is None:
            message = f"expected {kind} texts: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field=f"{kind}_ids_BT")
        row_K = altered_B.nonzero()[:, 0]
        global_BE = model.embed_ids(ids_BT, mask_BT).global_NE
        sides[kind] = Embeddings(global_BE[row_K], pair_N=row_K)
    if "denied" in sides:
        if batch.turned_BL is None or batch.found_BL is None:
            message = "expected findings of the texts: open the loader with inputs=model.inputs"
            raise ConfigError(message, "missing", field="turned_BL")
        sides[FINDINGS_SIDE] = Embeddings(torch.cat([batch.turned_BL, batch.found_BL], 1).float())
    return sides


def altered_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean loss of each kind of altered texts over all ranks (`losses.altered_texts`)
    and its weight, from the sides of `embed_altered`.

    A denied text is compared with its own image and with those that contradict the text
    (`losses.denial_holds`); a text that no image contradicts does not count. A mirrored text is
    compared with its own image alone, as a text names either side equally often.
    """
    kinds = altered_kinds(model.config)
    if not kinds:
        return {}
    scale = model.scale() if model.learns_scale else 1 / model.config.temperature
    image_NE = gather(pairs.images.global_NE)
    own_B, other_BN = negatives(pairs)
    terms = {}
    for kind, weight in kinds.items():
        altered = pairs.others[kind]
        row_K = altered.pair_N
        assert row_K is not None, "embed_altered numbers the pairs"
        other_KN = torch.zeros_like(other_BN[row_K])
        counted_K = torch.ones_like(row_K, dtype=torch.bool)
        if kind == "denied":
            turned_BL, found_BL = pairs.others[FINDINGS_SIDE].global_NE.chunk(2, dim=1)
            other_KN = other_BN[row_K] & denial_holds(turned_BL[row_K], gather(found_BL))
            counted_K = other_KN.any(dim=1)
        texts = pairs.texts.global_NE[row_K], altered.global_NE
        loss_K = altered_texts(image_NE, *texts, own_B[row_K], other_KN, scale)
        terms[kind] = mean_over_ranks(loss_K, counted_K), weight
    return terms


_BOX_SIDES = ("phrases", "places")
_LABEL_SIDE = "label_maps"
MAP_SIDES = (*_BOX_SIDES, _LABEL_SIDE)
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
        sides[_LABEL_SIDE] = Embeddings(_label_losses(model, images, batch))
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
        loss_BL = pairs.others[_LABEL_SIDE].global_NE
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
    """Return the phrases of the images of a batch and the cover of their cells; equal phrases are
    encoded once.
    """
    texts, row_N, cells_NP = phrases_of_batch(model, batch)
    distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    inputs = (
        model.tokenize_inputs(list(distinct)) if texts else (batch.ids_BT[:1], batch.mask_BT[:1])
    )
    column_N = torch.tensor([distinct[text] for text in texts], dtype=torch.long)
    embedded = take(model.embed_ids(*inputs), column_N.to(row_N.device))
    phrases = dataclasses.replace(embedded, pair_N=row_N)
    return dict(zip(_BOX_SIDES, (phrases, Embeddings(cells_NP, pair_N=row_N)), strict=True))


def _box_terms(model: Any, pairs: Pairs) -> dict[str, tuple[Tensor, float]]:
    """Return the mean loss of the phrases of all ranks and its weight.

    The model's `text_maps(images, texts)` are log-odds where its `map_log_odds` is set, else
    attention.
    """
    phrases, places = (pairs.others[name] for name in _BOX_SIDES)
    assert phrases.pair_N is not None, "_embed_phrases numbers the images"
    maps_NP = model.text_maps(take(pairs.images, phrases.pair_N), phrases)
    loss = place_entropy if model.map_log_odds else place_divergence
    return mean_box_loss(loss(maps_NP, places.global_NE), model.config.box_weight)


def mean_box_loss(loss_N: Tensor, weight: float) -> dict[str, tuple[Tensor, float]]:
    """Return the term of the losses of a rank's phrases."""
    counted_N = torch.ones_like(loss_N, dtype=torch.bool)
    return {"boxes": (mean_over_ranks(loss_N, counted_N), weight)}
