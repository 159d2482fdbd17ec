"""Phrase grounding: is what a phrase says found where radiologists drew its boxes?

Protocol "grounding", version 1:

* An item is an image and one of its phrases, whose truth is the union of its boxes. Images without phrases are left out
  and counted.
* A map over the image says where the model finds the phrase (`grounding_maps`): the model's own attention, or the
  cosine of the phrase with each patch. It is judged in the pixels of the stored image, by `grounding_metrics`, whose
  rules name what becomes of pixels that the model was not shown, of ties and of even maps.
* A map depends on its own image and phrase alone.
* "overall" is the mean over items, "macro" the mean over findings of their means.
* Intervals: patients are drawn, with all their images and phrases. All rows share the draws.

`details` has what a blind guess reaches: the share of the image that lies in the boxes is its pointing game.

Shape letters: N items, L findings, R resamples.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations.phrases import Phrase, phrases_of, published_size
from medvl.data.transforms.image import Box
from medvl.errors import EvaluationError
from medvl.eval.core.bootstrap import mean_over_labels
from medvl.eval.core.full_pass import FullPass, input_hashes, samples_by_key
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.grounding.heatmaps import Maps, choose_maps, phrase_maps
from medvl.eval.grounding.metrics import MapRules, inside, judge_map
from medvl.models import DualEncoder
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch, Sample

PROTOCOL, PROTOCOL_VERSION = "grounding", 1

_ASPECT = 0.02
"""How much the proportions of a stored image may differ from those that its boxes were drawn in: rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundedPhrase:
    """An item with what became of it."""

    position: int
    """Of its image in the loader's source."""
    sample: Sample
    number: int
    """Of the phrase among those of its image."""
    phrase: Phrase
    numbers: dict[str, float]
    """`MapRules.metrics` by name; NaN where one is not defined."""
    share: float
    """Of the image's pixels that lie in the boxes."""
    unseen: float
    """Share of the image's pixels that the model was not shown."""

    def as_json(self) -> dict[str, Any]:
        """A line of predictions; the phrase stays with the data."""
        names = {"key": self.sample.key, "phrase": self.number, "patient": self.sample.patient}
        return {**names, "label": self.phrase.label, **self.numbers}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundingResult:
    """The results, the items behind them, and the maps of those that were to be shown."""

    results: Results
    items: tuple[GroundedPhrase, ...]
    maps: dict[tuple[int, int], NDArray[np.float32]]
    """(position, number) -> map (H, W) of the items that `keep_maps` drew."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an item: its names and its numbers."""
        return (item.as_json() for item in self.items)


def phrase_grounding(
    model: DualEncoder,
    loader: Loader,
    *,
    maps: Maps | None = None,
    rules: MapRules | None = None,
    smoothing: float = 0.0,
    resamples: int = 1000,
    seed: int = 0,
    keep_maps: int = 0,
    checkpoint: str | Path | None = None,
) -> GroundingResult:
    """Judge where a dual-encoder finds phrases; the protocol is at the top of this module.

    Args:
        model: any dual-encoder whose image encoder has patches.
        loader: over samples with phrases, or with boxes by finding, which are then asked for by name.
        maps: "attention", "similarity", or None for the model's own where it has some.
        rules: how a map is judged.
        smoothing: of maps of similarity, in cells of the grid.
        resamples, seed: of the bootstrap.
        keep_maps: as many items of each finding, drawn by the seed, keep their map for the page.
        checkpoint: whose hash goes into the results.

    Raises:
        EvaluationError: there is no phrase, the model's patches cannot be compared with phrases, boxes are of an image
            of other proportions, or the loader does not give every sample once.
    """
    rules = rules or MapRules()
    chosen = choose_maps(model, maps)
    if chosen == "attention" and smoothing:
        raise EvaluationError("smoothing is for maps of similarity: attention is judged as the model gives it")
    inputs = input_hashes(checkpoint, manifest=loader)
    judge = _Judge(model, loader, _asked(loader), chosen, smoothing, rules)
    items, shown, account = judge.all_items(_drawn(judge.asked, keep_maps, seed))
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=grounding_rows(items, rules, resamples, seed),
        config={
            "maps": chosen,
            **dataclasses.asdict(rules),
            "thresholds": list(rules.thresholds),
            "smoothing": smoothing,
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details=account,
    )
    return GroundingResult(results=results, items=tuple(items), maps=shown)


class _Question(NamedTuple):
    """A phrase that is looked for in an image."""

    position: int
    sample: Sample
    number: int
    """Of the phrase among those of its image."""
    phrase: Phrase


def _asked(loader: Loader) -> dict[str, list[_Question]]:
    """Key of each sample -> what is looked for in its image."""
    return {
        key: [_Question(position, sample, number, phrase) for number, phrase in enumerate(phrases_of(sample))]
        for key, (position, sample) in samples_by_key(loader.source).items()
    }


def _drawn(asked: Mapping[str, Sequence[_Question]], each: int, seed: int) -> set[tuple[int, int]]:
    """(position, number) of as many items of each finding."""
    by_label: dict[str, list[tuple[int, int]]] = {}
    for question in itertools.chain.from_iterable(asked.values()):
        by_label.setdefault(question.phrase.label, []).append((question.position, question.number))
    rng = np.random.default_rng(seed)
    drawn = [(items, rng.permutation(len(items))[:each]) for _, items in sorted(by_label.items())]
    return {items[index] for items, chosen in drawn for index in chosen.tolist()}


