"""Settings and preparation of recipes that pretrain a system on images and texts.

Such a recipe is a docstring, its presets, the command that makes their data, and its preparation:

    paper = ZeroShotRecipe(model=ConVIRTConfig(), pretrained=True, data=..., optim=..., train=...)
    tiny = quickstart.zero_shot_recipe("convirt", ConVIRTConfig(...))
    PRESETS = {"paper": paper, "tiny": tiny}
    MAKE_DATA = "medvl shards mimic-cxr --root MIMIC-CXR --out shards/mimic-cxr"
    prepare = zero_shot_run("convirt_mimic", MAKE_DATA, ZeroShotEval)

    if __name__ == "__main__":
        launch(prepare, PRESETS, "ConVIRT on MIMIC-CXR.")

Presets `tiny` change the settings in `quickstart.py` with `dataclasses.replace`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.common.seeding import seeded
from medvl.models.base import ImageConfig, TowersConfig
from medvl.models.fusion_encoders.bases.base import FusionConfig
from medvl.models.image_generation.autoencoder import AutoencoderConfig
from medvl.models.image_generation.latent_diffusion import LatentDiffusionConfig
from medvl.models.language.base import TextModelConfig
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.tasks.generation import GenerationDataConfig, ImageDataConfig
from medvl.train.tasks.pretraining import DataConfig
from medvl.train.tasks.supervised import ApplyPolicy, ClassificationDataConfig, open_classification
from medvl.train.tasks.text import TextDataConfig

if TYPE_CHECKING:
    from medvl.train.loop.validate import Evaluator
    from medvl.train.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run."""

    model: ImageConfig
    """Settings of the system; those of its own type are options of the command line."""
    pretrained: bool
    """Start from published weights: of both encoders, or of the complete model that `model`
    names.
    """
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of the same system, or the
    encoders of another.
    """
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotRecipe(Recipe):
    """All settings of a run with a zero-shot evaluation."""

    model: TowersConfig
    """Settings of the system."""
    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


def pretraining_run(name: str, make_data: str, phantom: str = "") -> "Callable[[Recipe], Run]":
    """Return the `prepare` function of a recipe.

    Args:
        name: name of the recipe's file, without the suffix.
        make_data: command that makes the shards of the preset `paper`.
        phantom: commands that make those of `tiny` and train on them; default the data of `medvl
            phantom quickstart`.

    The returned function raises ConfigError, which names both commands, if the shards are missing.
    """

    def prepare(recipe: Recipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom))
        from medvl.train.run import pretraining

        return pretraining(name, recipe)

    return prepare


def zero_shot_run(
    name: str, make_data: str, evaluator: "Callable[[Any, str], Evaluator]"
) -> "Callable[[ZeroShotRecipe], Run]":
    """Return the `prepare` function of a recipe with a zero-shot evaluation during training.

    Args:
        name: as in `pretraining_run`.
        make_data: as in `pretraining_run`.
        evaluator: function of the loader of the validation images and of the prompt set:
            `medvl.eval.ZeroShotEval`.
    """
    pretraining = pretraining_run(name, make_data)

    def prepare(recipe: ZeroShotRecipe) -> "Run":
        """Create the model, the loaders and the evaluator."""
        run = pretraining(recipe)
        prompts = recipe.prompts
        return (
            run
            if prompts is None
            else run.with_evaluator(lambda images: evaluator(images, prompts))
        )

    return prepare


OWN_DATA = (
    "medvl shards table --table rows.csv --image-column path --text-column report --out shards/ours"
)
"""Command that makes shards of a table; `medvl shards table --help` has its further options."""


def data_advice(name: str, make_data: str, phantom: str) -> str:
    """Return the message for missing shards."""
    phantom = phantom or f"medvl phantom quickstart\n    medvl train {name} tiny"
    return (
        f"Make the shards first:\n    {make_data}\nand then\n    medvl train {name}\n"
        f"Of images and reports of your own, in a table:\n    {OWN_DATA}\nand then\n"
        f"    medvl train {name} tiny --data.train shards/ours/train --data.valid "
        f"shards/ours/validate\n"
        f"Without any data, on the phantom corpus:\n    {phantom}"
    )


# Settings and preparation of recipes that pretrain a text encoder on text alone.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """All settings of a run."""

    model: TextModelConfig
    """Settings of the system; those of its own type are options of the command line."""
    pretrained: bool
    """Start from published weights of the text encoder."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of the same system, or the text
    encoder of another. With `model.new_vocabulary`, all but its table of words.
    """
    data: TextDataConfig
    optim: OptimConfig
    train: TrainConfig


def text_run(
    name: str,
    make_data: str,
    phantom: str = "",
    *,
    evaluator: Callable[[Any], "Evaluator"] | None = None,
) -> "Callable[[TextRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.

    Validation prints, besides the losses, what `evaluator` returns, by default `MaskedWordScore`.
    """

    def prepare(recipe: TextRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom))
        from medvl.models.language.base import MaskedWordScore
        from medvl.train.run import pretraining
        from medvl.train.tasks.text import open_text

        return pretraining(name, recipe, open_text).with_evaluator(evaluator or MaskedWordScore)

    return prepare


