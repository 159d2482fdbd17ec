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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from medvl.common.label_names import named_as
from medvl.errors import ConfigError
from medvl.models.base import SystemConfig, TowersConfig
from medvl.schema import COMPETITION_FINDINGS
from medvl.train.config import OptimConfig, RewardConfig, TrainConfig
from medvl.train.tasks.pretraining import DataConfig, LoaderConfig

if TYPE_CHECKING:
    from medvl.train.loop.state import Evaluator
    from medvl.train.run import Run


_FIVE_FINDINGS = "zero_shot/auroc_macro_competition"
"""Metric of the presets `tiny`: the mean over the five findings of the CheXpert competition."""

Model = TypeVar("Model", bound=SystemConfig, covariant=True)
Data = TypeVar("Data", bound=LoaderConfig, covariant=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Generic[Model, Data]):
    """All settings of a run. The type of `data` decides how its loaders are opened
    (`medvl.train.open_data`).
    """

    model: Model
    """Settings of the system; those of its own type are options of the command line."""
    pretrained: bool
    """Start from published weights: of the encoders, or of the complete model that `model`
    names.
    """
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of the same system, or the
    encoders of another.
    """
    data: Data
    optim: OptimConfig
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotRecipe(Recipe[TowersConfig, DataConfig]):
    """All settings of a run with a zero-shot evaluation."""

    prompts: str | None = "chexpert_ensemble"
    """Prompt set of the zero-shot evaluation during training; None for a corpus without labels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRecipe(Recipe[Any, Any]):
    """All settings of a run that trains a report generator on rewards of its own texts."""

    rewards: RewardConfig
    """What sampled texts are rewarded for, and compared with."""


def pretraining_run(
    name: str, make_data: str, phantom: str = ""
) -> "Callable[[Recipe[Any, Any]], Run]":
    """Return the `prepare` function of a recipe.

    Args:
        name: name of the recipe's file, without the suffix.
        make_data: command that makes the shards of the preset `paper`.
        phantom: commands that make those of `tiny` and train on them; default the data of `medvl
            phantom quickstart`.

    The returned function raises ConfigError, which names both commands, if the shards are missing.
    """

    def prepare(recipe: Recipe[Any, Any]) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom, recipe.data.own_data))
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

    The returned function also raises ConfigError as `check_zero_shot_metric`.
    """
    pretraining = pretraining_run(name, make_data)

    def prepare(recipe: ZeroShotRecipe) -> "Run":
        """Create the model, the loaders and the evaluator."""
        run = pretraining(recipe)
        prompts = recipe.prompts
        if prompts is not None:
            run = run.with_evaluator(lambda images: evaluator(images, prompts))
        images = run.data.valid_images
        if images is not None:
            labels = None if prompts is None else images.source.label_names
            check_zero_shot_metric(recipe.train.best_metric, labels)
        return run

    return prepare


def check_zero_shot_metric(metric: str, labels: Sequence[str] | None) -> None:
    """Check that a zero-shot evaluation of these labels can return `TrainConfig.best_metric`, so
    that a run does not stop at its first validation.

    Args:
        metric: name of the metric; one of another evaluator is not checked.
        labels: of the validation data; None for a run without prompts.

    Raises ConfigError, with the missing findings.
    """
    if not metric.startswith("zero_shot/"):
        return
    if labels is None:
        message = f"expected prompts for the best_metric {metric!r}, got --prompts None"
        advice = "give prompts, or --train.best-metric loss --train.best-mode min"
        raise ConfigError(f"{message}; {advice}", "conflict", field="best_metric")
    if metric != _FIVE_FINDINGS:
        return
    names = named_as(labels, COMPETITION_FINDINGS)
    missing = [name for name in COMPETITION_FINDINGS if name not in names]
    if missing:
        message = (
            f"expected labels of five findings in the validation data for the best_metric "
            f"{metric!r}; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
        advice = (
            "give --train.best-metric zero_shot/auroc_macro, the mean over the labels that exist, "
            "or --train.best-metric loss --train.best-mode min"
        )
        raise ConfigError(f"{message}; {advice}", "mismatch", field="best_metric")


def data_advice(name: str, make_data: str, phantom: str, own_data: str) -> str:
    """Return the message for missing shards; `own_data` is `LoaderConfig.own_data`."""
    phantom = phantom or f"medvl phantom quickstart\n    medvl train {name} tiny"
    return (
        f"Make the shards first:\n    {make_data}\nand then\n    medvl train {name}\n"
        f"Of data of your own:\n    {own_data}\nand then\n"
        f"    medvl train {name} tiny --data.train shards/ours/train --data.valid "
        f"shards/ours/validate\n"
        f"Without any data, on the phantom corpus:\n    {phantom}"
    )