_Maps = dict[tuple[int, int], NDArray[np.float32]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Judge:
    """Takes a loader's batches apart into items, and judges them."""

    model: DualEncoder
    loader: Loader
    asked: Mapping[str, Sequence[_Question]]
    maps: Maps
    smoothing: float
    rules: MapRules

    def all_items(self, kept: set[tuple[int, int]]) -> tuple[list[GroundedPhrase], _Maps, dict[str, Any]]:
        """Every item, the maps of those that are kept, and the account of it all."""
        items: list[GroundedPhrase] = []
        shown: _Maps = {}
        given = FullPass(self.loader)
        with evaluating(self.model):
            for batch in given:
                for item, map_HW in self._items(batch):
                    items.append(item)
                    if (item.position, item.number) in kept:
                        shown[item.position, item.number] = map_HW
        if not items:
            raise EvaluationError("no sample has phrases or boxes: nothing can be looked for (`medvl shards ms-cxr`)")
        return items, shown, _account(items, given)

    def _items(self, batch: Batch) -> Iterator[tuple[GroundedPhrase, NDArray[np.float32]]]:
        """Every item of a batch with its map. An image goes through the model once for each of its phrases."""
        rows, questions, sizes = [], list[_Question](), []
        for row, key in enumerate(batch.keys):
            if asked := self.asked.get(key):
                rows += [row] * len(asked)
                questions += asked
                sizes += [_stored_size(self.loader, asked[0].position, asked[0].sample)] * len(asked)
        if not questions:
            return
        found = phrase_maps(
            self.model,
            batch.image_BCHW[rows].to(self.model.device, non_blocking=True),
            [question.phrase.text for question in questions],
            sizes,
            maps=self.maps,
            smoothing=self.smoothing,
        )
        for question, size, tensor in zip(questions, sizes, found, strict=True):
            map_HW = tensor.cpu().numpy()
            if np.isinf(map_HW).any() or np.isnan(map_HW).all():
                raise EvaluationError("the model's maps are not finite: look at its weights")
            inside_HW = inside(boxes_on(question.phrase, question.sample, size), *size)
            item = GroundedPhrase(
                **question._asdict(),
                numbers=dict(judge_map(map_HW, inside_HW, self.rules)),
                share=float(inside_HW.mean()),
                unseen=float(np.isnan(map_HW).mean()),
            )
            yield item, map_HW


def _stored_size(loader: Loader, position: int, sample: Sample) -> tuple[int, int]:
    """(height, width) of the stored image. Raises `EvaluationError` when boxes are of one of other proportions."""
    height, width = loader.source.pixels(position).shape[:2]
    published_height, published_width = published_size(sample)
    if abs(height * published_width / (width * published_height) - 1) > _ASPECT + 1 / min(height, width):
        raise EvaluationError(
            f"sample {sample.key} is stored with {height} x {width} pixels, and its boxes are of an image of "
            f"{published_height} x {published_width}: make its shards of the images that the boxes were drawn on"
        )
    return height, width


def boxes_on(phrase: Phrase, sample: Sample, size: tuple[int, int]) -> list[Box]:
    """The boxes of a phrase in pixels of the image as it is stored, which has `size` (height, width)."""
    published = published_size(sample)
    down, across = size[0] / published[0], size[1] / published[1]

    scales = {"y": down, "x": across, "height": down, "width": across}
    return [Box(*(float(str(box[name])) * scale for name, scale in scales.items())) for box in phrase.boxes]


def grounding_rows(
    items: Sequence[GroundedPhrase], rules: MapRules, resamples: int, seed: int
) -> tuple[MetricRow, ...]:
    """Every metric overall, as the mean over findings, and for each finding."""
    labels = [item.phrase.label for item in items]
    blocks = [
        label_mean_metrics(metric, np.array([item.numbers[metric] for item in items]), labels)
        for metric in rules.metrics
    ]
    patients = [item.sample.patient for item in items]
    return measure(blocks, len(items), resamples=resamples, seed=seed, groups=patients)


def label_mean_metrics(metric: str, value_N: Array, labels: Sequence[str]) -> MetricGroup:
    """The mean over items ("overall"), over the means of the labels ("macro"), and of each label; NaN is left out."""
    names = sorted(set(labels))
    of_label_NL = np.array(labels)[:, None] == np.array(names)
    values_NK = np.concatenate([value_N[:, None], np.where(of_label_NL, value_N[:, None], np.nan)], axis=1)
    means = mean_metrics(metric, values_NK, ["overall", *names])
    overall, *of_labels = means.rows

    def statistic(counts_NR: Array) -> Array:
        values_RK = means.statistic(counts_NR)
        macro_R1 = mean_over_labels(values_RK[:, 1:])[:, None]
        return np.concatenate([values_RK[:, :1], macro_R1, values_RK[:, 1:]], axis=1)

    return MetricGroup([overall, dataclasses.replace(overall, target="macro"), *of_labels], statistic)


def _account(items: Sequence[GroundedPhrase], given: FullPass) -> dict[str, Any]:
    """What was judged, what was left out, what the model was not shown, and what a blind guess reaches."""
    images = {item.sample.key for item in items}
    shares: dict[str, list[float]] = {"overall": [item.share for item in items]}
    for item in items:
        shares.setdefault(item.phrase.label, []).append(item.share)
    return {
        "images": len(images),
        "patients": len({item.sample.patient for item in items}),
        "phrases": len(items),
        "images_without_phrase": len(given.keys) - len(images),
        "unreadable": given.unreadable,
        "without_value": sum(math.isnan(item.numbers["pointing_game"]) for item in items),
        "unseen": float(np.mean([item.unseen for item in items])),
        "chance": {label: float(np.mean(values)) for label, values in sorted(shares.items())},
    }