# Settings and preparation of recipes that fine-tune a fusion-encoder for labels, like those of
# `recipe.py`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierRecipe:
    """All settings of a run of `FusedClassifier`."""

    init_from: Path | None = None
    """Checkpoint to start from: of a fusion-encoder, of a head on one, or of a dual-encoder;
    None creates `model`.
    """
    model: FusionConfig
    """Fusion-encoder, where `init_from` has none."""
    pretrained: bool = False
    """Without `init_from`: start from published weights of both encoders."""
    tokenizer: Path | None = None
    """Without `init_from`: folder of a tokenizer; None uses the text encoder's own from the hub."""
    modalities: Literal["image_text", "image", "text"] = "image_text"
    """Input of the classifier. Labels that were extracted from the report can mostly be read from
    its text: compare with "text" and "image".
    """
    head: Literal["mlp", "meter", "linear"] = "mlp"
    target: Literal["multi_label", "single_label"] = "multi_label"
    image_size: int | None = None
    """With `init_from`: side of the images in pixels, to which learned positions are interpolated;
    None is that of the checkpoint.
    """
    max_tokens: int | None = None
    """With `init_from`: maximum length of a text, which may be above that of the pretraining; None
    is that of the checkpoint.
    """
    head_lr_mult: float = 1.0
    """Learning rate of the head, as a multiple of the encoders'."""
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore"
    """Treatment of uncertain labels (-1)."""
    missing: Literal["ignore", "negative"] = "ignore"
    """Treatment of missing labels."""
    data: ClassificationDataConfig
    optim: OptimConfig
    train: TrainConfig


def classifier_run(
    name: str,
    make_data: str,
    policy: "Callable[..., Any]",
    evaluator: "Callable[..., Evaluator]",
    phantom: str = "",
    complete: "Callable[[Any], ClassifierRecipe] | None" = None,
) -> "Callable[[ClassifierRecipe], Run]":
    """Return the `prepare` function of a recipe for labels.

    Args:
        name: as in `pretraining_run`.
        make_data: as in `pretraining_run`.
        policy: `medvl.eval.LabelPolicy`.
        evaluator: `medvl.eval.ClassifyEval`.
        phantom: as in `pretraining_run`.
        complete: called with the settings after the check of the data; returns those of the run.
    """

    def prepare(recipe: ClassifierRecipe) -> "Run":
        """Create the model, the loaders and the evaluator."""
        recipe.data.check(data_advice(name, make_data, phantom))
        recipe = recipe if complete is None else complete(recipe)
        labels = policy(uncertain=recipe.uncertain, missing=recipe.missing)
        run = fused_classification(name, recipe, labels.apply)
        return run.with_evaluator(lambda images: evaluator(images, policy=labels))

    return prepare


