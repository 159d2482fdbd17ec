"""Settings and preparation of recipes that pretrain a text encoder on text alone."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.models.language.base import TextModelConfig
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.recipe import data_advice
from medvl.train.tasks.text import TextDataConfig

if TYPE_CHECKING:
    from medvl.train.loop.validate import Evaluator
    from medvl.train.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """All settings of a run."""

    model: TextModelConfig
    """Settings of the system; those of its own type are options of the command line."""
    pretrained: bool
    """Start from published weights of the text encoder."""
    init_from: Path | None = None
    """Checkpoint to start from, also an imported one: all weights of the same system, or the text encoder of another.
    With `model.new_vocabulary`, all but its table of words."""
    data: TextDataConfig
    optim: OptimConfig
    train: TrainConfig


def text_run(
    name: str, make_data: str, phantom: str = "", *, evaluator: Callable[[Any], "Evaluator"] | None = None
) -> "Callable[[TextRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for `medvl.train.pretraining_run`.

    Validation prints, besides the losses, what `evaluator` returns, by default `MaskedWordScore`.
    """

    def prepare(recipe: TextRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom))
        from medvl.models.language.score import MaskedWordScore
        from medvl.train.run import pretraining
        from medvl.train.tasks.text import open_text

        return pretraining(name, recipe, open_text).with_evaluator(evaluator or MaskedWordScore)

    return prepare
