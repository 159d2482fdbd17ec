"""`medvl eval generation`: generated images against real ones."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.cli.eval.options import LabelOptions, OutputFolder, RunOptions, publish_result
from medvl.errors import ConfigError
from medvl.schema import ConventionsName

if TYPE_CHECKING:
    from medvl.data.images.generated import GeneratedImages
    from medvl.eval.generation.evaluate import GenerationModels


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Models of the evaluation; none may have been trained on a test patient."""

    classifier: Path
    """checkpoint of a fine-tuned classifier of findings, or any system, whose image encoder gets a linear probe"""
    features: Path | None = None
    """folder of the checkpoint whose image encoder makes the features of the distances; default --classifier"""
    encoder: str | None = None
    """name of an image encoder for these features, in place of --features"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default the published ones"""
    aligner: Path | None = None
    """folder of the checkpoint of a dual-encoder that was trained apart from the generator, for the alignment"""
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
    """keep only real images of these views, such as PA AP; copies are searched for in all training images"""
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
    """folders of medvl generate, one for each guidance; the first is the main one. Choose the guidance on prompts of
    validation patients."""
    train: tuple[Path, ...]
    """folders of shards with all training images of the generator; the classifier is trained on them too"""
    test: Path
    """folder of shards of other patients, with the real images of the prompts"""
    valid: Path | None = None
    """folder of shards of further patients, on which the classifier's penalty is chosen; by default, it is chosen on a
    tenth of the training patients, which the classifier is then not trained on"""
    reconstructed: Path | None = None
    """folder of the real images of the prompts after the generator's autoencoder (medvl generate --reconstruct)"""
    synthetic_train: Path | None = None
    """folder of images generated from training texts, to train classifiers with"""


def generation(
    images: ImageOptions,
    models: ModelOptions,
    comparison: ComparisonOptions,
    shared: RunOptions,
    label: LabelOptions,
    *,
    examples: int = 4,
) -> None:
    """Evaluate generated images: findings, fidelity, diversity, alignment, memorisation and use, with a page.

    Args:
        examples: examples of each kind on the page.
    """
    from medvl.data.images.generated import GeneratedImages
    from medvl.eval.generation.evaluate import evaluate_generation
    from medvl.eval.generation.inputs import LoaderOptions, RealData
    from medvl.eval.generation.page import write_generation_page

    if not images.generated:
        raise ConfigError("give one folder of --generated, or several", "missing", field="generated")
    opened = [GeneratedImages.open(folder) for folder in images.generated]
    reconstructed, synthetic = (
        None if folder is None else GeneratedImages.open(folder)
        for folder in (images.reconstructed, images.synthetic_train)
    )
    real = RealData.open(
        images.train,
        images.valid,
        images.test,
        folders=[*opened, *(each for each in (reconstructed, synthetic) if each is not None)],
        fit=comparison.fit,
        views=comparison.views,
        checkpoints=models.checkpoints(),
    )
    loaded, details = _models(models, opened[0], shared.device)
    path, hashes = shared.out or images.generated[0].with_name(f"{images.generated[0].name}-eval"), _hashes(models)
    evaluated = {"generator": lambda: opened[0].generation.generator, "checkpoint": lambda: hashes["checkpoint"]}
    output = OutputFolder(path, evaluated, replace=shared.replace)
    folder = output.settle(manifest=real.test.fingerprint)
    cache = comparison.cache or path.parent / "features"
    result = evaluate_generation(
        opened,
        real,
        loaded,
        reconstructed=reconstructed,
        synthetic_train=synthetic,
        options=_options(comparison, shared, label),
        loading=LoaderOptions(batch=shared.batch, workers=shared.workers, cache=cache),
        inputs=hashes,
        details=details,
    )
    page = functools.partial(write_generation_page, result, examples=examples)
    name = f"{opened[0].generation.system} ({images.generated[0]})"
    publish_result(result, folder, page, name, str(images.test), result.table(), options=shared)


def _models(options: ModelOptions, images: "GeneratedImages", device: str) -> "tuple[GenerationModels, dict[str, Any]]":
    """Return the models, and facts about them for the results."""
    from medvl.eval.core.open import load_model, resolve_device, unsupported_model
    from medvl.eval.generation.evaluate import GenerationModels
    from medvl.eval.generation.finding_classifier import classifier_of
    from medvl.eval.probing.features import ProbedEncoder
    from medvl.models.dual_encoders.bases.base import DualEncoder

    if options.features is not None and options.encoder is not None:
        raise ConfigError("give --features or --encoder, not both", "conflict", field="features")
    model = load_model(options.classifier, device)
    encoder, features = ProbedEncoder.from_model(model, name=f"{model.name} ({options.classifier})"), None
    if options.features is not None:
        other = load_model(options.features, device)
        features = ProbedEncoder.from_model(other, name=f"{other.name} ({options.features})")
    elif options.encoder is not None:
        features = ProbedEncoder.from_name(options.encoder, pretrained=options.image_weights or True)
        features.module.to(resolve_device(device))
    models = GenerationModels(judge=encoder, classifier=classifier_of(model), features=features)
    if options.aligner is None:
        return models, {}
    shared = _check_aligner(options.aligner, options.generator, images)
    aligner = load_model(options.aligner, device)
    if not isinstance(aligner, DualEncoder):
        raise unsupported_model(options.aligner, aligner, "give the checkpoint of a dual-encoder", field="aligner")
    return dataclasses.replace(models, aligner=aligner), {"aligner_text_weights_shared": shared}


def _check_aligner(aligner: Path, generator: Path | None, images: "GeneratedImages") -> float:
    """Return the share of the text weights that the aligner has in common with the generator of the images."""
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.generation.alignment import check_separate

    if generator is None:
        message = "--aligner needs --generator, the checkpoint whose text encoder must be another one"
        raise ConfigError(message, "missing", field="generator")
    if checkpoint_sha256(generator) != images.generation.generator:
        message = f"{generator} is not the generator of {images.folder}; give the one that made the images"
        raise ConfigError(message, "mismatch", field="generator")
    return check_separate(aligner, generator)


def _options(comparison: ComparisonOptions, shared: RunOptions, label: LabelOptions) -> Any:
    from medvl.eval.generation.evaluate import GenerationOptions
    from medvl.eval.generation.fidelity import FidelityOptions
    from medvl.eval.generation.findings import Resampling
    from medvl.eval.generation.usefulness import UseOptions

    return GenerationOptions(
        policy=label.policy(),
        fidelity=FidelityOptions(k=comparison.k),
        use=UseOptions(fractions=comparison.fractions, seeds=comparison.seeds),
        resampling=Resampling(resamples=shared.resamples),
        pixel_size=comparison.pixel_size,
        conventions=comparison.conventions,
    )


def _hashes(options: ModelOptions) -> dict[str, str | None]:
    from medvl.eval.core.results import checkpoint_sha256

    return {
        "checkpoint": checkpoint_sha256(options.classifier),
        "aligner": None if options.aligner is None else checkpoint_sha256(options.aligner),
    }
