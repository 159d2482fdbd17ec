"""HTML page of a grounding evaluation: metrics of every finding, and maps drawn on images with
their boxes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import Box
from medvl.errors import ConfigError
from medvl.eval.core.metric_rows import MetricGroup, label_mean_metrics
from medvl.eval.core.open import Setup, SmallBatchOptions
from medvl.eval.core.results import (
    LineFields,
    Lines,
    PageHeader,
    Results,
    WritePage,
    format_table,
    number,
)
from medvl.eval.evaluation import Column, ModelEvaluation, Task, Trial
from medvl.eval.grounding.generalized import (
    PROTOCOL as GENERALIZED,
    GeneralizedResult,
    generalized_grounding,
    groups_of_lines,
)
from medvl.eval.grounding.heatmaps import MapRules, stored_boxes
from medvl.eval.grounding.protocol import (
    MEAN_PLACE,
    PROTOCOL,
    GroundedPhrase,
    GroundingResult,
    phrase_grounding,
)
from medvl.eval.html import page as html, tables
from medvl.eval.html.page import header_facts, headline
from medvl.eval.html.plots import color_ends, draw_map, mark_peak
from medvl.eval.registry import register_evaluation
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.dual_encoders.kad import KAD
from medvl.models.dual_encoders.mavl import MAVL
from medvl.models.dual_encoders.medklip import MedKLIP

_NAMES = {
    "pointing_game": "Pointing game",
    "miou": "Mean IoU",
    "cnr": "CNR",
    "signed_cnr": "Signed CNR",
}
_TARGETS = {"overall": "All phrases", "macro": "Mean over findings"}
_SIDE = 384  # longer side of a picture, in pixels
_UNSEEN = 0.35  # brightness of pixels outside of the model's crop
_BOX = (34, 211, 238)
LIMITS = (
    "A research evaluation, not for clinical use: a high value inside a box shows that this region "
    "matches the phrase, not that the model has recognized the finding or its outline.",
    "Intervals are percentiles of a bootstrap over patients. They include sampling error, not "
    "disagreement between the annotators of the boxes.",
    "Images and phrases on this page belong to the data set and stay under its terms of use.",
)


def write_grounding_page(
    result: GroundingResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: html.Pixels | None = None,
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`.

    `result` is from `phrase_grounding`; items with kept maps are shown.
    """
    results = result.results
    details = result.results.details
    sections: list[html.Section] = [_table(result), _thresholds(result)]
    if pixels is not None and result.maps:
        sections.append(_pictures(result, pixels))
    page = html.Page(
        title=f"Phrase grounding: {header.model}",
        subtitle=f"{header.data}: {details['phrases']:,} phrases about {details['images']:,} "
        f"images of "
        f"{details['patients']:,} patients",
        headlines=[
            headline(_NAMES[metric], results.row(metric, "overall"))
            for metric in ("pointing_game", results.config["contrast"], "miou")
        ],
        facts=header_facts(results, header, units="patients", extra=_facts(result)),
        sections=sections,
        limits=LIMITS,
        findings=[target for target in _targets(result) if target not in _TARGETS],
    )
    return html.write_page(page, path)


def _facts(result: GroundingResult) -> list[tuple[str, str]]:
    config = result.results.config
    details = result.results.details
    maps = {
        "attention": "attention of the phrase's words, averaged",
        "similarity": "cosine of the phrase with each patch",
    }[config["maps"]]
    if config["smoothing"]:
        maps += f", smoothed by {config['smoothing']:g} cells, reflected at the edges"
    unseen = {"background": "lowest value of the map", "drop": "left out"}[config["unseen"]]
    scale = {
        "unit": "after scaling each map to 0..1",
        "signed": "after scaling each map to -1..1",
        "none": "unscaled",
    }
    facts = [
        ("Protocol", f"{config['protocol']}; its figures are the {_NAMES[config['contrast']]}"),
        ("Maps", maps),
        ("Outside of the crop", f"{details['unseen']:.1%} of the pixels: {unseen}"),
        (
            "Thresholds",
            f"{', '.join(f'{t:g}' for t in config['thresholds'])} {scale[config['scale']]}",
        ),
    ]
    if details["without_value"]:
        facts.append(
            ("Left out", f"{details['without_value']} phrases with all boxes outside of the crop")
        )
    return facts


