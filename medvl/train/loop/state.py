"""Everything of a run that a checkpoint must hold, and whether a checkpoint is one of this run."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medvl.common.config_io import differences, to_dict
from medvl.common.seeding import RULE
from medvl.errors import CheckpointError, ConfigError
from medvl.train.config import OptimConfig, Plateau, TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Saved
from medvl.train.fault_tolerance.nonfinite import LossSpikeDetector
from medvl.train.loop.meters import Tracker, Window
from medvl.train.optim.optimizer import load_optimizer_tensors, optimizer_tensors
from medvl.train.optim.precision import Precision
from medvl.train.optim.schedule import LearningRate
from medvl.train.parallel.batches import BatchStream
from medvl.train.parallel.distributed import RankInfo

if TYPE_CHECKING:
    from medvl.train.parallel.fsdp import FSDPModel

_log = logging.getLogger(__name__)

_DECIDES = ("seed", "global_batch", "accumulate", "grad_cache", "precision")
"""Settings of the training that decide its weights whatever the others are."""


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """What changes as a run goes on. No generator states: the steps' randomness follows from their number."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    feed: BatchStream
    rate: LearningRate
    tracker: Tracker
    window: Window
    world: RankInfo
    identity: Mapping[str, Any]
    spikes: LossSpikeDetector | None = None
    shards: "FSDPModel | None" = None
    """Of a sharded run: its model is then a copy in host memory, what is trained are the shards."""
    step: int = 0
    """Updates done or skipped."""
    skipped: int = 0
    """Updates skipped because they were not finite, or their loss a spike."""
    streak: int = 0
    """Of these, how many in a row the last ones are."""
    rollbacks: int = 0
    """Times that the weights went back to an earlier checkpoint."""
    overflows: int = 0
    """Updates skipped while fp16's loss scale was searched for."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of the last validation."""

    def state_dict(self) -> dict[str, Any]:
        """The part that JSON holds. A call of all ranks."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "overflows": self.overflows,
            "streak": self.streak,
            "rollbacks": self.rollbacks,
            "spikes": None if self.spikes is None else self.spikes.state_dict(),
            "metrics": {name: value if value == value else None for name, value in self.metrics.items()},
            "schedule": self.rate.state_dict(),
            "scaler": self.precision.state_dict(),
            "loader": self.feed.state_dict(),
            "best": self.tracker.state_dict(),
            "window": self.window.state_dict(),
            "identity": self.identity,
            "world_size": self.world.size,
        }

    @property
    def trained(self) -> nn.Module:
        """The model whose parameters the optimiser has."""
        return self.model if self.shards is None else self.shards.module

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The model with the weights of now, on the device within this context. A call of all ranks."""
        if self.shards is None:
            yield self.model
        else:
            with self.shards.on_device():
                yield self.model

    def gather(self) -> None:
        """The model gets the weights of now, if it has not. A call of all ranks."""
        if self.shards is not None:
            self.shards.gather()

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's part; of a sharded run on rank 0 only, but a call of all ranks."""
        tensors = optimizer_tensors(self.optimizer, self.trained)
        return tensors if self.shards is None else self.shards.full_state(tensors)

    def restore(self, saved: Saved) -> None:
        """Go on from a checkpoint: model, optimiser and all else.

        Raises CheckpointError where it is the checkpoint of another run, naming what differs.
        """
        check_identity(saved, self.identity)
        state = saved.state
        if state["world_size"] != self.world.size:
            _log.warning(
                "the checkpoint is of a run on %d ranks, this one has %d: the batches are the same, but sums are "
                "rounded in another order, so the weights will not be equal bit for bit",
                *(state["world_size"], self.world.size),
            )
        try:
            self.feed.loader.load_state_dict(state["loader"])
        except ConfigError as error:
            raise CheckpointError(f"{saved.folder} does not go with this data: {error}") from error
        self.restore_weights(saved)
        self.rate.load_state_dict(state["schedule"])
        self.tracker.load_state_dict(state["best"])
        self.window.load_state_dict(state["window"])
        self.step, self.skipped, self.overflows = state["step"], state["skipped"], state["overflows"]
        self.streak, self.rollbacks = state.get("streak", 0), state.get("rollbacks", 0)  # unknown to older checkpoints
        if self.spikes is not None:
            self.spikes.load_state_dict(state["spikes"])
        self.metrics = {name: float("nan") if value is None else value for name, value in state["metrics"].items()}

    def restore_weights(self, saved: Saved) -> None:
        """Model and optimiser of a checkpoint; the run's position stays what it is."""
        checkpoint.model_files().load_weights(self.model, saved.folder)
        tensors = saved.optimizer
        if self.shards is not None:
            self.shards.place()
            tensors = self.shards.own_parts(tensors)
        load_optimizer_tensors(self.optimizer, self.trained, tensors)
        self.precision.load_state_dict(saved.state["scaler"])


def identity(model: nn.Module, optim: OptimConfig, config: TrainConfig, rate: LearningRate) -> dict[str, Any]:
    """What decides the weights besides the data, as JSON values: a run may only go on where all of it is the same.

    How often a run logs, saves or on how many ranks it runs is not in it; its length only where the learning rate
    follows from it, and validation only where it drives the learning rate.
    """
    settings = getattr(model, "config", None)
    described: dict[str, Any] = {
        "model": {
            "name": getattr(model, "name", type(model).__name__),
            "settings": to_dict(settings) if dataclasses.is_dataclass(settings) else None,
        },
        "optim": to_dict(optim),
        "train": {name: getattr(config, name) for name in _DECIDES},
        "randomness": RULE,
    }
    if config.spike_factor is not None:
        described["train"]["spike_factor"] = config.spike_factor
    if config.packed_text:  # dropout draws for other places
        described["train"]["packed_text"] = True
    if rate.needs_total:
        described["train"]["total_steps"] = rate.total_steps
    if isinstance(optim.schedule, Plateau):
        described["train"] |= {name: getattr(config, name) for name in ("validate_every", "best_metric", "best_mode")}
    return json.loads(json.dumps(described))


def check_identity(saved: Saved, expected: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming every setting in which a checkpoint's run is another one than this."""
    rows = differences(saved.state.get("identity", {}), expected)
    if rows:
        listed = "; ".join(f"{path} is {old!r} there and {new!r} here" for path, old, new in rows)
        raise CheckpointError(
            f"{saved.folder} is of another run: {listed}. Use the same settings to go on with it, or another run_dir"
        )


def resume_path(resume: str, own: Path | None, run_dir: Path) -> Path | None:
    """The checkpoint to start from, given the run folder's newest sound one.

    A folder's own checkpoints come first: the command that started a run from another one's checkpoint goes on with
    the run when it is given again. Raises CheckpointError where `resume` forbids what is there.
    """
    if resume == "never" and own is not None:
        raise CheckpointError(f"{run_dir} holds checkpoints and resume is 'never': choose another run_dir")
    if resume in ("auto", "never"):
        return own
    chosen = Path(resume).resolve()
    if own is not None and chosen != own.resolve() and own.resolve().parent == chosen.parent:
        raise CheckpointError(
            f"{resume} is not the newest checkpoint of {run_dir}: remove the newer ones to go back to it, "
            "or start from it in another run_dir"
        )
    return own or chosen