def fused_classification(recipe: str, settings: ClassifierRecipe, apply: ApplyPolicy) -> "Run":
    """Create the run of a `FusedClassifier`; `apply` maps labels to 1, 0 or NaN.

    Raises what `create_model`, `create_fused_classifier` and `open_classification` raise.
    """
    from medvl.models import FusedClassifier, FusionModel, create_fused_classifier, create_model
    from medvl.train.run import Run

    names = ("modalities", "head", "target", "head_lr_mult")
    labels = settings.data.names()
    choices = {name: getattr(settings, name) for name in names}
    with seeded(settings.train.seed):
        if settings.init_from is None:
            fusion = create_model(
                settings.model, pretrained=settings.pretrained, tokenizer=settings.tokenizer
            )
            assert isinstance(fusion, FusionModel)
            model = FusedClassifier.on(fusion, labels, **choices)
        else:
            model = create_fused_classifier(
                settings.init_from,
                labels,
                fusion=settings.model,
                image_size=settings.image_size,
                max_tokens=settings.max_tokens,
                **choices,
            )
    data = open_classification(settings.data, model, apply, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=data)


# Settings and preparation of recipes that train autoencoders of images and latent diffusion
# models.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderRecipe:
    """All settings of a run."""

    model: AutoencoderConfig
    init_from: Path | None = None
    """Checkpoint of an autoencoder of the same sizes to start from."""
    data: ImageDataConfig
    optim: OptimConfig
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRecipe:
    """All settings of a run."""

    model: LatentDiffusionConfig
    """Settings of the system; those of its own type are options of the command line."""
    init_from: Path | None = None
    """Checkpoint of a latent diffusion model to start from, such as an imported Stable
    Diffusion.
    """
    random_unet: bool = False
    """Draw the U-Net at random; `init_from` then gives the autoencoder and the text encoder."""
    autoencoder: Path | None = None
    """Checkpoint of the system `autoencoder`, in place of the autoencoder of `init_from`."""
    text_from: Path | None = None
    """Checkpoint with the text encoder to start from, of any system."""
    pretrained: bool
    """Start the text encoder from its published weights."""
    data: GenerationDataConfig
    optim: OptimConfig
    train: TrainConfig


def autoencoder_run(
    name: str, make_data: str, phantom: str = ""
) -> "Callable[[AutoencoderRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.
    """

    def prepare(recipe: AutoencoderRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom))
        from medvl.common.seeding import seeded
        from medvl.models import create_model
        from medvl.train.run import Run
        from medvl.train.tasks.generation import open_images

        with seeded(recipe.train.seed):
            model = create_model(recipe.model, init_from=recipe.init_from)
        return Run(
            recipe=name,
            settings=recipe,
            model=model,
            data=open_images(recipe.data, model, recipe.train.micro_batch),
        )

    return prepare


def generation_run(
    name: str, make_data: str, phantom: str = ""
) -> "Callable[[GenerationRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.

    The function also raises CheckpointError where a checkpoint that the run starts from is missing.
    """

    def prepare(recipe: GenerationRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom))
        from medvl.common.seeding import seeded
        from medvl.models import create_latent_diffusion
        from medvl.train.run import Run
        from medvl.train.tasks.generation import open_generation

        with seeded(recipe.train.seed):
            model = create_latent_diffusion(
                recipe.model,
                start=recipe.init_from,
                random_unet=recipe.random_unet,
                autoencoder=recipe.autoencoder,
                text=recipe.text_from,
                tokenizer=recipe.data.tokenizer,
                pretrained=recipe.pretrained,
            )
        return Run(
            recipe=name,
            settings=recipe,
            model=model,
            data=open_generation(recipe.data, model, recipe.train.micro_batch, recipe.train.device),
        )

    return prepare
