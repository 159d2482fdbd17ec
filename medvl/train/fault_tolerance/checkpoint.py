"""Checkpoints of a run.

    run_dir/
      checkpoints/step-00001200/     config.json, model.safetensors, tokenizer/    (the model: `medvl.load` reads it)
                                     train_state/state.json, optimizer.safetensors (the run)
                                     complete.json                                 (sha256 and size of every file)
      last -> checkpoints/step-00001200
      best -> checkpoints/step-00000900

A checkpoint is written under another name, flushed and renamed, its marker last. So whatever happens there is the old
one or the new one, and one that was damaged afterwards is found out by its hashes. Nothing in it needs pickle.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medvl.common import folders
from medvl.common.files import MARKER, check_marker, sha256
from medvl.data.loading.worker_errors import worker_error
from medvl.errors import CheckpointError

_log = logging.getLogger(__name__)

FORMAT = 2
"""Version of `train_state/`; another one is refused."""
STATE = "train_state/state.json"
OPTIMIZER = "train_state/optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


class ModelFiles(Protocol):
    """How a model is written and read: `medvl.models`, or what a test puts in its place."""

    def save(self, model: Any, folder: Path, run: Mapping[str, Any]) -> None:
        """Write the model into an existing folder."""

    def load_weights(self, model: Any, folder: Path) -> None:
        """Load them strictly. Raises CheckpointError where they do not fit."""


def model_files() -> ModelFiles:
    """The one place where training meets the models' own format."""
    from medvl.models import checkpoint

    return checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The part of a checkpoint that is the run's."""

    folder: Path
    state: Mapping[str, Any]
    optimizer: Mapping[str, Tensor]


def verify(folder: Path) -> None:
    """Prove a checkpoint by its marker: every file there, of its size and hash, and no weights that are a pickle.

    Raises CheckpointError that names the first file which is not as it was written.
    """
    if not folder.is_dir():
        kind = "a file: checkpoints are folders, and pickled ones are not loaded" if folder.exists() else "not there"
        raise CheckpointError(f"{folder} is {kind}")
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder} has no {MARKER}: it is no whole checkpoint of a medvl run")
    check_marker(folder)
    for path in folder.rglob("*.safetensors"):
        _refuse_pickle(path)


def read(folder: Path) -> Saved:
    """The run's state of a checkpoint; call `verify` first.

    Raises CheckpointError where the files are no JSON or no safetensors, or of a format that this medvl has not.
    """
    try:
        state = json.loads((folder / STATE).read_text())
        optimizer = load_file(folder / OPTIMIZER)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} has no readable train_state ({type(error).__name__}: {error})") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / STATE}: expected format {FORMAT}, got {state.get('format')}; start a new run", "version"
        )
    return Saved(folder=folder, state=state, optimizer=optimizer)


class Checkpoints:
    """The checkpoints of one run folder; only rank 0 writes."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._run_dir, self._keep_last = run_dir, keep_last
        self.failures = 0
        """Saves and clean-ups that failed."""

    def save(
        self, model: nn.Module, run: Mapping[str, Any], state: Mapping[str, Any], optimizer: Mapping[str, Tensor]
    ) -> Path:
        """Write the checkpoint of `state["step"]`, make it `last`, and `best` where the state says that it is.

        Raises what the disk or the model's own format raises; the checkpoints that are there stay as they are.
        """
        folder = self.folder / f"step-{state['step']:08d}"
        with folders.new_folder(folder) as aside:
            model_files().save(model, aside, run)
            (aside / "train_state").mkdir()
            folders.write_json(aside / STATE, {"format": FORMAT, **state})
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in optimizer.items()}, aside / OPTIMIZER
            )
            folders.write_json(aside / MARKER, {"format": FORMAT, "step": state["step"], "files": _inventory(aside)})
        self.point(folder, state["best"]["step"])
        self._prune()
        return folder

    def attempt(
        self, model: nn.Module, run: Mapping[str, Any], state: Mapping[str, Any], optimizer: Mapping[str, Tensor]
    ) -> Path | None:
        """`save`, but a failure is logged and counted, and None comes back: a full disk must not end a run."""
        try:
            return self.save(model, run, state, optimizer)
        except Exception as error:  # safetensors and tokenizers have error types of their own for a full disk
            if isinstance(error, RuntimeError) and worker_error(error) is not None:
                raise  # a loader's worker died just now: no failure of the disk
            self.failures += 1
            _log.warning(
                "the checkpoint of step %d could not be saved (%s: %s); training goes on, the one before stays, and "
                "saving is tried again",
                *(state["step"], type(error).__name__, error),
            )
            return None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, sound or not, newest first."""
        return sorted((step for step, _ in self._folders()), reverse=True)

    def at(self, step: int | None) -> Path | None:
        """The checkpoint of a step, if it is there."""
        return next((folder for found, folder in self._folders() if found == step), None)

    def newest(self) -> Path | None:
        """The newest sound checkpoint, or None where there is none at all; damaged ones are put aside.

        Raises CheckpointError where there are checkpoints and all of them are damaged: starting over would hide that.
        """
        folders.sweep(self.folder)
        folders.sweep(self._run_dir)
        damaged = []
        for step in self.steps():
            folder = self.folder / f"step-{step:08d}"
            try:
                verify(folder)
            except CheckpointError as error:
                _log.warning("%s; falling back to the checkpoint before it", error)
                damaged.append((folder, str(error)))
                continue
            for broken, _ in damaged:
                self._put_aside(broken)
            return folder
        if damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.folder} is sound (newest: {damaged[0][1]}): "
                "restore one, or choose another run_dir to start over"
            )
        return None

    def best(self) -> Path | None:
        """What the name `best` stands for."""
        link = self._run_dir / "best"
        return link.resolve() if link.exists() else None

    def point(self, last: Path, best_step: int | None) -> None:
        """Let the names `last` and `best` stand for these checkpoints.

        A best one that could not be saved leaves `best` to the one before it.
        """
        folders.point(self._run_dir / "last", last)
        best, link = self.at(best_step), self._run_dir / "best"
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
        """Remove all but the newest `keep_last` and the best; what cannot be removed is tried again next time."""
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
                _log.warning("%s could not be removed (%s); tried again at the next save", folder, error)

    def _put_aside(self, folder: Path) -> None:
        """A damaged checkpoint stays for whoever wants to look at it, under a name that is no checkpoint's."""
        aside = folder.with_name(f"damaged-{folder.name}")
        try:
            if aside.exists():
                folders.discard(aside)
            folder.rename(aside)
        except OSError as error:
            self.failures += 1
            _log.warning("%s could not be put aside (%s)", folder, error)


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in a folder, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _refuse_pickle(path: Path) -> None:
    """A safetensors file begins with the length of its header (8 bytes) and a brace; zips and pickles do not."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:9] != b"{":
        kind = "a pickle" if head[:1] == b"\x80" or head[:2] == b"PK" else "something else"
        raise CheckpointError(f"{path} is {kind} under the name of safetensors: it is not loaded")
