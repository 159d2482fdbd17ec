"""A run of a benchmark: the settings of its training and its evaluations."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from medvl.benchmark.config import Budget, CommandTask, CorpusConfig, EvaluationConfig, Family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run with its evaluations."""

    key: str
    name: str
    """Name of the system or variant."""
    system: str
    family: Family
    recipe: str
    preset: str
    seed: int
    corpus: CorpusConfig
    """Corpus with absolute folders."""
    share: float
    start: str
    settings: Mapping[str, Any]
    """All settings of the recipe, as `to_dict` writes them, but for those of the machine."""
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> key of the runs whose checkpoints this one takes, or that propose candidates in its evaluations."""
    tasks: tuple[str, ...] = ()
    commands: tuple[CommandTask, ...] = ()
    budget: Budget
    evaluation: EvaluationConfig

    @property
    def title(self) -> str:
        """Name, and what differs between runs of one system."""
        parts = [self.corpus.name, "" if self.start == "random" else self.start]
        parts += ["" if self.share == 1 else f"{self.share:g} of the pairs", f"seed {self.seed}"]
        return ", ".join([self.name, *filter(None, parts)])

    @property
    def train_shards(self) -> str:
        """Folder of the training shards."""
        home = self.corpus.reports if self.family == "report" else self.corpus.pairs
        return f"{home}/train"
