"""Settings of recipes that train report generators on rewards of their own texts."""

import dataclasses

from medvl.train.recipe import Recipe
from medvl.train.rewards.task import RewardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRecipe(Recipe):
    """All settings of a run that trains a report generator on rewards."""

    rewards: RewardConfig
    """What sampled texts are rewarded for, and compared with."""