def _targets(result: GroundingResult) -> list[str]:
    return [row.target for row in result.results.rows if row.metric == "cnr"]


def _table(result: GroundingResult) -> tables.Table:
    chance = result.results.details["chance"]
    chance = {
        **chance,
        "macro": float(np.mean([value for name, value in chance.items() if name != "overall"])),
    }
    has_place = any(row.metric == MEAN_PLACE for row in result.results.rows)
    place = {MEAN_PLACE: "Mean place"} if has_place else {}
    lines: list[Sequence[tables.Cell | str]] = []
    for target in _targets(result):
        rows = {metric: result.results.row(metric, target) for metric in (*_NAMES, *place)}
        lines.append(
            [
                _TARGETS.get(target, target),
                tables.metric_cell(rows["pointing_game"], reference=chance[target], bar=True),
                tables.metric_cell(rows["miou"], bar=True),
                tables.metric_cell(rows["cnr"]),
                tables.metric_cell(rows["signed_cnr"]),
                *(tables.metric_cell(rows[metric]) for metric in place),
                f"{chance[target]:.3f}",
                f"{rows['cnr'].n:,}",
            ]
        )
    return tables.Table(
        title="Summary by finding",
        columns=["", *_NAMES.values(), *place.values(), "Box share", "Phrases"],
        rows=lines,
        strong_rows=2,
        caption="With 95% intervals. The pointing game is the share of phrases whose map has "
        "its maximum inside their "
        "boxes; the tick in its bar, the share of the image that the boxes cover, is a random "
        "guess. CNR is the "
        "contrast of the map inside and outside of the boxes over its noise; the signed CNR is "
        "negative if the map is "
        "lower inside."
        + " Mean place: the pointing game of the place that most boxes of the finding cover in "
        "images of other patients." * has_place,
    )


def _thresholds(result: GroundingResult) -> tables.Table:
    metrics = [f"iou@{threshold:g}" for threshold in result.results.config["thresholds"]]
    lines: list[Sequence[tables.Cell | str]] = [
        [
            _TARGETS.get(target, target),
            *(tables.metric_cell(result.results.row(metric, target)) for metric in metrics),
        ]
        for target in _targets(result)
    ]
    return tables.Table(
        title="Overlap by threshold",
        columns=["", *(f"IoU at {metric.removeprefix('iou@')}" for metric in metrics)],
        rows=lines,
        strong_rows=2,
        caption="IoU of the boxes with the pixels at or above a threshold; their mean is the "
        "mean IoU.",
    )


def _pictures(result: GroundingResult, pixels: html.Pixels) -> html.Pictures:
    by_label: dict[str, list[GroundedPhrase]] = {}
    for item in result.items:
        if (item.position, item.phrase_index) in result.maps:
            by_label.setdefault(item.phrase.label, []).append(item)
    strips = []
    for label, items in sorted(by_label.items()):
        pictures = [
            _picture(item, result.maps[item.position, item.phrase_index], pixels(item.position))
            for item in items
        ]
        count = result.results.row("cnr", label).n
        strips.append(
            html.Strip(title=label, note=f"{len(items)} of {count:,}, random", pictures=pictures)
        )
    return html.Pictures(
        title="Heatmaps of phrases",
        strips=strips,
        caption="Color starts at the mean of a map and is full at its maximum, or at twice the "
        "mean above the lowest "
        "value if that is higher; the values are below each picture. The ring is at the "
        "maximum, the point that the "
        "pointing game uses. The boxes are those of the data set. Darkened pixels are outside "
        "of the model's crop.",
    )


