"""The loop, for every model alike.

    step:     micro-batches -> losses -> gradients -> finite? -> clip -> update      (step.py)
    record:   every `log_every` steps
    validate: loss and evaluators -> best? plateau? early stop?
    save:     atomically; on SIGTERM too, then the process ends with status 0

What a resumed run needs to end with the same bits as an undisturbed one: the same code, settings, data and number of
ranks, on the same kind of CPU with the same number of threads. (On three ranks and more DDP sums its first step's
gradients in another order than the later ones', so there "the same" means to rounding.)
"""

import contextlib
import dataclasses
import functools
import logging
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from medvl.common.config_io import nearest, to_dict
from medvl.common.folders import RunLock, wait_for
from medvl.common.seeding import caller_keeps_generators
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch
from medvl.train.config import Interval, OptimConfig, Plateau, TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints
from medvl.train.fault_tolerance.error_advice import explained
from medvl.train.fault_tolerance.gc_freeze import garbage_is_new
from medvl.train.fault_tolerance.nonfinite import LossSpikeDetector, StopSignals
from medvl.train.loop.logger import RunLogger, console
from medvl.train.loop.meters import Speed, Tracker, Window
from medvl.train.loop.prepare import prepare_ranks
from medvl.train.loop.rollback import RollbackPolicy
from medvl.train.loop.state import TrainState, identity, resume_path
from medvl.train.loop.step import Step, StepResult
from medvl.train.loop.validate import Evaluator, run_evaluators, share_buffers, validation_loss
from medvl.train.optim.optimizer import build_optimizer
from medvl.train.optim.precision import Precision
from medvl.train.optim.schedule import LearningRate
from medvl.train.parallel.batches import BatchStream, TrainLoader
from medvl.train.parallel.distributed import RankInfo, distribute, join, machine_settings
from medvl.train.parallel.prefetch import side_stream

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    step: int
    stopped: Literal["finished", "early_stop"]
    metrics: Mapping[str, float]
    """Of the last validation."""
    best_step: int | None
    best_metric: str
    best_value: float | None
    """Of `best_metric`."""
    skipped: int
    """Updates left out because they were not finite, or their loss a spike."""
    save_failures: int
    last: Path
    """The checkpoint of the last step."""
    best: Path | None
    """The best one that could be saved; None where nothing was validated."""

    def __str__(self) -> str:
        """In one line, for the end of a recipe."""
        best = "" if self.best is None else f"; best {self.best_metric} {self.best_value}: {self.best}"
        return f"{self.stopped} after step {self.step}{best}"


