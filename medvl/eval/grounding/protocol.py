"""Phrase grounding: heat maps of a phrase against the boxes that radiologists drew for it.

Protocol "grounding", version 1:

* An item is an image and one of its phrases; the target region is the union of the phrase's boxes.
  Images without phrases are left out and counted.
* The map is the model's own attention, or the cosine similarity of the phrase with each patch
  (`heatmaps`). `metrics` compares it with the boxes in pixels of the stored image; its rules define
  the treatment of pixels outside of the model's crop, of ties and of constant maps. `protocols` has
  the settings of papers by name.
* A map depends only on its own image and phrase. Its maximum is the center of a cell of the model's
  grid, or between it and the border: the pointing game of a coarse grid (4 x 4 cells) misses small
  boxes.
* "overall" is the mean over items, "macro" the mean over findings of their means.
* Intervals: the bootstrap resamples patients, with all their images and phrases. All rows share the
  resamples.

`details["chance"]` is the share of the image inside the boxes: the pointing game of a random guess.
With boxes of other patients, "mean_place" is the pointing game of one place for all images: the one
that most of these boxes of the same finding cover, of all findings where it has none among them.
"gain_over_mean_place" is the paired difference of the model's.

Shape letters: N items, L findings, R resamples.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medvl.common.config_io import check_choice
from medvl.data.annotations import Phrase, phrases_of, published_size
from medvl.data.loading.sources import Source
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import (
    FullPass,
    Loader,
    check_disjoint_patients,
    input_hashes,
    samples_by_key,
)
from medvl.eval.core.metric_rows import MetricRow, label_mean_metrics, measure, subgroups_of
from medvl.eval.core.results import Results
from medvl.eval.grounding.heatmaps import (
    MapRules,
    Maps,
    choose_maps,
    map_metrics,
    phrase_maps,
    region_mask,
    stored_boxes,
)
from medvl.models import DualEncoder
from medvl.models.base import evaluating
from medvl.schema import Batch, Sample

# Grounding protocols by name: their maps, smoothing, thresholds, pixels and sign of the contrast.
#
# * "medvl": the model's own maps, unsmoothed, each scaled to 0..1; a finding outside of the crop
#   counts as missed.
# * "biovil": cosines of patches under a Gaussian of 1.5 cells that reflects at the edge (scipy's
#   `gaussian_filter`, as
#   in hi-ml-multimodal), thresholds of 0.1 to 0.5 on the cosines themselves, and the absolute
#   contrast (Boecking et al.,
#   ECCV 2022). The authors released the maps, which are NaN outside of the crop, and no code of
#   the metrics; pixels
#   without a value are left out here.
# * "maco": the same maps, each scaled to -1..1, with the same thresholds; pixels outside of the
#   crop are left out, and
#   the contrast keeps its sign (Huang et al., 2024, its released code).
#
# In all of them maps are interpolated linearly to the pixels (hi-ml's function does so on request
# and repeats the nearest cell by default), and a pixel at a threshold is above it. GLoRIA and
# MGCA published no protocol for boxes of phrases.

GroundingProtocolName = Literal["medvl", "biovil", "maco"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundingProtocol:
    """Settings of a grounding evaluation."""

    maps: Maps | None = None
    """"attention" or "similarity"; None for attention if the model has it, else similarity."""
    rules: MapRules = dataclasses.field(default_factory=MapRules)
    smoothing: float = 0.0
    """Standard deviation, in cells of the grid, of a Gaussian over similarity maps."""
    contrast: Literal["cnr", "signed_cnr"] = "cnr"
    """Contrast-to-noise ratio that the protocol reports; both are always computed."""


_PROTOCOLS: Mapping[GroundingProtocolName, GroundingProtocol] = {
    "medvl": GroundingProtocol(),
    "biovil": GroundingProtocol(
        maps="similarity", rules=MapRules(scale="none", unseen="drop"), smoothing=1.5
    ),
    "maco": GroundingProtocol(
        maps="similarity",
        rules=MapRules(scale="signed", unseen="drop"),
        smoothing=1.5,
        contrast="signed_cnr",
    ),
}


def grounding_protocol(
    name: GroundingProtocolName,
    *,
    maps: Maps | None = None,
    rules: MapRules | None = None,
    smoothing: float | None = None,
) -> GroundingProtocol:
    """Return a protocol; settings other than None replace those of "medvl".

    Raises EvaluationError for an unknown name, or settings together with the protocol of a paper.
    """
    check_choice(name, _PROTOCOLS, "protocol", error=EvaluationError)
    if name == "medvl":
        return GroundingProtocol(maps=maps, rules=rules or MapRules(), smoothing=smoothing or 0.0)
    settings = {"maps": maps, "rules": rules, "smoothing": smoothing}
    if given := [field for field, value in settings.items() if value is not None]:
        message = (
            f"protocol {name!r} sets {', '.join(given)}: leave them out, or use protocol 'medvl'"
        )
        raise EvaluationError(message, "conflict", field="protocol")
    return _PROTOCOLS[name]


PROTOCOL = "grounding"
PROTOCOL_VERSION = 1
MEAN_PLACE = "mean_place"
GAIN = "gain_over_mean_place"

_ASPECT = 0.02
"""Accepted relative difference between the aspect ratios of the stored and the published image
(rounding).
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundedPhrase:
    """An item with its metrics."""

    position: int
    """Index of its image in the loader's source."""
    sample: Sample
    phrase_index: int
    """Index of the phrase among those of its image."""
    phrase: Phrase
    metrics: dict[str, float]
    """Values of `MapRules.metrics` by name, and those of the mean place; NaN where one is not
    defined.
    """
    box_share: float
    """Share of the image's pixels inside the boxes."""
    unseen_share: float
    """Share of the image's pixels outside of the model's crop."""

    def as_json(self) -> dict[str, Any]:
        """Return one line of the predictions file, without the text of the phrase."""
        names = {
            "key": self.sample.key,
            "phrase": self.phrase_index,
            "patient": self.sample.patient,
        }
        return {
            **names,
            "subgroups": subgroups_of(self.sample),
            "label": self.phrase.label,
            **self.metrics,
        }


