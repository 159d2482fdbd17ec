"""The settings of a training run, as frozen dataclasses. No torch here: a command line reads them in milliseconds.

`global_batch` counts the pairs of one update over all ranks and all micro-batches. A loader is opened with
`TrainConfig.micro_batch` of them, which is what every rank together holds at once, and so the pool that a contrastive
loss takes its negatives from.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from medvl.errors import ConfigError

Interval = int | Literal["epoch"]
"""After every so many steps, or at the end of every epoch."""


def _at_least(name: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{name} must be {low} or above, got {value}", "out_of_range", field=name)


def _above(name: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value > low):
        raise ConfigError(f"{name} must be above {low}, got {value}", "out_of_range", field=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low < value <= high:
        raise ConfigError(f"{name} must be above {low} and at most {high}, got {value}", "out_of_range", field=name)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}", "unknown_name", field=name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The same learning rate throughout."""

    warmup_steps: int = 0
    """Steps over which the rate rises in a straight line to `lr`."""

    def __post_init__(self) -> None:
        _at_least("warmup_steps", self.warmup_steps, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Falling:
    """What falls until the end of the run."""

    warmup_steps: int = 0
    """Steps over which the rate rises in a straight line to `lr`."""
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("min_lr", self.min_lr, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_Falling):
    """A straight line from `lr` down to `min_lr` at the end of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_Falling):
    """One half cosine from `lr` to `min_lr` at the end of the run (Loshchilov and Hutter, arXiv 1608.03983)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """Multiply the rate by `factor` once `best_metric` has not improved for more than `patience` validations."""

    factor: float = 0.5
    patience: int = 5
    threshold: float = 1e-4
    """An improvement counts when it is above this share of the best value."""
    min_lr: float = 0.0
    warmup_steps: int = 0
    """Steps over which the rate rises in a straight line to `lr`."""

    def __post_init__(self) -> None:
        _between("factor", self.factor, 0, 1)
        _at_least("patience", self.patience, 0)
        _at_least("threshold", self.threshold, 0)
        _at_least("min_lr", self.min_lr, 0)
        _at_least("warmup_steps", self.warmup_steps, 0)


Schedule = Constant | Linear | Cosine | Plateau


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimiser and its learning rate."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    """`adam` and `sgd` add weight decay to the gradient, `adamw` takes it from the weights."""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    """Of `adam` and `adamw`."""
    eps: float = 1e-8
    """Of `adam` and `adamw`."""
    momentum: float = 0.9
    """Of `sgd`."""
    weight_decay: float = 0.0
    """Spares biases, norms and scalars such as a temperature."""
    layer_decay: float | None = None
    """Each layer's rate as a share of the next one's, for models that name their layers; None leaves all equal."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm where theirs is larger; None clips nothing."""
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, ("adam", "adamw", "sgd"))
        _above("lr", self.lr, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be 0 or above and below 1, got {self.betas}")
        _above("eps", self.eps, 0)
        _at_least("momentum", self.momentum, 0)
        _at_least("weight_decay", self.weight_decay, 0)
        if self.layer_decay is not None:
            _between("layer_decay", self.layer_decay, 0, 1)
        if self.clip_norm is not None:
            _above("clip_norm", self.clip_norm, 0)
        if not isinstance(self.schedule, Constant) and self.schedule.min_lr > self.lr:
            raise ConfigError(f"schedule.min_lr {self.schedule.min_lr} is above lr {self.lr}: lower it")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a run goes: its length, batch, precision, checkpoints, validation and logs.

    A step is one update of the weights. The run ends after `epochs` or after `steps`, whichever comes first.
    """

    run_dir: Path
    """Holds everything that the run writes: `checkpoints/`, `last`, `best`, `metrics.jsonl`, `tensorboard/`."""
    epochs: int | None = None
    steps: int | None = None
    global_batch: int
    """Pairs of one update, over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches of one update. Contrastive negatives come from one micro-batch."""
    grad_cache: int | None = None
    """Each rank encodes its share of a micro-batch in parts of at most so many, twice over: the gradient of one large
    batch, all its negatives included, in the memory of a part, for some 40 % more time. For contrastive
    dual-encoders; batch norm has a part's statistics. None encodes everything at once."""
    seed: int = 0
    """Decides all randomness of the steps (dropout, masking); the loader has its own."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    channels_last: bool = False
    """Faster convolutions on a GPU."""
    compile: bool = False
    """Compile the model: a minute at the start, then faster steps on a GPU. Needs a C compiler and Python's headers."""
    packed_text: bool = False
    """Text encoders compute the real tokens of a batch and no padding: the same values and gradients, at a cost that
    follows the length of the reports. For BERT, RoBERTa and ALBERT; see `medvl.encoders.text.packing`."""
    checkpoint_activations: bool = False
    """Transformer encoders keep each layer's input only and compute the layer again for its gradient: the same values
    and gradients in far less memory, for a third more arithmetic. Encoders with batch norms stay as they are."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time, where a GPU has them; slower. A CPU needs no such order."""
    shard_weights: bool = False
    """Each rank holds its share of weights, gradients and optimiser state, and gathers a block's weights while it
    computes with them: for models whose training does not fit into one device. The same run to rounding, and the same
    checkpoints, sharded or not; one rank has nothing to share. See `medvl.train.parallel.fsdp`."""
    find_unused_parameters: bool = False
    """For models that leave parameters out of some steps, on several ranks."""
    num_threads: int | None = None
    """CPU threads of each rank; None shares the cores among the ranks of a machine."""

    validate_every: Interval = "epoch"
    best_metric: str = "loss"
    """`loss`, `loss/<term>` or the name of an evaluator's metric: decides `best`, early stopping and `Plateau`."""
    best_mode: Literal["min", "max"] = "min"
    early_stop_patience: int | None = None
    """Stop once this many validations in a row have brought no improvement; None never stops early."""

    checkpoint_every: Interval = "epoch"
    """The first and the last step are always saved, and so is every best one."""
    keep_last: int = 2
    """Checkpoints that stay, the best one not counted."""
    resume: str = "auto"
    """`auto` goes on from the run folder's newest sound checkpoint; `never` wants a folder without any; a path is the
    checkpoint that a new run starts from."""
    nonfinite_budget: int = 10
    """Updates of a run that may be skipped because their loss or gradient was not finite, or their loss a spike."""
    spike_factor: float | None = None
    """A loss above so many times the median of the last 64 is a spike, and its update is skipped; None takes every
    finite loss. For losses that stay clear of zero."""
    rollbacks: int = 2
    """Times that a run may go back to the weights of an earlier checkpoint, and on with the data that are next: after
    four skipped updates in a row, which tell of weights gone astray rather than of a bad sample."""

    log_every: int = 50
    """Steps from one record to the next."""
    tensorboard: bool = True
    wandb: str | None = None
    """Project of Weights & Biases to log to; needs the extra `medvl[wandb]`."""

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise ConfigError("epochs and steps are both unset: give the one that ends the run")
        if self.grad_cache is not None:
            _at_least("grad_cache", self.grad_cache, 1)
        for name in ("epochs", "steps", "num_threads", "early_stop_patience", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value != "epoch":
                _at_least(name, value, 1)
        for name in ("global_batch", "accumulate", "keep_last", "log_every"):
            _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        _at_least("nonfinite_budget", self.nonfinite_budget, 0)
        _at_least("rollbacks", self.rollbacks, 0)
        if self.spike_factor is not None:
            _above("spike_factor", self.spike_factor, 1)
        _one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("best_mode", self.best_mode, ("min", "max"))
        if self.global_batch % self.accumulate:
            raise ConfigError(
                f"global_batch {self.global_batch} does not divide into {self.accumulate} equal micro-batches: "
                "change accumulate"
            )
        if self.grad_cache is not None and self.compile:
            raise ConfigError("grad_cache and compile exclude each other: what is compiled is the whole forward pass")
        if self.shard_weights:
            self._check_sharding()

    def _check_sharding(self) -> None:
        """Raises ConfigError for what the ranks cannot do with a share of the weights each."""
        reasons = {
            "grad_cache": (self.grad_cache is not None, "weights are gathered for the forward pass as a whole"),
            "find_unused_parameters": (
                self.find_unused_parameters,
                "a rank that leaves out a block would keep the others waiting for its share of it",
            ),
            "precision 'fp16'": (self.precision == "fp16", "each rank would find a loss scale for its own share"),
            "compile": (self.compile, "the hooks that gather weights break a compiled forward pass into pieces"),
        }
        for name, (excluded, reason) in reasons.items():
            if excluded:
                raise ConfigError(f"shard_weights and {name} exclude each other: {reason}")

    @property
    def micro_batch(self) -> int:
        """Pairs of one micro-batch over all ranks: what the train loader is opened with."""
        return self.global_batch // self.accumulate
