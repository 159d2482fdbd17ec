"""Training: one loop for every model, exact to resume, hard to kill.

    from medvl.train import TrainConfig, OptimConfig, Plateau, train

    train(model, train_loader, optim=OptimConfig(...), config=TrainConfig(...), valid_loader=valid_loader)

Read `loop.py` first, then `step.py`; each other file is one concern of theirs. The configs and `choose`, which reads
the command line, come without torch.
"""

import importlib
from typing import Any

_HOME = {
    "Constant": "config",
    "Cosine": "config",
    "Linear": "config",
    "OptimConfig": "config",
    "Plateau": "config",
    "Run": "run",
    "TrainConfig": "config",
    "TrainResult": "loop",
    "choose": "launch",
    "from_dict": "serialize",
    "pretraining": "run",
    "rank_and_world": "distributed",
    "seeded": "seeding",
    "to_dict": "serialize",
    "train": "loop",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"medvl.train.{_HOME[name]}"), name)
    raise AttributeError(f"module 'medvl.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
