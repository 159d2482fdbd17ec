"""A complete run of a recipe: model, data and evaluators, ready to train or to examine (`medvl.train.doctor`)."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from medvl.common.config_io import to_dict
from medvl.common.seeding import seeded
from medvl.models import create_model
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.loop.trainer import TrainResult, train
from medvl.train.loop.validate import Evaluator
from medvl.train.tasks.common import DataLoaders, LoaderConfig
from medvl.train.tasks.pretraining import open_data

if TYPE_CHECKING:
    from medvl.train.recipe import Recipe


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
        return train(
            self.model,
            self.data.train,
            valid_loader=self.data.valid,
            evals=self.evals,
            optim=self.settings.optim,
            config=self.settings.train,
            run={"recipe": self.recipe, "settings": self._recipe_settings(), **self.data.described},
        )

    def _recipe_settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint does not hold elsewhere: all but model, optim and train."""
        settings = to_dict(self.settings)
        return {name: value for name, value in settings.items() if name not in ("model", "optim", "train")}


def pretraining(recipe: str, settings: "Recipe", start: Path | None = None) -> Run:
    """Create the run of a system from its configuration, optionally from the weights of the checkpoint `start`.

    Raises what `create_model` and `open_data` raise.
    """
    with seeded(settings.train.seed):
        model = create_model(
            settings.model, pretrained=settings.pretrained, tokenizer=settings.data.tokenizer, init_from=start
        )
    data = open_data(settings.data, model, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=data)