def _picture(
    item: GroundedPhrase, map_HW: NDArray[np.float32], pixels: NDArray[np.uint8]
) -> html.Picture:
    values = item.metrics
    pointing = values["pointing_game"]
    hit = "left out" if np.isnan(pointing) else f"maximum inside: {_share(pointing)}"
    text = f"{hit}, CNR {values['signed_cnr']:+.2f}, IoU {values['miou']:.2f}"
    boxes = stored_boxes(item.phrase, item.sample, map_HW.shape)
    seen = map_HW[np.isfinite(map_HW)]
    start, full = (float(seen.min()) + end for end in color_ends(seen - seen.min()))
    return html.Picture(
        source=html.thumbnail_uri(draw_grounding(pixels, map_HW, boxes), _SIDE),
        alternative=f"heat map of the phrase “{item.phrase.text}” ({item.phrase.label}), "
        f"{_place(map_HW)}, with "
        f"{len(boxes)} boxes of the data set; {text}",
        lines=[item.phrase.text, text],
        scale=html.ColorScale(low=f"{start:.2f}", high=f"{full:.2f}"),
    )


def _place(map_HW: NDArray[np.floating]) -> str:
    """Return the position of a map's maximum in words, for screen readers."""
    row, column = np.unravel_index(np.nanargmax(map_HW), map_HW.shape)
    down = row / map_HW.shape[0]
    across = column / map_HW.shape[1]
    return f"highest {across:.0%} from the left and {down:.0%} from the top"


def _share(value: float) -> str:
    return {0.0: "no", 1.0: "yes"}.get(value, f"{value:.0%}")


