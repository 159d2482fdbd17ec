"""Training: one loop for every model, exact to resume, hard to kill.

    from medvl.train import TrainConfig, OptimConfig, Plateau, train

    train(model, train_loader, optim=OptimConfig(...), config=TrainConfig(...), valid_loader=valid_loader)

Read `loop.py` first, then `step.py`; each other file is one concern of theirs. The configs and `choose`, which reads
the command line, come without torch.
"""

from typing import TYPE_CHECKING

from medvl.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from medvl.common.config_io import from_dict as from_dict, to_dict as to_dict
    from medvl.common.seeding import seeded as seeded
    from medvl.train.config import (
        Constant as Constant,
        Cosine as Cosine,
        Linear as Linear,
        OptimConfig as OptimConfig,
        Plateau as Plateau,
        TrainConfig as TrainConfig,
    )
    from medvl.train.loop.trainer import TrainResult as TrainResult, train as train
    from medvl.train.parallel.distributed import rank_and_world as rank_and_world
    from medvl.train.recipe_cli import choose as choose
    from medvl.train.run import Run as Run, pretraining as pretraining

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
