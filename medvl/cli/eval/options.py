"""Options shared by the `medvl eval` commands, and their printed output."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.loading.loader import Loader
    from medvl.data.shards.format import Manifest
    from medvl.data.shards.source import ShardSource
    from medvl.eval.classification.label_policy import LabelPolicy
    from medvl.eval.core.publish import WritePage
    from medvl.eval.core.results import Results
    from medvl.models.base import System

SystemT = TypeVar("SystemT", bound="System")


class EvaluationResult(Protocol):
    """Result of an evaluation: metric rows and predictions."""

    @property
    def results(self) -> "Results":
        """Rows of metrics, with the settings of the protocol."""

    def predictions(self) -> Iterable[Mapping[str, Any]]:
        """Yield one JSON object for each image, question or pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Output and compute options."""

    out: Path | None = None
    """folder for the output files; default RUN/eval/STEP/TASK, or CHECKPOINT/eval/TASK outside of a run"""
    replace: bool = False
    """replace results of another checkpoint or of other data in the output folder"""
    resamples: int = 1000
    """bootstrap resamples"""
    batch: int = 64
    """batch size"""
    workers: int = 2
    """loader processes"""
    device: str = "auto"
    """auto, cpu or cuda"""
    all: bool = False
    """print all rows; by default, those that fit on one screen"""

    def folder(self, checkpoint: Path | None, task: str, *, hashed: bool = True) -> Path:
        """Return the output folder. Called before an evaluation, so that its hours are not lost at its end.

        Args:
            checkpoint: the evaluated checkpoint, or a file of predictions.
            task: name of the folder.
            hashed: whether the results hold the hash of `checkpoint`; False for ensembles and random weights.

        Raises:
            ConfigError: neither a checkpoint nor --out is given.
            EvaluationError: the folder cannot be written, or holds results of another checkpoint without --replace.
        """
        from medvl.eval.core.publish import check_output, default_folder
        from medvl.eval.core.results import check_replaceable, checkpoint_sha256

        if checkpoint is None:
            if self.out is None:
                message = "--encoder needs --out: there is no run to hold the results"
                raise ConfigError(message, "missing", field="out")
            check_output(self.out)
            return self.out
        folder = self.out or default_folder(checkpoint, task)
        check_output(folder)
        if hashed and not self.replace and (folder / "results.json").is_file():
            kind = "predictions" if checkpoint.is_file() else "checkpoint"
            check_replaceable(folder, {kind: checkpoint_sha256(checkpoint)})
        return folder


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


_SCREEN_LINES = 38
_NOTE_LINES = 3  # parts up to this length are notes, which are always printed


def print_results(table: str, paths: Sequence[Path], *, everything: bool = False) -> None:
    """Print the tables of results, and the paths of the files written.

    Parts are separated by empty lines. Unless `everything` is set, tables are cut where the screen ends; their first
    lines are means.
    """
    tables = [part.splitlines() for part in table.split("\n\n")]
    notes = [lines for lines in tables if len(lines) <= _NOTE_LINES]
    left = _SCREEN_LINES - len(paths) - 2 - sum(len(lines) + 1 for lines in notes)
    shown: list[str] = []
    for lines in tables:
        kept = lines if everything or lines in notes else lines[: max(left, 0)]
        if len(kept) > 1 or lines in notes:
            shown += [*([""] if shown else []), *kept]
            left -= 0 if lines in notes else len(kept) + 1
    hidden = sum(map(len, tables)) - sum(bool(line) for line in shown)
    if hidden > 0:
        shown.append(f"... {hidden} more lines with --all, and on the page")
    print(*shown, "", *paths, sep="\n")


def open_evaluation(
    shared: EvalOptions, kind: type[SystemT], advice: str, *, text: bool = False
) -> "tuple[SystemT, ShardSource, Callable[..., Loader]]":
    """Return the model, the shards, and a function that opens a loader of shards for the model.

    Under torchrun the loader reads this rank's batches. Raises ConfigError with `advice` if the checkpoint is no
    `kind`; `text` tokenizes texts for the model.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, kind):
        raise unsupported_model(shared.checkpoint, model, advice)
    read = functools.partial(open_for_evaluation, transform=model.transform, batch=shared.batch, workers=shared.workers)
    read = functools.partial(read, ranks=rank_and_world())
    if text:
        read = functools.partial(read, tokenizer=model.tokenizer)
    return model, open_source(shared.data, [shared.checkpoint]), read


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanOptions(LabelOptions):
    """Treatment of labels, thresholds and means over findings."""

    smallest_class: int = 1
    """positive, and negative, images that a finding needs to be in the means"""


def publish_result(
    result: EvaluationResult,
    folder: Path,
    write_page: "WritePage | None",
    model: str,
    data: "Manifest | str",
    table: str | None = None,
    *,
    options: RunOptions,
) -> None:
    """Write the files of an evaluation, on rank 0; print the table (default: of all rows) and the paths.

    Of the options, `all` prints what does not fit on one screen, and `replace` replaces results of another checkpoint
    or of other data; without it, results of other data get a folder beside the earlier ones.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.publish import publish
    from medvl.eval.core.results import folder_for_data, format_table

    if rank_and_world()[0] > 0:
        return

    if not options.replace:
        folder = folder_for_data(folder, result.results.inputs)
    paths = publish(
        result.results,
        folder,
        predictions=result.predictions(),
        write_page=write_page,
        model=model,
        data=data,
        replace=options.replace,
    )
    print_results(format_table(result.results.rows) if table is None else table, paths, everything=options.all)
