"""The training loop, for every model.

    step:     micro-batches -> losses -> gradients -> finite? -> clip -> update  (step.py)
    record:   every `log_every` steps
        (logger.py, meters.py)
    validate: loss and evaluators -> best? plateau? early stop?                  (validate.py)
    save:     atomically; after SIGTERM and Ctrl-C too, then the process exits
        (fault_tolerance/checkpoint.py)

A resumed run ends with the same bits as an uninterrupted one under these conditions: the same code,
settings, data and number of ranks, on the same kind of CPU. (Checkpoints hold the number of
threads. On three ranks and more, DDP sums the first step's gradients in another order than later
ones, so there the weights are equal up to rounding.)
"""

import contextlib
import dataclasses
import logging
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from medvl.common.config_io import nearest, to_dict
from medvl.common.files import RunLock, refuse_links, wait_for
from medvl.common.process import console
from medvl.common.seeding import preserve_generators
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.models.base import evaluating
from medvl.schema import Batch
from medvl.train.config import Interval, OptimConfig, Plateau, RewardConfig, TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints
from medvl.train.fault_tolerance.guards import StopSignals, freeze_existing_objects, with_advice
from medvl.train.loop.logger import RunLogger, SpeedMeter
from medvl.train.loop.state import (
    Evaluator,
    RollbackPolicy,
    TrainState,
    resume_path,
    run_evaluators,
    validation_loss,
)
from medvl.train.loop.step import Step, StepResult, parallelize
from medvl.train.optim.optimizer import LearningRate, Precision, build_optimizer
from medvl.train.parallel.distributed import (
    BatchStream,
    RankInfo,
    TrainLoader,
    cpu_cores,
    join,
    machine_settings,
    side_stream,
)
from medvl.train.parallel.model import ParallelModel

if TYPE_CHECKING:
    from medvl.train.rewards.task import RewardTask

_log = logging.getLogger(__name__)
_MAX_EMPTY_UPDATES = 1000
"""Updates without any loss or gradient at the start of a run, where an epoch has more, before it
ends with an error.
"""

_FOLDERS = ("checkpoints", "tensorboard", "wandb")
"""Folders of a run that a training writes into."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a finished run."""

    step: int
    stopped: Literal["finished", "early_stop", "budget"]
    metrics: Mapping[str, float]
    """Metrics of the last validation."""
    best_step: int | None
    best_metric: str
    best_value: float | None
    """Best value of `best_metric`."""
    skipped: int
    """Updates skipped because of non-finite values or a loss spike."""
    save_failures: int
    last: Path
    """Checkpoint of the last step."""
    best: Path | None
    """Best checkpoint that could be saved; None without validation."""

    def __str__(self) -> str:
        """Return a summary in one line."""
        best = (
            ""
            if self.best is None
            else f"; best {self.best_metric} {self.best_value:.4f}: {self.best}"
        )
        return f"{self.stopped} after step {self.step}{best}"