def draw_grounding(
    pixels: NDArray[np.uint8], map_HW: NDArray[np.floating], boxes: Sequence[Box], side: int = _SIDE
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with a longer side of `side` pixels, the heatmap, its peak and the
    boxes' outlines.

    Args:
        pixels: (H, W) or (H, W, 3).
        map_HW: map of the same size; NaN pixels (outside of the model's crop) are darkened.
        boxes: in pixels of the image.
        side: longer side of the picture.
    """
    import cv2

    height, width = map_HW.shape
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    seen_HW = np.isfinite(map_HW)
    filled_HW = np.where(seen_HW, map_HW, map_HW[seen_HW].min()) - map_HW[seen_HW].min()
    heat_HW = cv2.resize(filled_HW.astype(np.float32), size, interpolation=cv2.INTER_LINEAR)
    shown_HW1 = cv2.resize(seen_HW.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)[
        :, :, None
    ]
    drawn_HWC = draw_map(image.astype(np.uint8), heat_HW, Box(0, 0, *heat_HW.shape)) * (
        _UNSEEN + (1 - _UNSEEN) * shown_HW1
    )
    drawn_HWC = np.ascontiguousarray(drawn_HWC.round().astype(np.uint8))
    row, column = np.unravel_index(np.nanargmax(map_HW), map_HW.shape)
    drawn_HWC = mark_peak(drawn_HWC, int((row + 0.5) * scale), int((column + 0.5) * scale))
    for box in boxes:
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        left, top, right, bottom = (round(corner * scale) for corner in corners)
        cv2.rectangle(drawn_HWC, (left, top), (right - 1, bottom - 1), _BOX, 2, cv2.LINE_AA)
    return np.asarray(drawn_HWC)


_NOT_METRICS = frozenset({"key", "phrase", "patient", "subgroups", "label"})
"""Fields of a line that are not metrics."""


@register_evaluation("grounding")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grounding(ModelEvaluation):
    """Evaluate phrase grounding: contrast-to-noise ratio, pointing game and overlap with the boxes
    of each phrase; or boxes for phrases that have none, one or several.

    The checkpoint is a dual-encoder; the shards have phrases (ms-cxr), sentences (padchest-gr),
    regions (chest-imagenome) or boxes (rsna, vindr-cxr, chestxdet10, ...).
    """

    protocols = (PROTOCOL, GENERALIZED)
    lines = LineFields(item=("key", "phrase"))
    fits = (DualEncoder,)
    advice = "give the checkpoint of a dual-encoder"
    shared = SmallBatchOptions
    tasks = (
        Task(
            fits=DualEncoder,
            needs=("phrases",),
            data="phrases",
            columns=(
                Column(title="pointing game", metric="pointing_game", targets=("overall",)),
                Column(title="CNR", metric="cnr", targets=("overall",)),
            ),
        ),
    )

    protocol: Literal["medvl", "biovil", "maco", "generalized"] = "medvl"
    """settings by name. biovil: similarity smoothed by 1.5 cells, thresholds on the cosines,
    removed pixels left out, absolute contrast; maco: the same with maps scaled to -1..1 and signed
    contrast; medvl: the defaults of the next four, which only it can be combined with;
    generalized: boxes from heat maps, also for phrases without any, with maps, smoothing, valid and
    scores
    """
    valid: Path | None = None
    """shards of other patients with phrases: generalized grounding chooses its thresholds on them,
    and the mean place of their boxes is a baseline of every protocol
    """
    scores: Literal["pair", "peak"] = "pair"
    """score of a box in generalized grounding: similarity of image and phrase, or highest value of
    the map in the box
    """
    maps: Literal["attention", "similarity"] | None = None
    """attention of words to regions, or similarity of the phrase with patches; default: the model's
    own
    """
    unseen: Literal["background", "drop"] | None = None
    """pixels that the center crop removed: background (a finding there counts as missed; default),
    or left out
    """
    scale: Literal["unit", "signed", "none"] | None = None
    """range to which each map is scaled before thresholds: 0..1 (default), -1..1, or none"""
    smoothing: float | None = None
    """Gaussian smoothing of similarity maps, in cells of the grid; default none"""
    examples: int = 4
    """images on the page for each finding"""

    @property
    def folder_name(self) -> str:
        return GENERALIZED if self.protocol == "generalized" else super().folder_name

    def evaluate(
        self, model: DualEncoder, source: ShardSource, setup: Setup
    ) -> GroundingResult | GeneralizedResult:
        """Return the metrics of the phrases.

        Raises ConfigError for generalized grounding without validation shards.
        """
        if self.protocol == "generalized":
            return self._evaluate_boxes(model, source, setup)
        rules = None
        if self.unseen or self.scale:
            rules = MapRules(unseen=self.unseen or "background", scale=self.scale or "unit")
        return phrase_grounding(
            model,
            setup.loader(source, model),
            protocol=self.protocol,
            maps=self.maps,
            rules=rules,
            smoothing=self.smoothing,
            resamples=setup.resamples,
            keep_maps=self.examples,
            valid=None if self.valid is None else setup.source(self.valid, self.checkpoint),
            checkpoint=self.checkpoint,
        )

    def _evaluate_boxes(
        self, model: DualEncoder, source: ShardSource, setup: Setup
    ) -> GeneralizedResult:
        valid_loader = setup.valid_loader(self.valid, model, self.checkpoint)
        if valid_loader is None:
            message = "generalized grounding chooses thresholds: give shards as valid"
            raise ConfigError(message, "missing", field="valid")
        if self.unseen or self.scale:
            field = "unseen" if self.unseen else "scale"
            message = f"protocol 'generalized' sets {field}: leave it out"
            raise ConfigError(message, "conflict", field=field)
        return generalized_grounding(
            model,
            setup.loader(source, model),
            valid_loader,
            maps=self.maps,
            smoothing=self.smoothing or 0.0,
            scores=self.scores,
            resamples=setup.resamples,
            checkpoint=self.checkpoint,
        )

    def table(self, result: GroundingResult | GeneralizedResult) -> str:
        """Return the table without the overlap at single thresholds."""
        rows = [row for row in result.results.rows if not row.metric.startswith("iou@")]
        return format_table(rows)

    def page(
        self, result: GroundingResult | GeneralizedResult, source: ShardSource
    ) -> WritePage | None:
        if isinstance(result, GeneralizedResult):
            return super().page(result, source)
        return functools.partial(write_grounding_page, result, pixels=source.pixels)

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the mean of each metric over the phrases, and by finding; of generalized
        grounding, its own.
        """
        if results.protocol == GENERALIZED:
            return groups_of_lines(lines, results)
        labels = [line["label"] for line in lines]
        return [
            label_mean_metrics(field, np.array([number(line[field]) for line in lines]), labels)
            for field in lines[0]
            if field not in _NOT_METRICS
        ]

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Grounding":
        """Return the evaluation by smoothed similarity; of systems whose patches and texts have no
        common space, by the attention of their decoder.
        """
        if issubclass(trial.system, MedKLIP | KAD | MAVL):
            return cls(checkpoint=trial.checkpoint, data=trial.data, maps="attention")
        return cls(
            checkpoint=trial.checkpoint,
            data=trial.data,
            maps="similarity",
            smoothing=trial.settings.smoothing,
        )
