"""Result of the evaluation of generated images: metric rows, and the data of the page."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import Results, format_table, format_value
from medvl.eval.generation.alignment import Aligned
from medvl.eval.generation.fidelity import ALL
from medvl.eval.generation.finding_classifier import FindingClassifier
from medvl.eval.generation.findings import stated_labels
from medvl.eval.generation.inputs import ImageSet
from medvl.eval.generation.memorisation import SPACES, Memorisation, describe_copies

RECONSTRUCTED = "reconstructed"
IMAGES_OF = "images, "
"""Prefix of a folder's name in the inputs, for the hash of its images."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageSets:
    """Images that are compared."""

    generated: Sequence[ImageSet]
    """The folders, the main one first."""
    tested: ImageSet
    """All real test images."""
    real: ImageSet | None
    """Real images of the prompts of the main folder."""
    rebuilt: ImageSet | None
    """Reconstructed images."""

    @property
    def prompted(self) -> list[ImageSet]:
        """Sets with prompts."""
        return [*self.generated, *(each for each in (self.real, self.rebuilt) if each is not None)]

    @property
    def not_real(self) -> list[ImageSet]:
        """Sets that are compared with the real test images."""
        return [*self.generated, *([] if self.rebuilt is None else [self.rebuilt])]


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationResult:
    """Results, with the images, scores and nearest training images that the page shows."""

    results: Results
    sets: ImageSets
    classifier: FindingClassifier
    memorisation: Memorisation
    aligned: Mapping[str, Aligned]
    """Alignment by name of the set."""
    train_source: Any
    """All training images."""

    @property
    def generated(self) -> Sequence[ImageSet]:
        """The folders, the main one first."""
        return self.sets.generated

    @property
    def main(self) -> ImageSet:
        """The first folder."""
        return self.sets.generated[0]

    def row(self, metric: str, target: str, subgroup: str | None = None) -> MetricRow | None:
        """Return a row of a set, by default the main folder; None if there is none."""
        wanted = (metric, target, self.main.name if subgroup is None else subgroup)
        return next((row for row in self.results.rows if (row.metric, row.target, row.subgroup) == wanted), None)

    def table(self) -> str:
        """Return the means of all sets as plain text."""
        mean, negated = (
            "macro" if self.row(metric, "macro_competition") is None else "macro_competition"
            for metric in ("auroc", "negation_auroc")
        )
        shown = {
            ("auroc", mean): "prompted findings, AUROC",
            ("negation_auroc", negated): "asserted/negated, AUROC",
            ("side_auroc", "macro"): "left/right, AUROC",
            ("kernel_distance", ALL): "kernel distance",
            **{(metric, ALL): metric.replace("_", " ") for metric in ("frechet_distance", "precision", "recall")},
            **{(metric, ALL): metric for metric in ("density", "coverage")},
            ("ms_ssim", "same text"): "MS-SSIM within a prompt",
            **{
                ("recall@5", row.target): f"recall@5 of {row.target}" for row in self.results.rows if "@5" in row.metric
            },
            **{("too_near", space): f"too near to training, {space}" for space in SPACES},
        }
        used = [row for row in self.results.rows if row.metric.startswith("use_auroc@")]
        parts = [shown, {(row.metric, mean): row.metric.replace("_", " ") for row in used if row.target == mean}]
        tables = [self._by_set(part) for part in parts if part]
        return "\n\n".join([*tables, self._note(), *describe_copies(self.results.rows)])

    def _by_set(self, shown: Mapping[tuple[str, str], str]) -> str:
        """Return a table with a line for each (metric, target), under other names, and a column for each set."""
        named = [(shown.get((row.metric, row.target)), row) for row in self.results.rows]
        lines = [dataclasses.replace(row, target=name, metric=row.subgroup, subgroup="") for name, row in named if name]
        order = list(shown.values())
        return format_table(sorted(lines, key=lambda row: order.index(row.target)))

    def _note(self) -> str:
        """Return the features of the distances, and the distance of real images from other real ones."""
        config, inputs, dim = self.results.config, self.results.inputs, self.results.details["feature_dim"]
        halves = next(row for row in self.results.rows if row.metric == "frechet_distance" and row.subgroup == "real")
        return (
            f"Distances are of {dim} features of {config['features']} (sha256 {str(inputs['features'])[:12]}).\n"
            f"Frechet distance of real test images from other real ones at {halves.target}: {format_value(halves)}.\n"
            "It is biased upwards, more for fewer images: compare at equal numbers, on the page."
        )

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one line per generated image: its prompt's key and findings, scores, the nearest training images."""
        policy, names = LabelPolicy(**self.results.config["policy"]), self.classifier.names
        for images in self.generated:
            stated_NL = stated_labels(images, names, policy).tolist()
            logits_NL, near = self.classifier.logits(images.scored.x_ND), self.memorisation.too_near(images.name)
            nearest, aligned = self.memorisation.sets[images.name], self.aligned.get(images.name)
            for row, position in enumerate(images.scored.positions):
                source = images.source.images.rows[position]
                yield {
                    "set": images.name,
                    "folder": str(images.source.folder),
                    "file": source.file,
                    "prompt_key": source.prompt_key,
                    "patient": images.patients[row],
                    "guidance": source.guidance,
                    "seed": source.seed,
                    "stated": dict(zip(names, stated_NL[row], strict=True)),
                    "logits": dict(zip(names, logits_NL[row].tolist(), strict=True)),
                    "nearest": {
                        space: self.train_source.sample(int(places[row])).key
                        for space, places in nearest.position.items()
                    },
                    "distance": {space: float(nearest.distance[space][row]) for space in SPACES},
                    "too_near": [space for space in SPACES if near[space][row]],
                    **({} if aligned is None else {"alignment": float(aligned.own_N[row])}),
                }