_KeptMaps = dict[tuple[int, int], NDArray[np.float32]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroundingResult:
    """Results, items, and the maps that are shown on the page."""

    results: Results
    items: tuple[GroundedPhrase, ...]
    maps: _KeptMaps
    """(position, phrase index) -> map (H, W), for random items (`keep_maps`)."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield one mapping per item for `write_results`."""
        return (item.as_json() for item in self.items)


def phrase_grounding(
    model: DualEncoder,
    loader: Loader,
    *,
    protocol: GroundingProtocolName = "medvl",
    maps: Maps | None = None,
    rules: MapRules | None = None,
    smoothing: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
    keep_maps: int = 0,
    valid: Source | None = None,
    checkpoint: str | Path | None = None,
) -> GroundingResult:
    """Evaluate phrase grounding of a dual-encoder; the module docstring describes the protocol.

    Args:
        model: any dual-encoder whose image encoder has patches.
        loader: over samples with phrases, or with boxes by finding, for which the finding's name is
            the phrase.
        protocol: named settings (`protocols`); those of a paper cannot be combined with the next
            three.
        maps: "attention", "similarity", or None for attention if the model has it, else similarity.
        rules: rules for comparing a map with boxes.
        smoothing: standard deviation of a Gaussian over similarity maps, in cells of the grid.
        resamples, seed: number and seed of the bootstrap resamples.
        keep_maps: number of items per finding whose maps are kept for the page (random).
        valid: samples of other patients with boxes, for the baseline of their mean place.
        checkpoint: its hash goes into the results.

    Raises:
        EvaluationError: there is no phrase, the model's patches cannot be compared with phrases,
            the aspect ratio of a stored image differs from that of its boxes, the loader does not
            give every sample once, settings and protocol conflict, or `valid` has no box.
        SplitError: a patient of `valid` is tested.
    """
    settings = grounding_protocol(protocol, maps=maps, rules=rules, smoothing=smoothing)
    rules = settings.rules
    kind = choose_maps(model, settings.maps)
    if kind == "attention" and settings.smoothing:
        message = "smoothing applies to similarity maps: use maps='similarity' or smoothing=0"
        raise EvaluationError(message, "conflict", field="smoothing")
    inputs = input_hashes(checkpoint, manifest=loader)
    queries = find_queries(loader, phrases_of)
    places = None
    if valid is not None:
        others = [sample for _, sample in samples_by_key(valid).values()]
        tested = [query.sample.patient for of_image in queries.values() for query in of_image]
        check_disjoint_patients((sample.patient for sample in others), tested)
        places = MeanPlaces(others)
        inputs["validation_manifest"] = valid.fingerprint
    grounding = _Grounding(model, loader, queries, kind, settings.smoothing, rules, places)
    items, kept, details = grounding.run(_random_items(grounding.queries, keep_maps, seed))
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=grounding_rows(items, resamples, seed),
        config={
            "protocol": protocol,
            "contrast": settings.contrast,
            "maps": kind,
            **dataclasses.asdict(rules),
            "thresholds": list(rules.thresholds),
            "smoothing": settings.smoothing,
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details=details,
    )
    return GroundingResult(results=results, items=tuple(items), maps=kept)


class Query(NamedTuple):
    """A phrase to ground in an image; fields as in `GroundedPhrase`."""

    position: int
    sample: Sample
    phrase_index: int
    phrase: Phrase


def find_queries(
    loader: Loader, read: Callable[[Sample], Sequence[Phrase]]
) -> dict[str, list[Query]]:
    """Return the phrases of every sample by its key."""
    return {
        key: [Query(position, sample, number, phrase) for number, phrase in enumerate(read(sample))]
        for key, (position, sample) in samples_by_key(loader.source).items()
    }


def _random_items(
    queries: Mapping[str, Sequence[Query]], count: int, seed: int
) -> set[tuple[int, int]]:
    """Return (position, phrase index) of `count` random items of each finding."""
    by_label: dict[str, list[tuple[int, int]]] = {}
    for query in itertools.chain.from_iterable(queries.values()):
        by_label.setdefault(query.phrase.label, []).append((query.position, query.phrase_index))
    rng = np.random.default_rng(seed)
    draws = [(items, rng.permutation(len(items))[:count]) for _, items in sorted(by_label.items())]
    return {items[index] for items, indices in draws for index in indices.tolist()}


_CELLS = 128
"""Rows and columns into which an image is divided."""


class MeanPlaces:
    """The places that most boxes of each finding cover.

    Args:
        samples: images with phrases and their boxes.

    Raises EvaluationError if no phrase has a box.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        covers: dict[str | None, NDArray[np.int64]] = {}
        for sample in samples:
            for phrase in phrases_of(sample):
                if not phrase.boxes:
                    continue
                boxes = stored_boxes(phrase, sample, (_CELLS, _CELLS))
                inside_HW = region_mask(boxes, _CELLS, _CELLS)
                for label in (phrase.label, None):
                    covers[label] = covers.get(label, 0) + inside_HW.astype(np.int64)
        if not covers:
            message = "no phrase of the validation images has a box: give other shards as valid"
            raise EvaluationError(message, "empty", field="valid")
        self._places = {
            label: np.argwhere(cover_HW == cover_HW.max()) for label, cover_HW in covers.items()
        }

    def pointing_game(self, label: str, inside_HW: NDArray[np.bool_]) -> float:
        """Return whether the place of a finding is inside of the boxes of an image; a finding
        without boxes has the place of all findings.

        Places of equal cover count by the share of them that is inside.
        """
        place_C2 = self._places.get(label, self._places[None])
        pixel_C2 = ((place_C2 + 0.5) / _CELLS * inside_HW.shape).astype(np.int64)
        return float(inside_HW[pixel_C2[:, 0], pixel_C2[:, 1]].mean())


@dataclasses.dataclass(frozen=True, slots=True)
class _Grounding:
    """Evaluation of all items of a loader."""

    model: DualEncoder
    loader: Loader
    queries: Mapping[str, Sequence[Query]]
    maps: Maps
    smoothing: float
    rules: MapRules
    places: MeanPlaces | None

    def run(
        self, keep: set[tuple[int, int]]
    ) -> tuple[list[GroundedPhrase], _KeptMaps, dict[str, Any]]:
        """Return every item, the maps of those in `keep`, and the details of the results."""
        items: list[GroundedPhrase] = []
        kept: _KeptMaps = {}
        batches = FullPass(self.loader)
        with evaluating(self.model):
            for batch in batches:
                for item, map_HW in self._items(batch):
                    items.append(item)
                    if (item.position, item.phrase_index) in keep:
                        kept[item.position, item.phrase_index] = map_HW
        if not items:
            message = "no sample has phrases or boxes: use annotated shards (`medvl shards ms-cxr`)"
            raise EvaluationError(message, "empty")
        return items, kept, _details(items, batches)

    def _items(self, batch: Batch) -> Iterator[tuple[GroundedPhrase, NDArray[np.float32]]]:
        """Yield every item of a batch with its map. The model encodes an image once for each of
        its phrases.
        """
        rows = []
        queries = list[Query]()
        sizes = []
        for row, key in enumerate(batch.keys):
            if of_image := self.queries.get(key):
                rows += [row] * len(of_image)
                queries += of_image
                sizes += [stored_size(self.loader, of_image[0].position, of_image[0].sample)] * len(
                    of_image
                )
        if not queries:
            return
        maps = phrase_maps(
            self.model,
            batch.image_BCHW[rows].to(self.model.device, non_blocking=True),
            [query.phrase.text for query in queries],
            sizes,
            maps=self.maps,
            smoothing=self.smoothing,
        )
        for query, size, tensor in zip(queries, sizes, maps, strict=True):
            map_HW = tensor.cpu().numpy()
            if np.isinf(map_HW).any() or np.isnan(map_HW).all():
                raise EvaluationError(
                    "the model's maps are not finite: check its weights", "nonfinite"
                )
            inside_HW = region_mask(stored_boxes(query.phrase, query.sample, size), *size)
            metrics = dict(map_metrics(map_HW, inside_HW, self.rules))
            if self.places is not None:
                place = self.places.pointing_game(query.phrase.label, inside_HW)
                metrics[MEAN_PLACE] = place
                metrics[GAIN] = metrics["pointing_game"] - place
            item = GroundedPhrase(
                **query._asdict(),
                metrics=metrics,
                box_share=float(inside_HW.mean()),
                unseen_share=float(np.isnan(map_HW).mean()),
            )
            yield item, map_HW


def stored_size(loader: Loader, position: int, sample: Sample) -> tuple[int, int]:
    """Return (height, width) of the stored image. Raises `EvaluationError` if its boxes have
    another aspect ratio.
    """
    height, width = loader.source.pixels(position).shape[:2]
    published_height, published_width = published_size(sample)
    if abs(height * published_width / (width * published_height) - 1) > _ASPECT + 1 / min(
        height, width
    ):
        raise EvaluationError(
            f"sample {sample.key} is stored with {height} x {width} pixels, and its boxes are in "
            f"an image of {published_height} x {published_width}: make its shards from the images "
            "that the boxes were drawn on",
            "mismatch",
        )
    return height, width


def grounding_rows(
    items: Sequence[GroundedPhrase], resamples: int, seed: int
) -> tuple[MetricRow, ...]:
    """Return every metric overall, as the mean over findings, and for each finding."""
    labels = [item.phrase.label for item in items]
    groups = [
        label_mean_metrics(metric, np.array([item.metrics[metric] for item in items]), labels)
        for metric in items[0].metrics
    ]
    patients = [item.sample.patient for item in items]
    return measure(groups, len(items), resamples=resamples, seed=seed, groups=patients)


def _details(items: Sequence[GroundedPhrase], batches: FullPass) -> dict[str, Any]:
    images = {item.sample.key for item in items}
    shares: dict[str, list[float]] = {"overall": [item.box_share for item in items]}
    for item in items:
        shares.setdefault(item.phrase.label, []).append(item.box_share)
    return {
        "images": len(images),
        "patients": len({item.sample.patient for item in items}),
        "phrases": len(items),
        "images_without_phrase": len(batches.keys) - len(images),
        "unreadable": batches.unreadable,
        "without_value": sum(math.isnan(item.metrics["pointing_game"]) for item in items),
        "unseen": float(np.mean([item.unseen_share for item in items])),
        "chance": {label: float(np.mean(values)) for label, values in sorted(shares.items())},
    }