def train(
    model: nn.Module,
    train_loader: TrainLoader,
    *,
    optim: OptimConfig,
    config: TrainConfig,
    valid_loader: Iterable[Batch] | None = None,
    evals: Sequence[Evaluator] = (),
    run: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model, or go on with a run that was interrupted: the same call does both.

    Under torchrun each rank makes this call with its own loaders. The run owns torch's generators while it lasts and
    leaves them as they were.

    Args:
        model: `model(batch) -> Losses`; on the CPU or already on its device.
        train_loader: batches of `config.micro_batch` pairs over all ranks.
        optim: optimiser and learning rate.
        config: everything else; `run_dir` must be seen by all ranks.
        valid_loader: this rank's share of the validation batches, numbers r, r + W, r + 2 W, ... for rank r of W.
        evals: functions of the model in eval mode; called on rank 0 only, the other ranks wait as long as it takes.
        run: what `config.json` of each checkpoint should tell besides the settings of the training: recipe, data.

    Raises:
        ConfigError: settings that do not go together.
        CheckpointError: the checkpoint to go on from is damaged or of another run, or the last one cannot be saved.
        TrainingError: `run_dir` is in use, more updates left out than `nonfinite_budget`, no memory for a batch.
        LoaderError: a loader's worker process died or hangs.
        SystemExit: with status 0, after SIGTERM or the first SIGINT and the checkpoint that follows it.
    """
    _check(train_loader, optim, config, validates=valid_loader is not None or bool(evals))
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(join(config.device))
        stack.enter_context(machine_settings(world, config.num_threads, config.deterministic, config.precision))
        stack.enter_context(caller_keeps_generators(world.device))
        stack.enter_context(console(world.is_main))
        stop = stack.enter_context(StopSignals())
        world.on_main(functools.partial(_lock, stack, config.run_dir))
        training = Training(model, train_loader, world, optim, config, valid_loader, evals, run or {})
        stack.callback(training.journal.close)
        stack.enter_context(garbage_is_new())
        with explained(world, config):
            stopped = training.until_the_end(stop)
        if stopped == "signal":
            raise SystemExit(0)
        return training.result(stopped)


class Training:
    """The parts of a run, put together. `train` is how it is used; `medvl.train.doctor.examine` measures the parts."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: TrainLoader,
        world: RankInfo,
        optim: OptimConfig,
        config: TrainConfig,
        valid_loader: Iterable[Batch] | None,
        evals: Sequence[Evaluator],
        run: Mapping[str, Any],
    ) -> None:
        self.model, self.world, self.config = model, world, config
        self.valid_loader, self.evals = valid_loader, evals
        self.run = {**run, "train": to_dict(config), "optim": to_dict(optim), "versions": _versions()}
        self.shards = prepare_ranks(model, config, world)
        self.feed = BatchStream(train_loader, config.accumulate, side_stream(world.device, config.channels_last))
        limits = [config.steps, config.epochs and config.epochs * self.feed.steps_per_epoch]
        self.total_steps = min(limit for limit in limits if limit is not None)
        self.state = self._first_state(optim)
        self.checkpoints = Checkpoints(config.run_dir, config.keep_last)
        self.last_saved: int | None = None
        self.save_owed = False
        self._resume()
        self.step = Step(
            distribute(model, world, config.find_unused_parameters) if self.shards is None else self.shards.module,
            self.state.optimizer,
            self.state.precision,
            world,
            seed=config.seed,
            clip_norm=optim.clip_norm,
            channels_last=config.channels_last,
            grad_cache=config.grad_cache,
            spikes=self.state.spikes,
            shards=self.shards,
        )
        self.journal = RunLogger(config, step=self.state.step, total_steps=self.total_steps, active=world.is_main)
        self.rescue = RollbackPolicy(self.state, config, self.journal, self.checkpoints)
        self.speed = Speed(world)

    def until_the_end(self, stop: StopSignals) -> Literal["finished", "early_stop", "signal"]:
        """Steps until the run is over, or asked to stop."""
        state = self.state
        if self.last_saved is None:
            self.save(must=True)  # what cannot be saved at all should be known now, not after the first epoch
        while state.step < self.total_steps and not state.tracker.exhausted:
            step = state.step
            batches, count = self.feed.take(step), self.feed.micro_batches(step)
            outcome = self.step(step, state.rate.at(step), batches, count)
            state.step += 1
            went_back = self._account(outcome, step)
            if self._due(self.config.log_every):
                self._record()
            if self._due(self.config.validate_every):
                self._validate()
            ends = state.step == self.total_steps or state.tracker.exhausted
            stopping = self.world.any(stop.requested is not None)
            owed = self.save_owed and self._due(self.config.log_every)
            is_best = state.tracker.best_step == state.step
            if ends or stopping or owed or is_best or went_back or self._due(self.config.checkpoint_every):
                self.save(must=ends or stopping)
            if stopping:
                _log.info("stopped by %s after step %d: the checkpoint is saved", stop.requested, state.step)
                return "signal"
        return "early_stop" if state.step < self.total_steps else "finished"

    def result(self, stopped: Literal["finished", "early_stop"]) -> TrainResult:
        """How it went."""
        tracker = self.state.tracker
        last = self.checkpoints.at(self.state.step)
        if last is None:
            raise CheckpointError(f"the checkpoint of step {self.state.step} is not in {self.checkpoints.folder}")
        return TrainResult(
            step=self.state.step,
            stopped=stopped,
            metrics=self.state.metrics,
            best_step=tracker.best_step,
            best_metric=self.config.best_metric,
            best_value=tracker.best,
            skipped=self.state.skipped,
            save_failures=self.world.from_main(self.checkpoints.failures),
            last=last,
            best=self.checkpoints.best(),
        )

    def _first_state(self, optim: OptimConfig) -> TrainState:
        config, world = self.config, self.world
        rate = LearningRate(schedule=optim.schedule, lr=optim.lr, total_steps=self.total_steps, mode=config.best_mode)
        trained = self.model if self.shards is None else self.shards.module
        return TrainState(
            model=self.model,
            optimizer=build_optimizer(trained, optim),
            precision=Precision(config.precision, world.device),
            feed=self.feed,
            rate=rate,
            tracker=Tracker(mode=config.best_mode, patience=config.early_stop_patience),
            window=Window(world),
            world=world,
            identity=identity(self.model, optim, config, rate),
            spikes=None if config.spike_factor is None else LossSpikeDetector(config.spike_factor),
            shards=self.shards,
        )

    def _resume(self) -> None:
        """Go to the checkpoint that this run continues, if there is one; rank 0 decides which."""
        found = self.world.on_main(self._find_checkpoint)
        self._agree()
        if found is None:
            return
        folder = Path(found)
        wait_for(folder)
        self.state.restore(checkpoint.read(folder))
        if folder.resolve().parent == self.checkpoints.folder.resolve():
            self.last_saved = self.state.step
            self.world.on_main(lambda: self.checkpoints.point(folder, self.state.tracker.best_step))
        _log.info("going on from %s", folder)

    def _find_checkpoint(self) -> str | None:
        own = self.checkpoints.newest()
        chosen = resume_path(self.config.resume, own, self.config.run_dir)
        if chosen is None:
            return None
        if chosen != own:
            checkpoint.verify(chosen)
        return str(chosen)

    def _agree(self) -> None:
        """Raises TrainingError where the ranks are not about to do the same."""
        mine = {"settings": self.state.identity, "batches": self.feed.loader.steps_per_epoch, "steps": self.total_steps}
        for rank, theirs in enumerate(self.world.exchange(mine)):
            if theirs != mine:
                differing = [name for name in mine if theirs[name] != mine[name]]
                raise TrainingError(
                    f"ranks {self.world.rank} and {rank} differ in {', '.join(differing)}: "
                    "start all with the same command and data"
                )

    def _account(self, outcome: StepResult, step: int) -> bool:
        """Count an update, or one that was skipped; True where the weights went back to an earlier checkpoint."""
        self.journal.advance()
        self.speed.add(outcome.pairs)
        if outcome.updated:
            self.state.streak = 0
            self.state.window.add(outcome)
            return False
        if outcome.scale_search:
            self.state.overflows += 1
            return False
        return self.rescue(outcome, step)

    def _record(self) -> None:
        state = self.state
        timing = self.speed.read(self.feed.wait_seconds, self.total_steps - state.step)
        values = {
            "epoch": state.step / self.feed.steps_per_epoch,
            **state.window.read(),
            "lr": state.rate.at(state.step - 1),
            "skipped": state.skipped,
            "overflows": state.overflows,
        }
        if self.world.device.type == "cuda":
            timing["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        self.journal.record("train", state.step, values, timing)
        self.journal.tell(state.step, values, timing)

    def _validate(self) -> None:
        """Validation loss and evaluators; the metric that counts goes to the tracker and the learning rate."""
        if self.valid_loader is None and not self.evals:
            return
        started = time.perf_counter()
        share_buffers(self.state.trained, self.world)
        results: dict[str, float] = {}
        with self.state.whole() as model, evaluating(model):
            if self.valid_loader is not None:
                results = validation_loss(
                    model,
                    self.valid_loader,
                    world=self.world,
                    precision=self.state.precision,
                    seed=self.config.seed,
                    place=self.step.place,
                )
            found = self.world.on_main(lambda: run_evaluators(model, self.evals))
        results |= found
        metric = self.config.best_metric
        if metric not in results:
            raise ConfigError(f"no validation gives best_metric {metric!r}: {nearest(metric, results)}")
        state = self.state
        state.metrics = results
        better = state.tracker.observe(state.step, results[metric])
        lowered = state.rate.observe(results[metric])
        self.journal.record("valid", state.step, results)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        notes = ["the best so far"] * better + ["the learning rate is lowered"] * lowered
        _log.info("validation after step %d: %s%s", state.step, shown, f" ({', '.join(notes)})" if notes else "")
        self.speed.pause(time.perf_counter() - started)

    def save(self, must: bool) -> None:
        """Save this step, unless it is saved. A failure is only then an error when there is no later chance."""
        if self.last_saved == self.state.step:
            return
        started = time.perf_counter()
        self.state.gather()
        state, tensors = self.state.state_dict(), self.state.tensors()

        def write() -> bool:
            self.journal.flush()
            save = self.checkpoints.save if must else self.checkpoints.attempt
            return save(self.model, self.run, state, tensors) is not None

        self.save_owed = not self.world.on_main(write)
        if not self.save_owed:
            self.last_saved = self.state.step
        self.speed.pause(time.perf_counter() - started)

    def _due(self, interval: Interval) -> bool:
        """Whether something that is done every so often is to be done after this step. Always after the last one."""
        every = self.feed.steps_per_epoch if interval == "epoch" else interval
        return self.state.step % every == 0 or self.state.step == self.total_steps


def _lock(stack: contextlib.ExitStack, run_dir: Path) -> None:
    """Keep other runs out of the folder until the stack is left."""
    stack.enter_context(RunLock(run_dir))


def _check(loader: TrainLoader, optim: OptimConfig, config: TrainConfig, validates: bool) -> None:
    if loader.global_batch != config.micro_batch:
        raise ConfigError(
            f"the train loader gives {loader.global_batch} pairs over all ranks, but global_batch "
            f"{config.global_batch} in {config.accumulate} micro-batches asks for {config.micro_batch}: "
            "open it with TrainConfig.micro_batch"
        )
    if not validates and isinstance(optim.schedule, Plateau):
        raise ConfigError("a Plateau schedule follows a validation metric: give train() a valid_loader or evals")
    if not validates and config.early_stop_patience is not None:
        raise ConfigError("early_stop_patience follows a validation metric: give train() a valid_loader or evals")


def _versions() -> dict[str, str]:
    return {"torch": str(torch.__version__), "python": platform.python_version()}
