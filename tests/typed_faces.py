"""Types that a user's mypy sees on the public faces of the package.

Nothing here runs: mypy reads this file (pyproject.toml), and reports an error that it no longer
finds as an unused comment.
"""

from collections.abc import Mapping
from typing import Any, assert_type

import medvl
from medvl.data import Loader, open_loader
from medvl.eval import zero_shot
from medvl.eval.zero_shot_classification.protocol import ZeroShotResult
from medvl.models import DualEncoder, System
from medvl.train import TrainResult, train


def check_types(settings: Mapping[str, Any], model: DualEncoder, loader: Loader) -> object:
    """Use the faces as a program does."""
    assert_type(medvl.create_model("clip"), System)
    assert_type(medvl.load("checkpoint"), System)
    assert_type(medvl.train.train(model, loader, **settings), TrainResult)
    assert_type(medvl.eval.zero_shot(model, loader), ZeroShotResult)
    assert_type(medvl.data.open_loader(**settings), Loader)
    medvl.create_model(3.5)  # type: ignore[arg-type]
    train(learning_rate=1.0)  # type: ignore[call-arg]
    open_loader("shards")  # type: ignore[arg-type, call-arg]
    zero_shot(loader=3)  # type: ignore[arg-type, call-arg]
    return train(model, loader, **settings).no_such_result  # type: ignore[attr-defined]
