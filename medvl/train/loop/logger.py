"""What a run says about itself: `metrics.jsonl`, TensorBoard, Weights & Biases, a progress bar or lines of log."""

import contextlib
import json
import logging
import math
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medvl.errors import ConfigError
from medvl.train.config import TrainConfig

_log = logging.getLogger(__name__)


class RunLogger:
    """The records of a run. Only rank 0 has one that writes.

    A record is one line of JSON with its `kind` ("train", "valid", "skip") and `step`; what depends on the clock stands
    under `timing`. On resume the records after the resumed step are taken out, so that the file is in the end the one
    of a run that was never interrupted (but for `timing`).

    A disk that refuses records does not end a run: they are kept and written when there is room again.
    """

    def __init__(self, config: TrainConfig, *, step: int, total_steps: int, active: bool) -> None:
        self._total = total_steps
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._bar: Any = None
        if not active:
            return
        if config.wandb is not None:
            self._wandb = _start_wandb(config.wandb, config.run_dir)
        path = config.run_dir / "metrics.jsonl"
        forget_after(path, step)
        self._file = _Lines(path)
        if config.tensorboard and step < total_steps:  # else each start of a finished run leaves an empty file
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=step + 1)
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def record(
        self, kind: str, step: int, values: Mapping[str, Any], timing: Mapping[str, float] | None = None
    ) -> None:
        """Write one record. Numbers that JSON has not (NaN, infinity) become null."""
        if self._file is None:
            return
        row = {"kind": kind, "step": step, **values, **({"timing": dict(timing)} if timing else {})}
        self._file.add(json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False))
        scalars = {
            f"{kind}/{name}": float(value)
            for name, value in (*values.items(), *(timing or {}).items())
            if isinstance(value, (int, float))
        }
        if self._tensorboard is not None:
            self._to_tensorboard(scalars, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars})

    def advance(self) -> None:
        """One step is done: moves the bar."""
        if self._bar is not None:
            self._bar.update()

    def tell(self, step: int, values: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Say how training goes: beside the bar on a terminal, else as a line of log."""
        if self._file is None:
            return
        parts = [f"loss {values['loss']:.4f}"] if "loss" in values else []
        parts += [
            f"lr {values['lr']:.2e}",
            f"{timing['pairs_per_second']:.0f} pairs/s",
            f"data wait {timing['wait_share']:.0%}",
        ]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
        else:
            left = tqdm.format_interval(timing["seconds_left"])
            _log.info("step %d of %d: %s, ETA %s", step, self._total, ", ".join(parts), left)

    def flush(self) -> None:
        """Bring the records to the disk: before a checkpoint that comes after them."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End the record."""
        for part, end in ((self._file, "close"), (self._tensorboard, "close"), (self._wandb, "finish")):
            if part is not None:
                with contextlib.suppress(OSError):  # TensorBoard's writer raises once more what it met before
                    getattr(part, end)()
        if self._bar is not None:
            self._bar.close()

    def _to_tensorboard(self, scalars: Mapping[str, float], step: int) -> None:
        try:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:
            _log.warning("TensorBoard's file cannot be written (%s): it ends here, metrics.jsonl has all", error)
            self._tensorboard = None


class _Lines:
    """A file that lines are added to. Those that the disk refuses are kept, and written before the next ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._refused = False

    def add(self, line: str) -> None:
        """Write a line, or keep it."""
        self._waiting += line.encode() + b"\n"
        self._write()

    def flush(self) -> None:
        """Bring the lines to the disk, as far as it takes them."""
        self._write()
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """The last chance of lines that are kept."""
        self._write()
        self._file.close()
        if self._waiting:
            _log.warning("%s lacks its last %d records", self._path, self._waiting.count(b"\n"))

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._refused:
                _log.warning("%s cannot be written (%s): training goes on, it is tried again", self._path, error)
            self._refused = True
        else:
            self._refused = False


def forget_after(path: Path, step: int) -> None:
    """Take the records after a step out of a file of records, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                continue
        except (ValueError, KeyError, TypeError):
            continue
        kept.append(line)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text("".join(kept))
    aside.replace(path)


@contextlib.contextmanager
def console(active: bool) -> Iterator[None]:
    """Let medvl's log lines appear on stderr for the time of a run, unless the caller has set up logging already."""
    logger = logging.getLogger("medvl")
    if not active or logger.hasHandlers():
        yield
        return
    handler = _BesideTheBar()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _BesideTheBar(logging.Handler):
    """Lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _start_wandb(project: str, run_dir: Path) -> Any:
    """A run of Weights & Biases that goes on where this run folder's last one ended."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError("wandb is set, but it is not installed: pip install 'medvl[wandb]'") from None
    name = run_dir / "wandb-id"
    if not name.exists():
        name.write_text(uuid.uuid4().hex)
    return wandb.init(project=project, id=name.read_text(), name=run_dir.name, dir=run_dir, resume="allow")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
