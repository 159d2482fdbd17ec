"""Logging of a run: `metrics.jsonl`, TensorBoard, Weights & Biases, a progress bar or log lines."""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from medvl.common.files import open_own, write_atomic
from medvl.errors import ConfigError, TrainingError
from medvl.train.config import TrainConfig
from medvl.train.loop.step import StepResult
from medvl.train.parallel.distributed import RankInfo

_log = logging.getLogger(__name__)

_REPORTED = (
    "albumentations",
    "huggingface_hub",
    "joblib",
    "orjson",
    "sklearn",
    "timm",
    "torchvision",
    "transformers",
)
"""Libraries that workers of a loader may import, and whose first import Weights & Biases reports
once a run has begun, which ends a forked process with an error. They are imported before.
"""


class RunLogger:
    """Writer of a run's records; it writes on rank 0 only.

    A record is one line of JSON with its `kind` ("train", "valid", "skip", "rollback") and `step`;
    values that depend on the clock are under `timing`. On resume the records after the resumed step
    are removed, so that the final file equals that of an uninterrupted run except for `timing`.
    `run` are the settings that Weights & Biases shows.

    A full disk does not end a run: records are buffered and written when there is space again.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        step: int,
        total_steps: int,
        active: bool,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._total = total_steps
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._bar: Any = None
        if not active:
            return
        if config.wandb is not None:
            self._wandb = _start_wandb(config.wandb, config.run_dir, run or {})
        path = config.run_dir / "metrics.jsonl"
        self._file = _BufferedLines(path, step)
        # a finished run that is started again needs no empty file
        if config.tensorboard and step < total_steps:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(config.run_dir / "tensorboard"), purge_step=step + 1
            )
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, Any],
        timing: Mapping[str, float] | None = None,
    ) -> None:
        """Write one record. NaN and infinity, which JSON lacks, become null."""
        if self._file is None:
            return
        row = {"kind": kind, "step": step, **values, **({"timing": dict(timing)} if timing else {})}
        self._file.add(
            json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False)
        )
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
        """Advance the progress bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def log_progress(
        self, step: int, values: Mapping[str, float], timing: Mapping[str, float]
    ) -> None:
        """Show the progress: beside the bar on a terminal, else as a log line."""
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
        """Flush the records to the disk, before a checkpoint that follows them."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close all files and the bar."""
        for writer, close in (
            (self._file, "close"),
            (self._tensorboard, "close"),
            (self._wandb, "finish"),
        ):
            if writer is not None:
                # TensorBoard's writer raises its earlier error again
                with contextlib.suppress(OSError):
                    getattr(writer, close)()
        if self._bar is not None:
            self._bar.close()

    def _to_tensorboard(self, scalars: Mapping[str, float], step: int) -> None:
        try:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:
            _log.warning(
                "the TensorBoard file cannot be written (%s); metrics.jsonl has all records", error
            )
            self._tensorboard = None


class _BufferedLines:
    """Records of a run up to a step, to which lines are appended. Lines that cannot be written are
    buffered and written before the next ones.
    """

    def __init__(self, path: Path, step: int) -> None:
        remove_records_after(path, step)
        self._path = path
        self._file = open_own(path, buffering=0)
        self._buffer = b""
        self._failing = False

    def add(self, line: str) -> None:
        """Write a line, or buffer it."""
        self._buffer += line.encode() + b"\n"
        self._write()

    def flush(self) -> None:
        """Flush the lines to the disk as far as possible."""
        self._write()
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write buffered lines and close."""
        self._write()
        self._file.close()
        if self._buffer:
            _log.warning(
                "the last %d records could not be written to %s",
                self._buffer.count(b"\n"),
                self._path,
            )

    def _write(self) -> None:
        try:
            while self._buffer:
                self._buffer = self._buffer[self._file.write(self._buffer) :]
        except OSError as error:
            if not self._failing:
                _log.warning(
                    "%s cannot be written (%s); training continues and writing is retried",
                    self._path,
                    error,
                )
            self._failing = True
        else:
            self._failing = False


def remove_records_after(path: Path, step: int) -> None:
    """Remove the records after a step from a file, and a truncated last line."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                continue
        except (ValueError, KeyError, TypeError):
            continue
        lines.append(line)
    write_atomic(path, "".join(lines))


