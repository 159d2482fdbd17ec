"""Checkpoints of a run.

    run_dir/
      checkpoints/step-00001200/
        config.json, model.safetensors, tokenizer/       the model: `medvl.load` reads it
        train_state/state.json, optimizer.safetensors    the run
        complete.json                                    size and sha256 of every file
      last -> checkpoints/step-00001200
      best -> checkpoints/step-00000900

Sharded runs may write weights and optimiser in parts. A checkpoint is written under a temporary
name, its marker last, flushed and renamed: after a kill there is the old one or the new one. Later
damage is detected by the hashes. Nothing in it needs pickle.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medvl.common import files as folders
from medvl.common.files import fsync, sha256
from medvl.common.untrusted import parse_json
from medvl.data.loading.workers import worker_error
from medvl.errors import CheckpointError
from medvl.models import checkpoint as model_checkpoint
from medvl.models.card import add_results
from medvl.models.checkpoint_folder import CARD, MARKER, WEIGHT_PARTS, check_marker, join_parts
from medvl.train.parallel.model import ParallelModel, write_parts

_log = logging.getLogger(__name__)

FORMAT = 2
"""Version of `train_state/`; another one is refused."""
STATE = "train_state/state.json"
OPTIMIZER = "train_state/optimizer.safetensors"
OPTIMIZER_PARTS = "train_state/optimizer"
_NAME = re.compile(r"step-(\d{8,})")


class ModelFiles(Protocol):
    """Interface of reading and writing a model: `medvl.models.checkpoint`, or a replacement in
    tests.
    """

    def save(
        self, model: Any, folder: Path, run: Mapping[str, Any], *, weights: bool = True
    ) -> None:
        """Write the model into an existing folder, with its weights or without."""

    def load_weights(self, model: Any, folder: Path) -> None:
        """Load the weights strictly. Raises CheckpointError where they do not fit."""


def model_files() -> ModelFiles:
    """Return the functions that read and write models."""
    return model_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """Training state of a checkpoint."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def in_parts(self) -> bool:
        """Whether ranks wrote weights and optimiser in parts."""
        return (self.folder / WEIGHT_PARTS).is_dir()

    def optimizer(self) -> Mapping[str, Tensor]:
        """Read the complete state of the optimiser. Raises CheckpointError where it is damaged."""
        if self.in_parts:
            return join_parts(self.folder / OPTIMIZER_PARTS)
        try:
            return load_file(self.folder / OPTIMIZER)
        except (OSError, safetensors.SafetensorError) as error:
            raise _unreadable(self.folder, error) from error


