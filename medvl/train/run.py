"""A complete run of a recipe: model, data and evaluators, ready to train or to examine
(`medvl.train.doctor`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from medvl.common.files import sha256
from medvl.common.seeding import seeded
from medvl.encoders.pretrained import split_set
from medvl.models import create_model
from medvl.models.checkpoint_folder import find_checkpoint, weights_sha256
from medvl.train.config import OptimConfig, RewardConfig, TrainConfig
from medvl.train.loop.state import Evaluator
from medvl.train.loop.trainer import TrainResult, train
from medvl.train.tasks.pretraining import DataLoaders, LoaderConfig, open_data

if TYPE_CHECKING:
    from medvl.train.recipe import Recipe


# What a run starts from, by content: checkpoints, weights of one's own, the vocabulary and files
# of statements.

_CHECKPOINTS = ("init_from", "image_from", "text_from", "autoencoder")
"""Settings of recipes that name a checkpoint."""
_FILES = ("image_weights", "text_weights", "pixelhop")
"""Settings of recipes, or of their models, that name a file or a folder of weights."""


def describe_start(settings: Any, model: Any) -> dict[str, str]:
    """Return hashes of what the settings of a recipe name, so that a run in a used folder is known
    for another one.

    Names of encoders and addresses on the hub, which contain a commit, are returned as they are.
    """
    hashes: dict[str, str] = {}
    for name in _CHECKPOINTS:
        if (source := getattr(settings, name, None)) is not None:
            folder = find_checkpoint(source)
            hashes[name] = weights_sha256(folder) if folder.is_dir() else str(source)
    for part, prefix in ((settings, ""), (getattr(settings, "model", None), "model.")):
        for name in _FILES:
            if (source := getattr(part, name, None)) is not None:
                path, weights = split_set(source)
                hashes[prefix + name] = _content(Path(path)) + (f"#{weights}" if weights else "")
    file = getattr(getattr(settings.data, "text", None), "file", None)
    if file is not None:
        hashes["data.text.file"] = _content(Path(file))
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        words = json.dumps(sorted(tokenizer.vocabulary.items()))
        hashes["vocabulary"] = hashlib.sha256(words.encode()).hexdigest()
    return hashes


def _content(path: Path) -> str:
    """Return the hash of a file, or of the files of a folder; another name as it is."""
    if path.is_dir():
        hashes = [sha256(file) for file in sorted(path.rglob("*")) if file.is_file()]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()
    return sha256(path) if path.is_file() else str(path)


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
    rewards: RewardConfig | None = None
    """Train on rewards of sampled texts."""

    def with_evaluator(self, create: Callable[[Any], Evaluator]) -> "Run":
        """Return the run with one more evaluator, `create(validation images)`; unchanged without
        validation data.
        """
        if self.data.valid_images is None:
            return self
        return dataclasses.replace(self, evals=(*self.evals, create(self.data.valid_images)))

    def train(self) -> TrainResult:
        """Train, or resume an interrupted run; raises as `medvl.train.train` does."""
        start = describe_start(self.settings, self.model)
        return train(
            self.model,
            self.data.train,
            valid_loader=self.data.valid,
            evals=self.evals,
            optim=self.settings.optim,
            config=self.settings.train,
            rewards=self.rewards,
            run={
                "recipe": self.recipe,
                "settings": self.settings,
                "start": start,
                **self.data.described,
            },
        )


def pretraining(recipe: str, settings: "Recipe[Any, Any]") -> Run:
    """Create the run of a system from its configuration.

    Raises what `create_model` and `open_data` raise.
    """
    with seeded(settings.train.seed):
        model = create_model(
            settings.model,
            pretrained=settings.pretrained,
            tokenizer=settings.data.tokenizer,
            init_from=settings.init_from,
        )
    data = open_data(settings.data, model, settings.train.micro_batch)
    rewards = getattr(settings, "rewards", None)  # of a `RewardRecipe`
    return Run(recipe=recipe, settings=settings, model=model, data=data, rewards=rewards)
