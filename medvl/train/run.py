"""A complete run of a recipe: model, data and evaluators, ready to train or to examine (`medvl.train.doctor`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from medvl.common.config_io import to_dict
from medvl.common.seeding import seeded
from medvl.models import create_model
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.loop.trainer import TrainResult, train
from medvl.train.loop.validate import Evaluator
from medvl.train.start import describe_start
from medvl.train.tasks.common import DataLoaders, LoaderConfig
from medvl.train.tasks.pretraining import open_data

if TYPE_CHECKING:
    from medvl.train.recipe import Recipe
    from medvl.train.text_recipe import TextRecipe


class Settings(Protocol):
    """Settings that all recipes have."""

    @property
    def optim(self) -> OptimConfig:
        """Optimiser and learning rate."""

    @property
    def train(self) -> TrainConfig:
        """Length, batch, precision and the like."""

    @property
    def data(self) -> LoaderConfig:
        """Folders of shards and loaders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to start."""

    recipe: str
    """Name of the recipe, for the checkpoints."""
    settings: Settings
    """Settings of the recipe, for the checkpoints."""
    model: nn.Module
    data: DataLoaders
    evals: Sequence[Evaluator] = ()

    def with_evaluator(self, create: Callable[[Any], Evaluator]) -> "Run":
        """Return the run with one more evaluator, `create(validation images)`; unchanged without validation data."""
        if self.data.valid_images is None:
            return self
        return dataclasses.replace(self, evals=(*self.evals, create(self.data.valid_images)))

    def train(self) -> TrainResult:
        """Train, or resume an interrupted run; raises as `medvl.train.train` does."""
        settings = to_dict(self.settings, leave_out=("model", "optim", "train"))  # checkpoints hold these elsewhere
        start = describe_start(self.settings, self.model)
        return train(
            self.model,
            self.data.train,
            valid_loader=self.data.valid,
            evals=self.evals,
            optim=self.settings.optim,
            config=self.settings.train,
            run={"recipe": self.recipe, "settings": settings, "start": start, **self.data.described},
        )


def pretraining(
    recipe: str, settings: "Recipe | TextRecipe", open_loaders: Callable[..., DataLoaders] = open_data
) -> Run:
    """Create the run of a system from its configuration.

    `open_loaders` takes the data settings, the model and the pairs of a micro-batch. Raises what it and `create_model`
    raise.
    """
    with seeded(settings.train.seed):
        model = create_model(
            settings.model,
            pretrained=settings.pretrained,
            tokenizer=settings.data.tokenizer,
            init_from=settings.init_from,
        )
    data = open_loaders(settings.data, model, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=data)
