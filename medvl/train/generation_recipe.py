"""Settings and preparation of recipes that train autoencoders of images and latent diffusion models."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.models.image_generation.autoencoder import AutoencoderConfig
from medvl.models.image_generation.latent_diffusion import LatentDiffusionConfig
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.recipe import data_advice
from medvl.train.tasks.generation import GenerationDataConfig, ImageDataConfig

if TYPE_CHECKING:
    from medvl.train.run import Run


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
    """Checkpoint of a latent diffusion model to start from, such as an imported Stable Diffusion."""
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


def autoencoder_run(name: str, make_data: str, phantom: str = "") -> "Callable[[AutoencoderRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for `medvl.train.pretraining_run`."""

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


def generation_run(name: str, make_data: str, phantom: str = "") -> "Callable[[GenerationRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for `medvl.train.pretraining_run`.

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
