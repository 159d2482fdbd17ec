"""`medvl eval generation`: generated images against real ones."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from medvl.data.images.generated import GeneratedImages
from medvl.errors import ConfigError
from medvl.eval.classification.scored_images import LabelOptions
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.open import OutputOptions, RunOptions, Setup, resolve_device
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    Results,
    at_items,
    checkpoint_sha256,
    number_table,
)
from medvl.eval.evaluation import Evaluation, Outcome
from medvl.eval.generation.fidelity import FidelityOptions
from medvl.eval.generation.findings import (
    Resampling,
    check_separate,
    classifier_of,
    findings_metrics,
)
from medvl.eval.generation.inputs import LoaderOptions, RealData
from medvl.eval.generation.page import write_generation_page
from medvl.eval.generation.protocol import (
    PROTOCOL,
    GenerationModels,
    GenerationOptions,
    evaluate_generation,
)
from medvl.eval.generation.training_images import SPACES, UseOptions, too_near_metrics
from medvl.eval.probing.features import ProbedEncoder
from medvl.eval.registry import register_evaluation
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import ConventionsName


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Models of the evaluation; none may have been trained on a test patient."""

    classifier: Path
    """checkpoint of a fine-tuned classifier of findings, or any system, whose image encoder gets
    a linear probe
    """
    features: Path | None = None
    """folder of the checkpoint whose image encoder makes the features of the distances; default
    --classifier
    """
    encoder: str | None = None
    """name of an image encoder for these features, in place of --features"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default
    the published ones
    """
    aligner: Path | None = None
    """folder of the checkpoint of a dual-encoder that was trained apart from the generator, for
    the alignment
    """
    generator: Path | None = None
    """folder of the generator's checkpoint, to compare its text encoder with that of --aligner"""

    def checkpoints(self) -> list[Path]:
        """Return the folders that are given."""
        given = (self.classifier, self.features, self.aligner, self.generator)
        return [folder for folder in given if folder is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Settings of the distances and of the use as training data."""

    fit: Literal["crop", "pad", "squash"] | None = None
    """how the generator's training images were made square; default as the generator, or crop"""
    views: tuple[str, ...] = ()
    """keep only real images of these views, such as PA AP; copies are searched for in all
    training images
    """
    k: int = 5
    """neighbours of precision, recall, density and coverage"""
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)
    """fractions of the real training patients, with --synthetic-train"""
    seeds: int = 5
    """random subsets per fraction below 1"""
    pixel_size: int = 64
    """side of the squares whose pixels are compared with the training images"""
    cache: Path | None = None
    """folder of cached features; default `features` beside the output folder"""
    conventions: ConventionsName = "chexpert"
    """what the labeler takes as present and as uncertain in a prompt"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Generated images, and real shards."""

    generated: tuple[Path, ...]
    """folders of medvl generate, one for each guidance; the first is the main one. Choose the
    guidance on prompts of validation patients.
    """
    train: tuple[Path, ...]
    """folders of shards with all training images of the generator; the classifier is trained on
    them too
    """
    test: Path
    """folder of shards of other patients, with the real images of the prompts"""
    valid: Path | None = None
    """folder of shards of further patients, on which the classifier's penalty is chosen; by
    default, it is chosen on a tenth of the training patients, which the classifier is then not
    trained on
    """
    reconstructed: Path | None = None
    """folder of the real images of the prompts after the generator's autoencoder (medvl generate
    --reconstruct)
    """
    synthetic_train: Path | None = None
    """folder of images generated from training texts, to train classifiers with"""


