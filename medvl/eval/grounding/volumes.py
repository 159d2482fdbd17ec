"""Heat maps of findings in volumes, against their boxes.

Protocol "volume_grounding", version 1:

* An item is a volume and one of its findings with boxes in `Sample.extra`: {"boxes_mm": [{"label":
  "Lung nodule", "center": [z, y, x], "size": [z, y, x]}]}, in millimetres from the middle of the
  stored volume, z to the head, y to the back, x to the patient's left. The region is the union of
  the finding's boxes. Findings outside of the model's cut are left out and counted.
* The value of a patch is its similarity with the positive prompts of the finding minus that with
  the negative ones, each a mean over sentences; without prompts, the similarity with "There is
  FINDING.". Patches are those of the model's `embed_regions`; of fVLM, the shares of patches in
  the similarity, of which those outside of the organs that the prompts name get the lowest. Voxels
  have the values of their patches, interpolated linearly.
* "voxel_auroc" is the probability that a voxel inside is above one outside; a random map has 0.5.
  "signed_cnr" and "pointing_game" are those of `medvl eval grounding`; the chance of the latter is
  the share of voxels inside, `details["chance"]`.
* "overall" is the mean over items, "macro" the mean over findings of their means. Intervals:
  patients are resampled with all their items.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from medvl.common.untrusted import parse_json
from medvl.data.loading.readers import organ_box_of
from medvl.data.reports.statements import statement
from medvl.data.shards.source import ShardSource
from medvl.data.volumes.transform import VolumeTransform, stored_shape
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, label_mean_metrics
from medvl.eval.core.open import Setup, SmallBatchOptions
from medvl.eval.core.results import LineFields, Lines, Results, number
from medvl.eval.evaluation import LineResult, ModelEvaluation
from medvl.eval.grounding.heatmaps import MapRules, VolumeMaps, map_metrics
from medvl.eval.registry import register_evaluation
from medvl.eval.zero_shot_classification.prompts import ClassPrompts, load_prompts
from medvl.models.base import evaluating
from medvl.models.volumes.base import VolumeDualEncoder
from medvl.schema import Sample

PROTOCOL = "volume_grounding"
PROTOCOL_VERSION = 1
METRICS = ("voxel_auroc", "signed_cnr", "pointing_game")


@dataclasses.dataclass(frozen=True, slots=True)
class VolumeBox:
    """Box of a finding, in millimetres from the middle of the stored volume along (z, y, x)."""

    label: str
    center: tuple[float, float, float]
    size: tuple[float, float, float]


def read_volume_boxes(sample: Sample) -> list[VolumeBox]:
    """Return the boxes of a sample; tables in CSV have them as JSON text.

    Raises EvaluationError ("malformed") naming the sample.
    """
    listed: Any = sample.extra.get("boxes_mm") or []
    try:
        boxes = parse_json(listed) if isinstance(listed, str) else listed
        return [
            VolumeBox(str(box["label"]), _numbers(box["center"]), _numbers(box["size"]))
            for box in boxes
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(
            f'sample {sample.key}: expected boxes_mm as [{{"label": TEXT, "center": [z, y, x], '
            f'"size": [z, y, x]}}] ({type(error).__name__})',
            "malformed",
            field="boxes_mm",
        ) from None


def _numbers(values: Any) -> tuple[float, float, float]:
    z, y, x = map(float, values)
    if not all(map(math.isfinite, (z, y, x))):
        raise ValueError("a number that is not finite")
    return z, y, x


def box_mask(
    boxes: Sequence[VolumeBox], sample: Sample, transform: VolumeTransform
) -> NDArray[np.bool_]:
    """Return (D, H, W) of the model's input: True for voxels whose centre is inside one of the
    boxes.

    A box without any centre gets the voxel at its own, if the cut has it.
    """
    shape = stored_shape(sample.extra)
    spacing = _numbers(sample.extra["spacing_mm"])
    cut = transform.cut(shape, box=organ_box_of(sample, shape) if transform.organs else None)
    inside_DHW = np.zeros(transform.size, np.bool_)
    for box in boxes:
        slices = []
        for axis, side in enumerate(transform.size):
            moved = cut.target[axis].start - cut.source[axis].start
            middle = shape[axis] / 2 + box.center[axis] / spacing[axis] + moved
            half = box.size[axis] / (2 * spacing[axis])
            first, last = math.ceil(middle - half - 0.5), math.ceil(middle + half - 0.5)
            if last <= first:
                first = math.floor(middle)
                last = first + 1
            slices.append(slice(min(max(first, 0), side), min(max(last, 0), side)))
        inside_DHW[tuple(slices)] = True
    return inside_DHW


def voxel_auroc(map_DHW: NDArray[np.floating], inside_DHW: NDArray[np.bool_]) -> float:
    """Return the probability that a voxel inside has a higher value than one outside; ties count
    half. NaN where all voxels are inside.
    """
    count = int(inside_DHW.sum())
    others = inside_DHW.size - count
    if not count or not others:
        return math.nan
    ranks = rankdata(map_DHW.ravel())[inside_DHW.ravel()]
    return float((ranks.sum() - count * (count + 1) / 2) / (count * others))


@register_evaluation("volume-grounding")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeGrounding(ModelEvaluation):
    """Evaluate heat maps of findings in volumes against their boxes: AUROC of voxels, contrast and
    pointing game.

    The checkpoint is a dual-encoder of volumes; the shards have `boxes_mm` (`medvl phantom volumes`
    with `medvl shards volumes --extra-column boxes_mm`).
    """

    protocols = (PROTOCOL,)
    lines = LineFields(item=("key", "label"))
    fits = (VolumeDualEncoder,)
    advice = "give the checkpoint of a dual-encoder of volumes"
    title = "Heat maps in volumes"
    shared = SmallBatchOptions

    prompts: str | None = None
    """name of a prompt set (`medvl list prompts`) or path of a JSON file; default "There is
    FINDING." for each finding with boxes
    """

    def evaluate(self, model: VolumeDualEncoder, source: ShardSource, setup: Setup) -> LineResult:
        """Return the metrics of the findings with boxes."""
        samples = {}
        for position in range(len(source)):
            sample = source.sample(position)
            samples[sample.key] = (sample, read_volume_boxes(sample))
        findings = sorted({box.label for _, boxes in samples.values() for box in boxes})
        prompts = self._prompts(findings)
        batches = FullPass(setup.loader(source, model))
        lines: list[dict[str, Any]] = []
        with evaluating(model):
            maps = VolumeMaps(model, prompts)
            for batch in batches:
                volumes = [each.to(model.device, non_blocking=True) for each in batch.embedded]
                patches = maps.patches(*volumes)
                for key, patches_dhwE in zip(batch.keys, patches, strict=True):
                    sample, boxes = samples[key]
                    known = [box for box in boxes if box.label in prompts]
                    lines += self._lines(maps, patches_dhwE, sample, known, model.transform)
        if not lines:
            raise EvaluationError(
                "no sample has boxes of a finding with prompts (boxes_mm); give annotated shards",
                "empty",
                field="data",
            )
        result = self.score_lines(
            lines, setup, source, version=PROTOCOL_VERSION, config={"prompts": self.prompts}
        )
        return _with_chance(result)

    def _prompts(self, findings: Sequence[str]) -> dict[str, ClassPrompts]:
        """Return the sentences of each finding."""
        if self.prompts is None:
            return {name: ClassPrompts((statement(name),)) for name in findings}
        own = load_prompts(self.prompts).for_labels(findings)
        return {label: own.classes[name] for name, label in own.labels_of(findings).items()}

    @staticmethod
    def _lines(
        maps: VolumeMaps,
        patches_dhwE: Tensor,
        sample: Sample,
        boxes: Sequence[VolumeBox],
        transform: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield the line of each finding of a volume."""
        names = sorted({box.label for box in boxes})
        if not names:
            return
        map_Ldhw = maps.values(patches_dhwE, names)
        map_LDHW = F.interpolate(map_Ldhw[None], transform.size, mode="trilinear")[0].cpu().numpy()
        for name, map_DHW in zip(names, map_LDHW, strict=True):
            inside = box_mask([box for box in boxes if box.label == name], sample, transform)
            if not np.isfinite(map_DHW).all():
                raise EvaluationError(
                    "the model's maps are not finite: check its weights", "nonfinite"
                )
            values = dict.fromkeys(METRICS, math.nan)
            if inside.any():
                values = {"voxel_auroc": voxel_auroc(map_DHW, inside)}
                values |= map_metrics(map_DHW, inside, MapRules())
            yield {
                "key": sample.key,
                "patient": sample.patient,
                "label": name,
                "box_share": float(inside.mean()),
                **{metric: values[metric] for metric in METRICS},
            }

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the mean of each metric over the findings' maps, and by finding."""
        labels = [line["label"] for line in lines]
        return [
            label_mean_metrics(field, np.array([number(line[field]) for line in lines]), labels)
            for field in METRICS
        ]

    def main_rows(self, results: Results) -> list[tuple[str, MetricRow]]:
        return [("AUROC of voxels", results.row("voxel_auroc", "overall"))]


def _with_chance(result: LineResult) -> LineResult:
    """Return the result with the share of voxels inside, by finding, and the items outside of the
    cut.
    """
    shares: dict[str, list[float]] = {"overall": []}
    for line in result.lines:
        for name in ("overall", line["label"]):
            shares.setdefault(name, []).append(line["box_share"])
    details = {
        "chance": {name: float(np.mean(values)) for name, values in sorted(shares.items())},
        "without_value": sum(not line["box_share"] for line in result.lines),
    }
    return LineResult(dataclasses.replace(result.results, details=details), result.lines)
