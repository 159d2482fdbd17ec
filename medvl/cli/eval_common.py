"""Options shared by the `medvl eval` commands, and their printed output."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from medvl.eval.classification.label_policy import LabelPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Output and compute options."""

    out: Path | None = None
    """folder for the output files; default eval/TASK in the run of the checkpoint"""
    resamples: int = 1000
    """bootstrap resamples"""
    batch: int = 64
    """batch size"""
    workers: int = 2
    """loader processes"""
    device: str = "auto"
    """auto, cpu or cuda"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(RunOptions):
    """Model, data, output and compute options."""

    checkpoint: Path
    """folder of a checkpoint, such as runs/convirt/best"""
    data: Path
    """folder of shards of patients that the model was not trained on"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallBatchOptions(EvalOptions):
    """Model, data, output and compute options."""

    batch: int = 32
    """batch size"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """Treatment of labels and thresholds."""

    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore"
    """treatment of uncertain labels (-1)"""
    missing: Literal["ignore", "negative"] = "negative"
    """treatment of missing labels"""
    threshold_rule: Literal["f1", "mcc", "youden"] = "f1"
    """metric that thresholds maximise on the validation images"""

    def policy(self) -> "LabelPolicy":
        """Return the label policy of these options."""
        from medvl.eval.classification.label_policy import LabelPolicy

        return LabelPolicy(uncertain=self.uncertain, missing=self.missing)


def print_results(table: str, paths: Sequence[Path]) -> None:
    """Print the table of results and the paths of the files written."""
    print(table, "", *paths, sep="\n")