@register_evaluation("generation")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation(Evaluation):
    """Evaluate generated images: findings, fidelity, diversity, alignment, memorisation and use,
    with a page.
    """

    # No task of `medvl benchmark`: it compares folders of images that were generated before, by
    # judges that are chosen for it, and not the checkpoint of a training.
    protocols = (PROTOCOL,)
    lines = LineFields(item=("set", "file"), needs=("set", "stated"))

    images: ImageOptions
    """generated images, and real shards"""
    models: JudgeOptions
    """models of the evaluation"""
    comparison: ComparisonOptions = dataclasses.field(default_factory=ComparisonOptions)
    """distances and use as training data"""
    label: LabelOptions = dataclasses.field(default_factory=LabelOptions)
    """labels and thresholds"""
    examples: int = 4
    """examples of each kind on the page"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the main generated images."""
        if not self.images.generated:
            message = "give one folder of --generated, or several"
            raise ConfigError(message, "missing", field="generated")
        main = self.images.generated[0]
        evaluated: dict[str, Callable[[], str | None]] = {
            "generator": lambda: GeneratedImages.open(main).generation.generator,
            "checkpoint": functools.partial(checkpoint_sha256, self.models.classifier),
        }
        folder = options.out or main.with_name(f"{main.name}-eval")
        return OutputFolder(folder, evaluated, replace=options.replace)

    def run(self, setup: Setup) -> Outcome:
        """Open the images and the models, and evaluate."""
        assert isinstance(setup.options, RunOptions)
        opened = [GeneratedImages.open(folder) for folder in self.images.generated]
        reconstructed, synthetic = (
            None if folder is None else GeneratedImages.open(folder)
            for folder in (self.images.reconstructed, self.images.synthetic_train)
        )
        real = RealData.open(
            self.images.train,
            self.images.valid,
            self.images.test,
            folders=[*opened, *(each for each in (reconstructed, synthetic) if each is not None)],
            fit=self.comparison.fit,
            views=self.comparison.views,
            checkpoints=self.models.checkpoints(),
        )
        models, details = self._models(opened[0], setup)
        setup.settle(manifest=real.test.fingerprint)
        result = evaluate_generation(
            opened,
            real,
            models,
            reconstructed=reconstructed,
            synthetic_train=synthetic,
            options=GenerationOptions(
                policy=self.label.policy(),
                fidelity=FidelityOptions(k=self.comparison.k),
                use=UseOptions(fractions=self.comparison.fractions, seeds=self.comparison.seeds),
                resampling=Resampling(resamples=setup.resamples),
                pixel_size=self.comparison.pixel_size,
                conventions=self.comparison.conventions,
            ),
            loading=LoaderOptions(
                batch=setup.options.batch,
                workers=setup.options.workers,
                cache=self.comparison.cache or setup.features,
            ),
            inputs={
                "checkpoint": checkpoint_sha256(self.models.classifier),
                "aligner": None
                if self.models.aligner is None
                else checkpoint_sha256(self.models.aligner),
            },
            details=details,
        )
        return Outcome(
            result=result,
            model=f"{opened[0].generation.system} ({self.images.generated[0]})",
            data=str(self.images.test),
            page=functools.partial(write_generation_page, result, examples=self.examples),
            table=result.table(),
        )

    def _models(
        self, images: GeneratedImages, setup: Setup
    ) -> tuple[GenerationModels, dict[str, Any]]:
        """Return the models, and facts about them for the results."""
        if self.models.features is not None and self.models.encoder is not None:
            message = "give --features or --encoder, not both"
            raise ConfigError(message, "conflict", field="features")
        model = setup.model(self.models.classifier)
        encoder = ProbedEncoder.from_model(model, name=f"{model.name} ({self.models.classifier})")
        features = None
        if self.models.features is not None:
            other = setup.model(self.models.features)
            features = ProbedEncoder.from_model(
                other, name=f"{other.name} ({self.models.features})"
            )
        elif self.models.encoder is not None:
            pretrained = self.models.image_weights or True
            features = ProbedEncoder.from_name(self.models.encoder, pretrained=pretrained)
            features.module.to(resolve_device(setup.options.device))
        models = GenerationModels(judge=encoder, classifier=classifier_of(model), features=features)
        if self.models.aligner is None:
            return models, {}
        shared = self._check_aligner(self.models.aligner, images)
        advice = "give the checkpoint of a dual-encoder"
        aligner = setup.model(self.models.aligner, (DualEncoder,), advice, field="aligner")
        return dataclasses.replace(models, aligner=aligner), {"aligner_text_weights_shared": shared}

    def _check_aligner(self, aligner: Path, images: GeneratedImages) -> float:
        """Return the share of the text weights that the aligner has in common with the generator of
        the images.
        """
        if self.models.generator is None:
            message = (
                "--aligner needs --generator, the checkpoint whose text encoder must be another one"
            )
            raise ConfigError(message, "missing", field="generator")
        if checkpoint_sha256(self.models.generator) != images.generation.generator:
            message = (
                f"{self.models.generator} is not the generator of {images.folder}; give the one "
                f"that made the images"
            )
            raise ConfigError(message, "mismatch", field="generator")
        return check_separate(aligner, self.models.generator)

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the AUROC of the prompted findings and the share of possible copies, for each
        folder of images.
        """
        names = list(lines[0]["logits"])
        stated_NL, logits_NL = (number_table(lines, field, names) for field in ("stated", "logits"))
        near_NK = np.array([[space in line["too_near"] for space in SPACES] for line in lines])
        set_N = np.array([line["set"] for line in lines])
        like = stated_NL[set_N == next(iter(results.details["images"]))]
        groups = []
        for name in dict.fromkeys(set_N.tolist()):
            rows_N = np.flatnonzero(set_N == name)
            findings = findings_metrics(
                logits_NL[rows_N], stated_NL[rows_N], names, like=like, name=name
            )
            copies = too_near_metrics(near_NK[rows_N], name)
            groups += [at_items(group, rows_N) for group in (findings, copies)]
        return groups