def train(
    model: nn.Module,
    train_loader: TrainLoader,
    *,
    optim: OptimConfig,
    config: TrainConfig,
    valid_loader: Iterable[Batch] | None = None,
    evals: Sequence[Evaluator] = (),
    rewards: RewardConfig | None = None,
    run: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model, or resume an interrupted run: the same call does both.

    Under torchrun each rank makes this call with its own loaders. The run seeds torch's generators
    and restores them at the end.

    Args:
        model: `model(batch) -> Losses`; on the CPU or on its device.
        train_loader: batches of `config.micro_batch` pairs over all ranks.
        optim: optimiser and learning rate.
        config: everything else; all ranks must have access to `run_dir`.
        valid_loader: this rank's share of the validation batches, numbers r, r + W, r + 2 W, ...
            for rank r of W.
        evals: functions of the model in eval mode; called on rank 0 only, while the other ranks
            wait.
        rewards: train a report generator on rewards of its own texts; None: on `model(batch)`.
        run: JSON values for `config.json` of each checkpoint, besides the settings given here:
            recipe, data. `settings` may be the recipe's config dataclass.

    Raises:
        ConfigError: settings that exclude each other or do not apply to the model.
        CheckpointError: the checkpoint to resume is damaged or of another run, or the last one
            cannot be saved.
        TrainingError: `run_dir` is in use, `nonfinite_budget` is exceeded, or a batch does not fit
            into memory.
        LoaderError: a worker process of a loader died or hangs.
        SystemExit: with status 0, after SIGTERM, or SIGINT on several ranks, once a checkpoint is
            saved.
        KeyboardInterrupt: after the first SIGINT (Ctrl-C) on a single rank, once a checkpoint is
            saved.
    """
    # programs often give a string
    config = dataclasses.replace(config, run_dir=Path(config.run_dir))
    _check(train_loader, optim, config, validates=valid_loader is not None or bool(evals))
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(config.device))
        stack.enter_context(
            machine_settings(ranks, config.num_threads, config.deterministic, config.precision)
        )
        stack.enter_context(preserve_generators(ranks.device))
        stack.enter_context(console(ranks.is_main))
        signals = stack.enter_context(StopSignals())

        def take_folder() -> None:
            stack.enter_context(RunLock(config.run_dir))
            refuse_links(config.run_dir, *_FOLDERS)

        ranks.on_main(take_folder)
        training = Training(
            model, train_loader, ranks, optim, config, valid_loader, evals, run, rewards
        )
        stack.callback(training.close)
        stack.enter_context(freeze_existing_objects())
        with with_advice(ranks, config):
            stopped = training.run(signals)
        if stopped == "signal":
            raise (
                KeyboardInterrupt
                if signals.requested == "SIGINT" and ranks.size == 1
                else SystemExit(0)
            )
        return training.result(stopped)


class Training:
    """The parts of a run. Use `train`; `medvl.train.doctor.examine` measures the parts one by one.

    Attributes:
        state: content of a checkpoint, with the model, its ranks and the stream of batches.
        step: the update.
        logger, speed: records and their timing.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: TrainLoader,
        ranks: RankInfo,
        optim: OptimConfig,
        config: TrainConfig,
        valid_loader: Iterable[Batch] | None = None,
        evals: Sequence[Evaluator] = (),
        run: Mapping[str, Any] | None = None,
        rewards: RewardConfig | None = None,
    ) -> None:
        self._valid_loader = valid_loader
        self._evals = evals
        versions = {"torch": str(torch.__version__), "python": platform.python_version()}
        described = dict(run or {})
        settings = described.get("settings")
        if dataclasses.is_dataclass(settings):
            # checkpoints hold these parts elsewhere
            elsewhere = ("model", "optim", "train", "rewards")
            described["settings"] = to_dict(settings, leave_out=elsewhere)
        configs = {
            "optim": optim,
            "train": config,
            "rewards": rewards,
            "recipe": settings,
            "data": getattr(settings, "data", None),
        }
        entries = {
            **described,
            "train": to_dict(config),
            "optim": to_dict(optim),
            "versions": versions,
        }
        if rewards is not None:
            entries["rewards"] = to_dict(rewards)
        parallel = parallelize(model, config, ranks)
        # Before a checkpoint is read: the task may keep a copy of the weights of the start.
        task = None if rewards is None else _reward_task(rewards, parallel)
        stream = BatchStream(
            train_loader, config.accumulate, side_stream(ranks.device, config.channels_last)
        )
        total_steps = config.total_steps(stream.steps_per_epoch)
        optim, config = config.scaled(optim, total_steps)
        config.warn_of_short_run(
            optim, total_steps, validates=valid_loader is not None or bool(evals)
        )
        self.config = config
        rate = LearningRate(optim, total_steps, config.best_mode, stream.steps_per_epoch)
        optimizer = build_optimizer(parallel.trained, optim)
        precision = Precision(config.precision, ranks.device)
        self.state = TrainState.create(
            parallel, stream, optimizer, rate, precision, config, entries, configs, task
        )
        self._checkpoints = Checkpoints(config.run_dir, config.keep_last, entries)
        self._last_saved: int | None = None
        self._save_pending = False
        self._resume()
        self.step = Step(
            parallel,
            optimizer,
            self.state.precision,
            seed=config.seed,
            clip_norm=optim.clip_norm,
            clip_value=optim.clip_value,
            channels_last=config.channels_last,
            grad_cache=config.grad_cache,
            spikes=self.state.spikes,
            rewards=task,
        )
        self.logger = RunLogger(
            config,
            step=self.state.step,
            total_steps=total_steps,
            active=ranks.is_main,
            run={name: value for name, value in entries.items() if name != "train_manifest"}
            | {"model": self.state.identity["model"]},
        )
        self._first_step = self.state.step
        self._learns = False
        self._rollback = RollbackPolicy(self.state, config, self.logger, self._checkpoints)
        self.speed = SpeedMeter(ranks)

    def close(self) -> None:
        """Close the logger, and release the process group before it is destroyed."""
        self.logger.close()
        self.state.model.leave_group()

    def run(self, signals: StopSignals) -> Literal["finished", "early_stop", "budget", "signal"]:
        """Make steps until the run is over or a signal arrives."""
        state = self.state
        if self._last_saved is None:
            # reveals problems with saving now instead of after the first epoch
            self.save(must=True)
        while not state.exhausted:
            rolled_back = self._update()
            if self._due(self.config.log_every):
                self._record()
            if self._due(self.config.validate_every):
                self._validate()
            stopping = state.ranks.any(signals.requested is not None)
            must_save = stopping or state.exhausted
            retry = self._save_pending and self._due(self.config.log_every)
            is_best = state.tracker.best_step == state.step
            if (
                must_save
                or retry
                or is_best
                or rolled_back
                or self._due(self.config.checkpoint_every)
            ):
                self.save(must=must_save)
            if stopping:
                _log.info(
                    "stopped by %s after step %d: checkpoint saved", signals.requested, state.step
                )
                return "signal"
        if state.step >= state.total_steps:
            return "finished"
        return "early_stop" if state.tracker.exhausted else "budget"

    def result(self, stopped: Literal["finished", "early_stop", "budget"]) -> TrainResult:
        """Return the result of the finished run."""
        state = self.state
        if self.config.sharded_checkpoints:
            state.model.gather()  # saves in parts do not update the weights of the given model
        last = self._checkpoints.at(state.step)
        if last is None:
            raise CheckpointError(
                f"{self._checkpoints.folder} has no checkpoint of step {state.step}", "not_found"
            )
        return TrainResult(
            step=state.step,
            stopped=stopped,
            metrics=state.metrics,
            best_step=state.tracker.best_step,
            best_metric=self.config.best_metric,
            best_value=state.tracker.best,
            skipped=state.skipped,
            save_failures=state.ranks.from_main(self._checkpoints.failures),
            last=last,
            best=self._checkpoints.best(),
        )

    def save(self, must: bool) -> None:
        """Save a checkpoint of this step unless it exists.

        With `must` a failed save raises; otherwise it is retried at the next record.
        """
        state = self.state
        if self._last_saved == state.step:
            return
        start = time.perf_counter()
        values = state.state_dict()
        write = (
            self._save_parts
            if self.config.sharded_checkpoints and state.model.sharded
            else self._save_whole
        )
        self._save_pending = not write(values, must)
        if not self._save_pending:
            self._last_saved = state.step
        self.speed.pause(time.perf_counter() - start)

    def _save_whole(self, values: Mapping[str, Any], must: bool) -> bool:
        """Gather the state of all ranks and save it on rank 0; return whether it was saved."""
        state = self.state
        checkpoints = self._checkpoints
        state.model.gather()
        tensors = state.optimizer_tensors()

        def write() -> Path:
            return checkpoints.save(state.model.whole, values, tensors)

        def on_main() -> bool:
            self.logger.flush()
            return (write() if must else checkpoints.attempt(write, state.step)) is not None

        return bool(state.ranks.on_main(on_main))

    def _save_parts(self, values: Mapping[str, Any], must: bool) -> bool:
        """Save the part of every rank; return whether all parts were saved."""
        # torch's part of it takes seconds
        from medvl.train.fault_tolerance.checkpoint import save_parts

        state = self.state
        state.ranks.on_main(self.logger.flush)

        def write() -> Path:
            return save_parts(self._checkpoints, state.model, values, state.optimizer_parts())

        return (write() if must else self._checkpoints.attempt(write, state.step)) is not None

    def _resume(self) -> None:
        """Restore the checkpoint that this run continues, if there is one; rank 0 chooses it."""
        state = self.state
        path = state.ranks.on_main(self._find_checkpoint)
        own = {
            "settings": state.identity,
            "batches": state.stream.loader.steps_per_epoch,
            "steps": state.total_steps,
        }
        state.ranks.check_equal(own)
        if path is None:
            return
        folder = Path(path)
        wait_for(folder)
        saved = checkpoint.read(folder)
        state.restore(saved)
        if self.config.num_threads is None and state.ranks.device.type == "cpu":
            # another number would round differently
            torch.set_num_threads(min(saved.state["threads"], cpu_cores()))
        if folder.resolve().parent == self._checkpoints.folder.resolve():
            self._last_saved = state.step
            state.ranks.on_main(lambda: self._checkpoints.point(folder, state.tracker.best_step))
        _log.info("resuming from %s", folder)

    def _find_checkpoint(self) -> str | None:
        own = self._checkpoints.newest()
        start = resume_path(self.config.resume, own, self.config.run_dir)
        if start is None:
            return None
        if start != own:
            checkpoint.verify(start)
        return str(start)

    def _update(self) -> bool:
        """Make and count one update; return whether the weights were rolled back."""
        state = self.state
        step = self.state.step
        batches = state.stream.take(step)
        count = state.stream.micro_batches(step)
        result = self.step(step, state.rate.at(step), batches, count)
        state.step += 1
        self.logger.advance()
        self.speed.add(result.pairs)
        self._check_learning(result)
        if result.updated:
            state.streak = 0
            state.meter.add(result)
        elif result.scale_search:
            state.overflows += 1
        else:
            return self._rollback(result, step)
        return False

    def _check_learning(self, result: StepResult) -> None:
        """Raise TrainingError where no update of the first epoch, or of the whole run, had a loss
        or a gradient.

        Losses over no sample are 0, as those of a dual-encoder on images without texts: nothing
        would be trained.
        """
        if self._learns:
            return
        state = self.state
        steps = self.state.step - self._first_step
        losses = torch.stack([loss.total for loss in result.losses])
        self._learns = state.ranks.any(bool(losses.any()) or bool(result.grad_norm))
        is_early = steps < min(state.stream.steps_per_epoch, _MAX_EMPTY_UPDATES)
        if self._learns or (is_early and (self._first_step or not state.exhausted)):
            return
        message = (
            f"losses and gradients of the first {steps} updates are 0: no sample has what "
            f"the model learns from"
        )
        advice = (
            "a pair needs an image and a text; see the counts of `medvl verify`, and the "
            "fields of the text policy"
        )
        raise TrainingError(f"{message}; {advice}", "empty", field="data.train")

    def _record(self) -> None:
        state = self.state
        timing = self.speed.read(state.stream.wait_seconds, state.total_steps - state.step)
        values = {
            "epoch": state.step / state.stream.steps_per_epoch,
            **state.meter.read(),
            "lr": state.rate.at(state.step - 1),
            "skipped": state.skipped,
            "overflows": state.overflows,
            **({} if state.rewards is None else state.rewards.state_dict()),
        }
        if state.ranks.device.type == "cuda":
            timing["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        self.logger.record("train", state.step, values, timing)
        self.logger.log_progress(state.step, values, timing)

    def _validate(self) -> None:
        """Compute the validation loss and the evaluators' metrics; update the best metric and
        the learning rate.
        """
        if self._valid_loader is None and not self._evals:
            return
        start = time.perf_counter()
        state = self.state
        state.metrics = self._validation_metrics()
        metric = self.config.best_metric
        if metric not in state.metrics:
            self.save(must=False)
            message = (
                f"no validation returns the metric {metric!r}: {nearest(metric, state.metrics)}"
            )
            advice = f"with another best_metric the same command continues after step {state.step}"
            raise ConfigError(f"{message}; {advice}", "unknown_name", field="best_metric")
        better = state.tracker.observe(state.step, state.metrics[metric])
        lowered = state.rate.observe(state.metrics[metric])
        self.logger.record("valid", state.step, state.metrics)
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in state.metrics.items())
        notes = ["best so far"] * better + ["learning rate lowered"] * lowered
        _log.info(
            "validation after step %d: %s%s",
            state.step,
            metrics,
            f" ({', '.join(notes)})" if notes else "",
        )
        self.speed.pause(time.perf_counter() - start)

    def _validation_metrics(self) -> dict[str, float]:
        state = self.state
        losses: dict[str, float] = {}
        with state.model.evaluation() as model, evaluating(model):
            if self._valid_loader is not None:
                context = (state.ranks, state.precision, self.config.seed, self.step.place)
                losses = validation_loss(model, self._valid_loader, *context)
            metrics: dict[str, float] = state.ranks.on_main(
                lambda: run_evaluators(model, self._evals)
            )
        return losses | metrics

    def _due(self, interval: Interval) -> bool:
        """Return whether this step ends an interval. The last step of a run ends all of them."""
        every = self.state.stream.steps_per_epoch if interval == "epoch" else interval
        return self.state.step % every == 0 or self.state.exhausted


def _check(loader: TrainLoader, optim: OptimConfig, config: TrainConfig, validates: bool) -> None:
    if loader.global_batch != config.micro_batch:
        message = (
            f"expected {config.micro_batch} pairs per batch of the train loader, got "
            f"{loader.global_batch}"
        )
        raise ConfigError(
            f"{message}; open it with TrainConfig.micro_batch", "mismatch", field="global_batch"
        )
    plateau = isinstance(optim.schedule, Plateau)
    early_stop = config.early_stop_patience is not None
    for field, is_needed in (("schedule", plateau), ("early_stop_patience", early_stop)):
        if is_needed and not validates:
            message = (
                f"{field} depends on a validation metric; give train() a valid_loader or evals"
            )
            raise ConfigError(message, "conflict", field=field)


def _reward_task(rewards: RewardConfig, parallel: ParallelModel) -> "RewardTask":
    """Return the task, whose import brings report generators, which other runs do not need."""
    from medvl.train.rewards.task import RewardTask

    return RewardTask(rewards, parallel.whole, sharded=parallel.sharded)
