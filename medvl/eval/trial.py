"""Evaluations in `medvl benchmark`: their tasks and columns, and the checkpoint on trial."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.open import open_source
from medvl.models.base import System


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of a benchmark: one metric of a task."""

    title: str
    metric: str
    targets: tuple[str, ...]
    """The first of these that the results have, such as the mean of five findings, else of all."""
    subgroup: str = ""
    """Subgroup of the row, or its beginning, such as "sex: "; empty for all items. A baseline's
    ("baseline: ") is shown and not ranked.
    """
    higher_is_better: bool = True
    baseline: bool = False
    """Whether the row is that of a baseline, which is the same for all systems, also without
    such a subgroup.
    """

    @property
    def is_baseline(self) -> bool:
        """Whether the row is that of a baseline, by its subgroup or its setting."""
        return self.baseline or self.subgroup.startswith("baseline: ")


MEAN = ("macro_competition", "macro")
"""Targets of a mean over findings: over the five of the CheXpert competition, else over all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task of `medvl benchmark`: an evaluation with the settings of the benchmark."""

    columns: tuple[Column, ...]
    name: str = ""
    """Name of the task; empty for that of the evaluation."""
    fits: type | tuple[type, ...]
    """Systems whose checkpoints are evaluated."""
    needs: tuple[str, ...] = ()
    """Parts of a corpus, such as phrases, without which the task is left out."""
    data: Literal["pairs", "phrases", "changes", "questions", "choices", "reports"] = "pairs"
    """Part of the corpus that is evaluated on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of the evaluations of a benchmark."""

    random_start: bool = False
    """Evaluate the weights before the training as well."""
    resamples: int = 1000
    batch: int = 64
    workers: int = 0
    label_shares: tuple[float, ...] = (0.01,)
    """Shares of the training labels of the linear probes."""
    smoothing: float = 0.7
    """Smoothing of grounding maps, in cells."""
    sections: tuple[str, ...] = ("impression",)
    """Sections of the texts that fusion-encoders match and rank."""
    shortlist: int = 16
    """Candidates that a fusion-encoder ranks again."""
    shortlist_system: str = "convirt"
    """Dual-encoder that proposes the candidates."""

    def __post_init__(self) -> None:
        for name, least in {"resamples": 0, "batch": 1, "workers": 0, "shortlist": 1}.items():
            if (value := getattr(self, name)) < least:
                message = f"{name} must be at least {least}, got {value}"
                raise ConfigError(message, "out_of_range", field=name)
        for share in self.label_shares:
            if not 0 < share <= 1:
                message = f"label_shares must be above 0 and at most 1, got {share}"
                raise ConfigError(message, "out_of_range", field="label_shares")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A trained checkpoint of a benchmark, and what it is evaluated on."""

    system: type[System]
    checkpoint: Path
    """The evaluated checkpoint."""
    origin: Path
    """Checkpoint of the training, whose patients are not evaluated: `checkpoint`, unless that has
    the weights before the training.
    """
    data: Path
    """Folder of the test shards of the task."""
    prompts: str
    """Prompt set of the corpus."""
    sections: tuple[str, ...]
    """Sections of the texts that the system was trained on; empty for all."""
    settings: EvaluationConfig
    model: Callable[[], Any]
    """Function that returns the model of `checkpoint`."""
    other: Callable[[str], Path]
    """Function that returns the checkpoint of another system of the benchmark, by name."""
    finetuned: Callable[[], Path]
    """Function that fine-tunes the checkpoint for the questions of the corpus, and returns the new
    one.
    """

    def labelled(self) -> ShardSource:
        """Open the data. Raises EvaluationError "unsupported" where it has no labels, as corpora of
        texts alone.
        """
        source = open_source(self.data, [self.origin])
        if not source.label_names:
            message = f"{source.folder} has no labels"
            raise EvaluationError(message, "unsupported", field="labels")
        return source
