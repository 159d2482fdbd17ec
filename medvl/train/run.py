"""What every recipe comes to: a model, its data and its judges, ready to be trained, or measured (`doctor.py`)."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from medvl.common.config_io import to_dict
from medvl.common.seeding import seeded
from medvl.models import create_model, warm_start
from medvl.models.base import TwoTowers
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.loop.trainer import TrainResult, train
from medvl.train.loop.validate import Evaluator
from medvl.train.tasks.pretraining import DataConfig, DataLoaders, open_data


class Settings(Protocol):
    """What all recipes have among their settings."""

    @property
    def optim(self) -> OptimConfig:
        """Optimiser and learning rate."""

    @property
    def train(self) -> TrainConfig:
        """How the run goes."""

    @property
    def data(self) -> Any:
        """Where the samples come from, and how many `workers` read them."""


class Pretraining(Settings, Protocol):
    """What recipes that train a system on images and texts have besides."""

    @property
    def model(self) -> Any:
        """The configuration of a system."""

    @property
    def pretrained(self) -> bool:
        """Start the encoders from their published weights."""

    @property
    def data(self) -> DataConfig:
        """Where the samples come from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to begin."""

    recipe: str
    """Its name, for the checkpoints."""
    settings: Settings
    """Those of the recipe, all of which the checkpoints hold."""
    model: nn.Module
    data: DataLoaders
    evals: Sequence[Evaluator] = ()

    def with_evaluator(self, make: Callable[[Any], Evaluator]) -> "Run":
        """With one more evaluator, which `make` makes for the validation images; without such images as it is."""
        if self.data.valid_images is None:
            return self
        return dataclasses.replace(self, evals=(*self.evals, make(self.data.valid_images)))

    def train(self) -> TrainResult:
        """Train, or go on with what was interrupted; raises as `medvl.train.train` does."""
        return train(
            self.model,
            self.data.train,
            valid_loader=self.data.valid,
            evals=self.evals,
            optim=self.settings.optim,
            config=self.settings.train,
            run={"recipe": self.recipe, "settings": self._own_settings(), **self.data.described},
        )

    def _own_settings(self) -> dict[str, Any]:
        """Return the settings of the recipe that a checkpoint does not hold elsewhere (model, optim, train)."""
        settings = to_dict(self.settings)
        return {name: value for name, value in settings.items() if name not in ("model", "optim", "train")}


def pretraining(recipe: str, settings: Pretraining, start: Path | None = None) -> Run:
    """The run of a system from its configuration, or from the checkpoint that `start` names.

    Raises what `create_model`, `warm_start` and `open_data` raise.
    """
    with seeded(settings.train.seed):
        model = create_model(settings.model, pretrained=settings.pretrained, tokenizer=settings.data.tokenizer)
    if start is not None:
        warm_start(cast(TwoTowers, model), start)
    opened = open_data(settings.data, model, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=opened)
