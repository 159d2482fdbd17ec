"""Options shared by the `medvl eval` commands, and their printed output."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypeVar

from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.loading.loader import Loader
    from medvl.data.shards.format import Manifest
    from medvl.data.shards.source import ShardSource
    from medvl.eval.classification.scored_images import LabelPolicy
    from medvl.eval.core.results import Results, WritePage
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
    """folder for the output files; default RUN/eval/STEP/TASK, or CHECKPOINT/eval/TASK outside
    of a run
    """
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

    def folder(self, checkpoint: Path | None, task: str, *, hashed: bool = True) -> "OutputFolder":
        """Return the output folder. Called before an evaluation, so that its hours are not lost at
        its end.

        Args:
            checkpoint: the evaluated checkpoint, or a file of predictions.
            task: name of the folder.
            hashed: whether the results hold the hash of `checkpoint`; False for ensembles and
                random weights.

        Raises:
            ConfigError: neither a checkpoint nor --out is given.
            EvaluationError: the folder cannot be written, or holds results of another checkpoint
                without --replace.
        """
        from medvl.eval.core.results import checkpoint_sha256, default_folder

        if checkpoint is None:
            if self.out is None:
                message = "--encoder needs --out: there is no run to hold the results"
                raise ConfigError(message, "missing", field="out")
            return OutputFolder(self.out, replace=self.replace)
        kind = "predictions" if checkpoint.is_file() else "checkpoint"
        model = {kind: functools.partial(checkpoint_sha256, checkpoint)} if hashed else {}
        return OutputFolder(
            self.out or default_folder(checkpoint, task), model, replace=self.replace
        )


SettledFolder = NewType("SettledFolder", Path)
"""Folder that an evaluation on certain data may write."""


class OutputFolder:
    """Folder of the results of a model, before the data is known.

    Args:
        path: the folder.
        model: input that names the evaluated model -> function that returns its hash.
        replace: whether results of another model and of other data are replaced.

    Raises EvaluationError where the folder cannot be written, or holds results of another model
    without `replace`.
    """

    def __init__(
        self,
        path: Path,
        model: Mapping[str, Callable[[], str | None]] | None = None,
        *,
        replace: bool,
    ) -> None:
        self.path = path
        self._model = dict(model or {})
        self._replace = replace
        self._check(path)

    def settle(self, **data: str | None) -> SettledFolder:
        """Return the folder for results on this data, and print it. Called before an evaluation.

        Without `replace`, results on other data stay, and these get a folder beside them.

        Args:
            data: hash of the data by its name in `Results.inputs`; none where the results hold no
                such hash.

        Raises EvaluationError as the constructor, about the folder beside.
        """
        from medvl.common.ranks import rank_and_world
        from medvl.eval.core.results import folder_for_data

        folder = self.path if self._replace else folder_for_data(self.path, data)
        if folder != self.path:
            self._check(folder)
        if rank_and_world()[0] == 0:
            kept = (
                ""
                if folder == self.path
                else f": {self.path} holds results on other data (--replace replaces them)"
            )
            print(f"medvl: results go to {folder}{kept}", file=sys.stderr, flush=True)
        return SettledFolder(folder)

    def _check(self, folder: Path) -> None:
        from medvl.eval.core.results import check_output, check_replaceable

        check_output(folder)
        if self._model and not self._replace and (folder / "results.json").is_file():
            check_replaceable(folder, {name: digest() for name, digest in self._model.items()})


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
        from medvl.eval.classification.scored_images import LabelPolicy

        return LabelPolicy(uncertain=self.uncertain, missing=self.missing)


_SCREEN_LINES = 38
_NOTE_LINES = 3  # parts up to this length are notes, which are always printed


def print_results(table: str, paths: Sequence[Path], *, everything: bool = False) -> None:
    """Print the tables of results, and the paths of the files written.

    Parts are separated by empty lines. Unless `everything` is set, tables are cut where the screen
    ends; their first lines are means.
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

    Under torchrun the loader reads this rank's batches. Raises ConfigError with `advice` if the
    checkpoint is no `kind`; `text` tokenizes texts for the model.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import load_model, open_for_evaluation, open_source, unsupported_model

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, kind):
        raise unsupported_model(shared.checkpoint, model, advice)
    read = functools.partial(
        open_for_evaluation, transform=model.transform, batch=shared.batch, workers=shared.workers
    )
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
    folder: SettledFolder,
    write_page: "WritePage | None",
    model: str,
    data: "Manifest | str",
    table: str | None = None,
    *,
    options: RunOptions,
) -> None:
    """Write the files of an evaluation, on rank 0; print the table (default: of all rows) and the
    paths.

    Of the options, `all` prints what does not fit on one screen, and `replace` replaces results of
    another checkpoint.
    """
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.results import format_table, publish

    if rank_and_world()[0] > 0:
        return

    paths = publish(
        result.results,
        folder,
        predictions=result.predictions(),
        write_page=write_page,
        model=model,
        data=data,
        replace=options.replace,
    )
    print_results(
        format_table(result.results.rows) if table is None else table, paths, everything=options.all
    )