def verify(folder: Path) -> None:
    """Compare a checkpoint with its marker: every file with its size and hash; refuse weights that
    are a pickle.

    Raises CheckpointError that names the first file that differs.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist", "not_found")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; checkpoints are folders, and pickles are not loaded", "wrong_type"
        )
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            f"{folder} has no {MARKER}: it is not a complete checkpoint of a medvl run", "missing"
        )
    check_marker(folder)
    for path in folder.rglob("*.safetensors"):
        _refuse_pickle(path)


def read(folder: Path) -> Saved:
    """Read the training state of a checkpoint; call `verify` first.

    Raises CheckpointError where a file is damaged or has another format version.
    """
    try:
        state = parse_json((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / STATE}: expected format {FORMAT}, got {state.get('format')}; start a "
            f"new run",
            "version",
        )
    return Saved(folder=folder, state=state)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder}: train_state cannot be read ({type(error).__name__}: {error})", "malformed"
    )


def write_marker(folder: Path, step: int, files: Mapping[str, Any]) -> None:
    """Write the marker of a complete checkpoint."""
    folders.write_json(folder / MARKER, {"format": FORMAT, "step": step, "files": dict(files)})


class Checkpoints:
    """Checkpoints of one run folder; only rank 0 writes.

    Args:
        run_dir: folder of the run.
        keep_last: number of checkpoints to keep besides the best one.
        run: JSON values that describe the run in the `config.json` of each checkpoint.
    """

    def __init__(self, run_dir: Path, keep_last: int, run: Mapping[str, Any]) -> None:
        self.folder = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._keep_last = keep_last
        self._run = run
        self.failures = 0
        """Number of failed saves and clean-ups."""

    def save(
        self, model: nn.Module, state: Mapping[str, Any], optimizer: Mapping[str, Tensor]
    ) -> Path:
        """Write the checkpoint of `state["step"]`; link it as `last`, and as `best` if
        `state["best"]` has its step.

        Raises errors of the disk and of the model's format; existing checkpoints are not changed.
        """
        folder = self.folder / f"step-{state['step']:08d}"
        with folders.new_folder(folder) as aside:
            self.write_description(model, aside, state, weights=True)
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()},
                aside / OPTIMIZER,
            )
            write_marker(aside, state["step"], inventory(aside))
        self.finish(folder, state["best"]["step"])
        return folder

    def write_description(
        self, model: nn.Module, folder: Path, state: Mapping[str, Any], *, weights: bool = False
    ) -> None:
        """Write all of a checkpoint but the optimiser, the marker and, without `weights`, the
        weights.
        """
        model_files().save(model, folder, {**self._run, "marker": MARKER}, weights=weights)
        if state.get("metrics") and (folder / CARD).is_file():
            add_results(folder, state["metrics"])
        (folder / "train_state").mkdir()
        folders.write_json(folder / STATE, {"format": FORMAT, **state})

    def finish(self, folder: Path, best_step: int | None) -> None:
        """Link a new checkpoint, and remove those that are not kept."""
        self.point(folder, best_step)
        self._prune()

    def attempt(self, save: Callable[[], Path], step: int) -> Path | None:
        """Save; log and count a failure and return None instead of raising: a full disk must not
        end a run.
        """
        try:
            return save()
        except (
            Exception
        ) as error:  # safetensors and tokenizers raise their own types on a full disk
            if isinstance(error, RuntimeError) and worker_error(error) is not None:
                raise  # a loader's worker died during the save; the disk is not the cause
            self.failures += 1
            _log.warning(
                "the checkpoint of step %d could not be saved (%s: %s); training continues with "
                "the previous one, and saving is retried",
                step,
                type(error).__name__,
                error,
            )
            return None

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint folder, valid or not, newest first."""
        return sorted((step for step, _ in self._folders()), reverse=True)

    def at(self, step: int | None) -> Path | None:
        """Return the checkpoint folder of a step, or None."""
        return next((folder for number, folder in self._folders() if number == step), None)

    def newest(self) -> Path | None:
        """Return the newest valid checkpoint, or None without any; rename damaged ones.

        Raises CheckpointError where all checkpoints are damaged: starting over would hide that.
        """
        folders.sweep(self.folder)
        folders.sweep(self._run_dir)
        damaged = []
        for step in self.steps():
            folder = self.folder / f"step-{step:08d}"
            try:
                verify(folder)
            except CheckpointError as error:
                _log.warning("%s; using the previous checkpoint", error)
                damaged.append((folder, str(error)))
                continue
            for broken, _ in damaged:
                self._rename_damaged(broken)
            return folder
        if damaged:
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {self.folder} are damaged (newest: "
                f"{damaged[0][1]}); restore one, or choose another run_dir to start over",
                "malformed",
            )
        return None

    def best(self) -> Path | None:
        """Return the checkpoint that `best` links to, or None."""
        link = self._run_dir / "best"
        return link.resolve() if link.exists() else None

    def point(self, last: Path, best_step: int | None) -> None:
        """Link `last` and `best` to these checkpoints. If the best one could not be saved,
        `best` is not changed.
        """
        folders.point(self._run_dir / "last", last)
        best = self.at(best_step)
        link = self._run_dir / "best"
        if best is not None:
            folders.point(link, best)
        elif link.is_symlink() and not link.exists():
            link.unlink()

    def _folders(self) -> Iterator[tuple[int, Path]]:
        for folder in self.folder.glob("step-*"):
            match = _NAME.fullmatch(folder.name)
            if match and folder.is_dir():
                yield int(match[1]), folder

    def _prune(self) -> None:
        """Remove all but the newest `keep_last` and the best; failures are retried at the next
        save.
        """
        folders.sweep(self.folder)
        best = self.best()
        for step in self.steps()[self._keep_last :]:
            folder = self.at(step)
            if folder is None or (best is not None and folder.samefile(best)):
                continue
            try:
                folders.discard(folder)
            except OSError as error:
                self.failures += 1
                _log.warning(
                    "%s could not be removed (%s); retried at the next save", folder, error
                )

    def _rename_damaged(self, folder: Path) -> None:
        """Keep a damaged checkpoint for inspection, under a name that is not taken for a
        checkpoint.
        """
        aside = folder.with_name(f"damaged-{folder.name}")
        try:
            if aside.exists():
                folders.discard(aside)
            folder.rename(aside)
        except OSError as error:
            self.failures += 1
            _log.warning("%s could not be renamed (%s)", folder, error)