def _start_wandb(project: str, run_dir: Path, settings: Mapping[str, Any]) -> Any:
    """Start a run of Weights & Biases, or continue the one of this run folder, with the settings
    as its config.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError(
            "wandb is set, but not installed; pip install 'medvl[wandb]'", "missing", field="wandb"
        ) from None
    for name in _REPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    id_file = run_dir / "wandb-id"
    if not id_file.exists():
        write_atomic(id_file, uuid.uuid4().hex)
    return wandb.init(
        project=project,
        name=run_dir.name,
        id=id_file.read_text(),
        resume="allow",
        dir=run_dir,
        config=dict(settings),
        allow_val_change=True,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Meters of losses, speed and the best validation.


class LossMeter:
    """Running sums of losses and gradient norms on the device; read once per record, never in a
    step.

    They are part of a checkpoint, so that the first record after a resumed step equals that of an
    uninterrupted run.
    """

    def __init__(self, ranks: RankInfo) -> None:
        self._ranks = ranks
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._steps = 0

    def add(self, result: StepResult) -> None:
        """Add an update. Raises TrainingError where the model returns other terms than before."""
        rows = [
            torch.stack([losses.total, *losses.terms.values()]).double() for losses in result.losses
        ]
        values = torch.cat([torch.stack(rows).mean(dim=0), result.grad_norm.double().reshape(1)])
        names = ["loss", *(f"loss/{name}" for name in result.losses[0].terms), "grad_norm"]
        if self._sums is None or not self._names:
            self._names = names
            self._sums = torch.zeros_like(values)
        if names != self._names:
            raise TrainingError(
                f"the model must return the same loss terms in each step, got {names} after "
                f"{self._names}",
                "mismatch",
            )
        self._sums += values
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Return means over steps and ranks since the last call; empty without an update.
        Collective call.
        """
        parts = self._ranks.exchange(self._local())
        names = parts[0]["names"]
        steps = sum(part["steps"] for part in parts)
        self._sums = None
        self._steps = 0
        if not steps:
            return {}
        return {
            name: sum(part["sums"][i] for part in parts) / steps for i, name in enumerate(names)
        }

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the sums of all ranks as JSON values. Collective call."""
        return self._ranks.exchange(self._local())

    def load_state_dict(self, parts: list[dict[str, Any]]) -> None:
        """Restore the sums of `state_dict`; with another number of ranks the meter starts empty."""
        if len(parts) != self._ranks.size:
            return
        own = parts[self._ranks.rank]
        self._names = list(own["names"])
        self._steps = own["steps"]
        self._sums = (
            torch.tensor(own["sums"], dtype=torch.float64, device=self._ranks.device)
            if own["steps"]
            else None
        )

    def _local(self) -> dict[str, Any]:
        sums = self._sums.tolist() if self._sums is not None else []
        return {"names": self._names, "steps": self._steps, "sums": sums}


class SpeedMeter:
    """Pairs per second, share of time spent waiting for data, and remaining time."""

    def __init__(self, ranks: RankInfo) -> None:
        self._ranks = ranks
        self._pairs = self._steps = 0
        self._waited = 0.0
        self._started = time.perf_counter()

    def add(self, pairs: int) -> None:
        """Add a step."""
        self._pairs += pairs
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Exclude time that was not spent on steps: validation, checkpoints."""
        self._started += seconds

    def read(self, wait_seconds: float, steps_left: int) -> dict[str, float]:
        """Return the figures since the last call. Collective call.

        Args:
            wait_seconds: total time spent waiting for data since the start.
            steps_left: steps until the end of the run.
        """
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        waited = wait_seconds - self._waited
        parts = self._ranks.exchange([self._pairs, waited])
        steps = self._steps
        self._waited = wait_seconds
        self._pairs = self._steps = 0
        self._started = time.perf_counter()
        return {
            "pairs_per_second": sum(pairs for pairs, _ in parts) / elapsed,
            "wait_share": max(waited for _, waited in parts) / elapsed,
            "seconds_per_step": elapsed / max(steps, 1),
            "seconds_left": elapsed / max(steps, 1) * steps_left,
        }


@dataclasses.dataclass(kw_only=True)
class BestTracker:
    """Best validation so far by one metric, and the number of validations since."""

    mode: Literal["min", "max"]
    patience: int | None
    best: float | None = None
    best_step: int | None = None
    bad: int = 0
    """Validations in a row without improvement."""

    def observe(self, step: int, value: float) -> bool:
        """Record a validation; return whether it is the best so far. A NaN never is."""
        better = math.isfinite(value) and (
            self.best is None or (value < self.best if self.mode == "min" else value > self.best)
        )
        if better:
            self.best = value
            self.best_step = step
            self.bad = 0
        else:
            self.bad += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether training should stop early."""
        return self.patience is not None and self.bad >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"value": self.best, "step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best = state["value"]
        self.best_step = state["step"]
        self.bad = state["bad"]
