"""`medvl eval zero-shot`, and its page: tables, curves, subgroups, images with extreme scores."""

import dataclasses
import functools
from pathlib import Path

from medvl.eval.classification.evaluation import LIMITS, facts, headlines, sections, subtitle
from medvl.eval.classification.scored_images import (
    MeanOptions,
)
from medvl.eval.core.open import SLICES, OutputOptions, Setup, load_ensemble, shown_pixels
from medvl.eval.core.results import OutputFolder, PageHeader, classes_of_lines
from medvl.eval.evaluation import MEAN, Column, Evaluation, Outcome, Task, Trial
from medvl.eval.html.page import Page, Pixels, hashed, write_page
from medvl.eval.registry import register_evaluation
from medvl.eval.zero_shot_classification.prompts import (
    default_prompts,
    load_prompts,
)
from medvl.eval.zero_shot_classification.protocol import (
    PROTOCOL,
    ZeroShotResult,
    common_classes,
    zero_shot,
)
from medvl.models.dual_encoders.bases.base import DualEncoder


def write_zero_shot_page(
    result: ZeroShotResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 3,
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `zero_shot`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels: function from position to image, such as `loader.source.pixels`; None for no images.
        examples: images of each kind per finding.
    """
    page = Page(
        title=f"Zero-shot findings: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=headlines(result),
        facts=facts(result, header, extra=_prompt_facts(result)),
        sections=sections(result, pixels, examples),
        limits=LIMITS,
        findings=result.images.names,
    )
    return write_page(page, path)


def _prompt_facts(result: ZeroShotResult) -> list[tuple[str, str]]:
    prompts = result.prompts
    results = result.results
    return [
        (
            "Prompts",
            hashed(f"{prompts.name}, version {prompts.version}", results.inputs.get("prompts")),
        ),
        ("Score", _scoring(prompts.scoring, prompts.temperature, prompts.ensemble)),
    ]


def _scoring(scoring: str, temperature: float, ensemble: str) -> str:
    rule = {
        "pair_softmax": f"softmax of positive and negative similarity, temperature {temperature:g}",
        "class_softmax": f"softmax over the classes, temperature {temperature:g}",
        "margin": "positive minus negative similarity",
        "positive": "positive similarity",
        "gloria_best_word": "GLoRIA's similarity by the best word, standardised over these images",
        "gloria_published": "GLoRIA's published similarity, which counts characters as words, "
        "standardised over these "
        "images",
    }[scoring]
    return f"{rule}; sentences by {ensemble.replace('_', ' ')}"


@register_evaluation("zero-shot")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShot(Evaluation):
    """Evaluate zero-shot classification on a folder of shards, with intervals and a page."""

    protocols = (PROTOCOL,)
    divides_batches = True
    scored_classes = staticmethod(classes_of_lines)
    tasks = (
        Task(
            fits=DualEncoder,
            columns=(Column(title="zero-shot AUROC", metric="auroc", targets=MEAN),),
        ),
    )

    checkpoint: tuple[Path, ...]
    """folder of a checkpoint, such as runs/convirt/best; the scores of several are averaged
    (ensemble)
    """
    data: Path
    """folder of shards with labels, of patients that the model was not trained on"""
    valid: Path | None = None
    """folder of shards of other patients, on which thresholds are chosen; without it, no yes/no
    metrics
    """
    prompts: str | None = None
    """name of a prompt set (`medvl list prompts`) or path of a JSON file of your own, of the format
    in docs/pages/guides/evaluation.md; default chexpert_ensemble, and statements for systems that
    are trained on statements (RadZero, CARZero, MedKLIP, KAD, MAVL)
    """
    labels: tuple[str, ...] = ()
    """findings to evaluate; default all that have prompts and are labels of the shards"""
    label: MeanOptions = dataclasses.field(default_factory=MeanOptions)
    """labels, thresholds and means"""
    slices: int = SLICES
    """axial slices of each volume that a model of images reads; their vectors are averaged"""
    by_scan: bool = False
    """average the scores of a scan's reconstructions, so that each scan counts once"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the first checkpoint."""
        alone = len(self.checkpoint) == 1
        task = "zero_shot" if alone else "zero_shot_ensemble"
        return options.folder(self.checkpoint[0], task, hashed=alone)

    def run(self, setup: Setup) -> Outcome:
        """Open the prompts, the data and then the models, and evaluate."""
        prompts = None if self.prompts is None else load_prompts(self.prompts)
        source = setup.source(self.data, *self.checkpoint)
        if prompts is not None:
            # errors of prompts and data come before the models are loaded
            common_classes(prompts.for_labels(source.label_names, self.labels), source)
        setup.settle(manifest=source.fingerprint)
        models = load_ensemble(self.checkpoint, setup.options.device)
        result = zero_shot(
            models,
            setup.loader(source, models[0], slices=self.slices),
            prompts,
            labels=self.labels,
            valid_loader=setup.valid_loader(
                self.valid, models[0], *self.checkpoint, slices=self.slices
            ),
            policy=self.label.policy(),
            threshold_rule=self.label.threshold_rule,
            resamples=setup.resamples,
            smallest_class=self.label.smallest_class,
            by_scan=self.by_scan,
            checkpoint=self.checkpoint,
        )
        return Outcome(
            result=result,
            model=f"{models[0].name} ({', '.join(map(str, self.checkpoint))})",
            data=source.manifest,
            page=functools.partial(write_zero_shot_page, result, pixels=shown_pixels(source)),
            table=result.table(),
        )

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "ZeroShot":
        """Return the evaluation by the corpus's prompts, on whose classes systems that are trained
        on statements are evaluated by statements.
        """
        source = trial.labelled()
        prompts = trial.prompts
        labels = tuple[str, ...]()
        if default_prompts(trial.system) == "statements" and not prompts.endswith(".json"):
            of_corpus = load_prompts(prompts).for_labels(source.label_names)
            labels = common_classes(of_corpus, source)
            prompts = "statements"
        return cls(checkpoint=(trial.checkpoint,), data=trial.data, prompts=prompts, labels=labels)