def inventory(folder: Path, files: Iterable[Path] | None = None) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of every file in a folder, or of the given ones, by relative path."""
    return {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in (sorted(folder.rglob("*")) if files is None else files)
        if path.is_file() and path.name != CARD  # owners of the weights may edit the card
    }


def _refuse_pickle(path: Path) -> None:
    """Raise CheckpointError unless the file begins as safetensors do: the header's length (8
    bytes) and a brace.
    """
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:9] != b"{":
        kind = "a pickle" if head[:1] == b"\x80" or head[:2] == b"PK" else "another format"
        raise CheckpointError(
            f"{path} is {kind} with the suffix of safetensors; it is not loaded", "malformed"
        )


# Checkpoints of sharded models that all ranks write at once, each its own part, without gathering
# anything.
#
#     run_dir/checkpoints/step-00001200/
#       config.json, tokenizer/, ...              as in other checkpoints; rank 0 writes them
#       weights/shard-00001-model-..., ...        one file per rank, instead of model.safetensors
#       train_state/state.json, optimizer/        one file per rank, instead of
#       optimizer.safetensors
#       complete.json                             written last, by rank 0, with the hash that each
#       rank made of its files
#
# The folder has a temporary name until all of it is on the disk, as with other checkpoints.


def save_parts(
    checkpoints: Checkpoints,
    model: ParallelModel,
    state: Mapping[str, Any],
    optimizer: Mapping[str, Tensor],
) -> Path:
    """Write the checkpoint of `state["step"]` from all ranks, and link it as `Checkpoints.save`
    does. Collective call.

    Raises on all ranks where one of them fails; existing checkpoints are not changed.
    """
    ranks = model.ranks
    folder = checkpoints.folder / f"step-{state['step']:08d}"
    with contextlib.ExitStack() as stack:  # on rank 0 it removes the new folder after an error

        def begin() -> str:
            aside = stack.enter_context(folders.new_folder(folder))
            checkpoints.write_description(model.whole, aside, state)
            (aside / WEIGHT_PARTS).mkdir()
            (aside / OPTIMIZER_PARTS).mkdir()
            return str(aside)

        aside = Path(ranks.on_main(begin))
        for name, tensors in ((WEIGHT_PARTS, model.weights()), (OPTIMIZER_PARTS, optimizer)):
            write_parts(aside / name, tensors, ranks)
        parts = ranks.on_all(lambda: _inventory_of_rank(aside, ranks.rank))

        def finish() -> None:
            files = {name: entry for part in parts for name, entry in part.items()}
            rest = [
                path for path in aside.rglob("*") if path.relative_to(aside).as_posix() not in files
            ]
            write_marker(aside, state["step"], files | inventory(aside, rest))
            stack.close()
            checkpoints.finish(folder, state["best"]["step"])

        ranks.on_main(finish)
    return folder


def _inventory_of_rank(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of a rank's own files, and flush them to the disk."""
    own = f"shard-{rank + 1:05d}-*"
    files = [path for name in (WEIGHT_PARTS, OPTIMIZER_PARTS) for path in (folder / name).glob(own)]
    for path in files:
        fsync(path)
    return inventory(folder, files)
