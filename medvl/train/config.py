"""Settings of a training run as frozen dataclasses. Torch is not imported, so that a command line
starts fast.

`global_batch` counts the pairs of one update over all ranks and micro-batches. A loader is opened
with `TrainConfig.micro_batch` pairs, which all ranks together hold at once: the pool of negatives
of a contrastive loss.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from medvl.common.config_io import check_choice, check_within
from medvl.errors import ConfigError

_log = logging.getLogger(__name__)
_LONG_WARMUP = 1 / 8
"""Share of a run above which a warm-up is reported: a tenth is usual."""

Interval = int | Literal["epoch"]
"""A number of steps, or the end of every epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Constant learning rate."""

    warmup_steps: int = 0
    """Steps of a linear warm-up to `lr`."""

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "warmup_steps")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Falling:
    """Base of schedules that decay until the end of the run."""

    warmup_steps: int = 0
    """Steps of a linear warm-up to `lr`."""
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        check_within(self, "[0, inf)", "warmup_steps", "min_lr")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_Falling):
    """Linear decay from `lr` to `min_lr` at the end of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_Falling):
    """Cosine decay from `lr` to `min_lr` at the end of the run (Loshchilov and Hutter, arXiv
    1608.03983).
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """Multiplication by `factor` once `best_metric` has not improved for more than `patience`
    validations.
    """

    factor: float = 0.5
    patience: int = 5
    threshold: float = 1e-4
    """Smallest relative improvement that counts."""
    min_lr: float = 0.0
    warmup_steps: int = 0
    """Steps of a linear warm-up to `lr`."""

    def __post_init__(self) -> None:
        check_within(self, "(0, 1]", "factor")
        check_within(self, "[0, inf)", "patience", "threshold", "min_lr", "warmup_steps")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDecay:
    """Multiplication by `factor` after every `epochs` epochs, as torch's StepLR."""

    factor: float = 0.1
    epochs: int = 1
    warmup_steps: int = 0
    """Steps of a linear warm-up to `lr`."""

    def __post_init__(self) -> None:
        check_within(self, "(0, 1]", "factor")
        check_within(self, "[1, inf)", "epochs")
        check_within(self, "[0, inf)", "warmup_steps")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CosineRestarts(_Falling):
    """Cosine decay from `lr` to `min_lr` every `epochs` epochs, as torch's
    CosineAnnealingWarmRestarts.
    """

    epochs: int = 10

    def __post_init__(self) -> None:
        _Falling.__post_init__(self)
        check_within(self, "[1, inf)", "epochs")


Schedule = Constant | Linear | Cosine | CosineRestarts | Plateau | StepDecay


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimiser and learning rate."""

    optimizer: Literal["adam", "adamw", "lamb", "sgd"] = "adamw"
    """`adam` and `sgd` add weight decay to the gradient, `adamw` subtracts it from the weights.
    `lamb` scales the update of each tensor to the norm of its weights, for large batches of text
    (`medvl.train.optim.optimizer`).
    """
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    """Coefficients of the moving averages of `adam`, `adamw` and `lamb`."""
    eps: float = 1e-8
    """Denominator term of `adam`, `adamw` and `lamb`; 1e-6 is usual for `lamb`."""
    amsgrad: bool = False
    """Divide by the largest second moment so far (Reddi et al., ICLR 2018), for `adam` and
    `adamw`.
    """
    momentum: float = 0.9
    """Momentum of `sgd`."""
    weight_decay: float = 0.0
    """Weight decay; not applied to biases, norms and scalars such as a temperature."""
    layer_decay: float | None = None
    """Ratio of a layer's rate to the next layer's, for models that name their layers; None keeps
    all equal.
    """
    clip_norm: float | None = None
    """Maximum gradient norm; None disables clipping."""
    clip_value: float | None = None
    """Maximum absolute value of each gradient, applied after `clip_norm`; None disables it."""
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        check_choice(self.optimizer, ("adam", "adamw", "lamb", "sgd"), "optimizer")
        check_within(self, "(0, inf)", "lr", "eps", "clip_norm", "clip_value")
        check_within(self, "(0, 1]", "layer_decay")
        check_within(self, "[0, inf)", "momentum", "weight_decay")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas must be in [0, 1), got {self.betas}", "out_of_range", field="betas"
            )
        low = getattr(self.schedule, "min_lr", 0.0)
        if low > self.lr:
            raise ConfigError(
                f"schedule.min_lr {low} is above lr {self.lr}", "conflict", field="schedule.min_lr"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, batch, precision, checkpoints, validation and logs of a run.

    A step is one update of the weights. The run ends after `epochs` or `steps`, whichever comes
    first.
    """

    run_dir: Path
    """Output folder: `checkpoints/`, `last`, `best`, `metrics.jsonl`, `tensorboard/`."""
    epochs: int | None = None
    """Passes over the training data; None for a run of `steps`."""
    steps: int | None = None
    """Updates of the weights; None for a run of `epochs`."""
    scale_below: int | None = None
    """Number of steps for which warm-up, `validate_every` and `checkpoint_every` are meant: a run
    of fewer steps, on little data, shortens them in proportion. None: as they are given.
    """
    global_batch: int
    """Pairs of one update over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches of one update. Contrastive negatives are taken from one micro-batch."""
    grad_cache: int | None = None
    """Maximum pairs that a rank encodes at a time (GradCache): the gradient of a large batch with
    all its negatives in the memory of a part, for about 40 % more time. For contrastive
    dual-encoders; batch norm uses the statistics of a part. None encodes a micro-batch at once.
    """
    seed: int = 0
    """Seed of the steps (dropout, masking); the loader has a seed of its own."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Numbers of the step; weights and optimiser stay in float32. A CPU without instructions for
    bf16 computes it in float32.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    channels_last: bool = False
    """Use the channels-last memory format: faster convolutions on a GPU."""
    compile: bool = False
    """Compile the model (with `shard_weights` its repeated blocks): a minute at the start, then
    faster steps on a GPU, with CUDA graphs where the log says so. Texts are padded to one of few
    lengths. Needs a C compiler and Python headers.
    """
    packed_text: bool = False
    """Leave padding out of the computation of texts: the same values and gradients at a cost
    proportional to the length of the reports. For BERT, RoBERTa and ALBERT, and for the text's
    stream of a fusion-encoder with two; see `medvl.encoders.text.packing`.
    """
    checkpoint_activations: bool = False
    """Keep only each Transformer layer's input and recompute the layer in the backward pass: the
    same values and gradients in far less memory, for a third more arithmetic. Encoders with batch
    norms are not changed.
    """
    deterministic: bool = False
    """Use deterministic algorithms where a GPU has them; slower. On a CPU all algorithms are
    deterministic.
    """
    shard_weights: bool = False
    """Shard weights, gradients and optimiser state over the ranks (FSDP), for models whose training
    does not fit into one device: the same run up to rounding, and the same checkpoints. No effect
    on one rank. Refused with torch 2.11, which cannot reduce the gradients of parameters that a
    rank did not use. See `medvl.train.parallel.model`.
    """
    sharded_checkpoints: bool = False
    """With `shard_weights`: every rank writes its part of weights and optimiser
    (`torch.distributed.checkpoint`), where otherwise rank 0 gathers and writes all of them. Any
    number of ranks resumes either kind.
    """
    find_unused_parameters: bool = False
    """As in DDP: for models that do not use all parameters in each step, on several ranks."""
    num_threads: int | None = None
    """CPU threads of each rank. None divides the cores that are idle at the start among the ranks
    of a machine; a resumed run takes the number of its checkpoint.
    """

    validate_every: Interval = "epoch"
    best_metric: str = "loss"
    """Metric for `best`, early stopping and `Plateau`: `loss`, `loss/<term>` or an evaluator's
    metric.
    """
    best_mode: Literal["min", "max"] = "min"
    early_stop_patience: int | None = None
    """Number of validations without improvement after which the run stops; None never stops
    early.
    """

    checkpoint_every: Interval = "epoch"
    """Interval between checkpoints. The first, the last and every best step are saved as well."""
    keep_last: int = 2
    """Number of checkpoints to keep besides the best one."""
    resume: str = "auto"
    """`auto` resumes from the newest valid checkpoint of the run folder; `never` requires a folder
    without any; a path is the checkpoint from which a new run starts.
    """
    nonfinite_budget: int = 10
    """Maximum number of skipped updates in a run: non-finite loss or gradient, or loss spike."""
    spike_factor: float | None = None
    """Skip updates with a loss above this multiple of the median of the last 64; None accepts every
    finite loss. For losses that stay away from zero.
    """
    rollbacks: int = 2
    """Maximum number of rollbacks to the weights of an earlier checkpoint, while the data continue.
    They follow four skipped updates in a row, which indicate diverged weights rather than a bad
    sample.
    """

    log_every: int = 50
    """Steps between records."""
    tensorboard: bool = True
    wandb: str | None = None
    """Project of Weights & Biases; needs the extra `medvl[wandb]`."""

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise ConfigError(
                "epochs and steps are both unset; give at least one", "missing", field="epochs"
            )
        check_within(
            self,
            "[1, inf)",
            "epochs",
            "steps",
            "global_batch",
            "accumulate",
            "grad_cache",
            "num_threads",
        )
        check_within(
            self, "[1, inf)", "early_stop_patience", "keep_last", "log_every", "scale_below"
        )
        every = [
            name
            for name in ("validate_every", "checkpoint_every")
            if getattr(self, name) != "epoch"
        ]
        check_within(self, "[1, inf)", *every)
        check_within(self, "[0, inf)", "seed", "nonfinite_budget", "rollbacks")
        check_within(self, "(1, inf)", "spike_factor")
        check_choice(self.precision, ("fp32", "bf16", "fp16"), "precision")
        check_choice(self.device, ("auto", "cpu", "cuda"), "device")
        check_choice(self.best_mode, ("min", "max"), "best_mode")
        if self.global_batch % self.accumulate:
            message = (
                f"global_batch {self.global_batch} is not divisible into "
                f"{self.accumulate} micro-batches"
            )
            raise ConfigError(message, "conflict", field="accumulate")
        if self.grad_cache is not None and self.compile:
            message = (
                "grad_cache and compile exclude each other: compilation covers the "
                "complete forward pass"
            )
            raise ConfigError(message, "conflict", field="grad_cache")
        if self.shard_weights:
            self._check_sharding()
        elif self.sharded_checkpoints:
            message = "sharded_checkpoints applies to sharded weights; set shard_weights too"
            raise ConfigError(message, "conflict", field="sharded_checkpoints")

    def _check_sharding(self) -> None:
        allowed = {
            "grad_cache": ((None,), "weights are gathered for the complete forward pass"),
            "find_unused_parameters": (
                (False,),
                "ranks that use a block would wait for a rank that does not",
            ),
            "precision": (
                ("fp32", "bf16"),
                "each rank would search a loss scale for its own shard",
            ),
        }
        for name, (values, reason) in allowed.items():
            value = getattr(self, name)
            if value not in values:
                message = f"shard_weights and {name}={value!r} exclude each other: {reason}"
                raise ConfigError(message, "conflict", field=name)

    @property
    def micro_batch(self) -> int:
        """Pairs of one micro-batch over all ranks, for opening the train loader."""
        return self.global_batch // self.accumulate

    def scaled(self, optim: OptimConfig, total_steps: int) -> tuple[OptimConfig, Self]:
        """Return optimiser and settings of a run of so many steps: as they are, unless
        `scale_below` shortens them, which is logged.
        """
        meant = self.scale_below
        if meant is None or total_steps >= meant:
            return optim, self

        def shorter(every: Interval) -> Interval:
            return every if every == "epoch" else max(1, every * total_steps // meant)

        warmup = optim.schedule.warmup_steps * total_steps // meant
        schedule = dataclasses.replace(optim.schedule, warmup_steps=warmup)
        train = dataclasses.replace(
            self,
            validate_every=shorter(self.validate_every),
            checkpoint_every=shorter(self.checkpoint_every),
        )
        intervals = [
            ("--optim.schedule.warmup-steps", optim.schedule.warmup_steps, warmup),
            ("--train.validate-every", self.validate_every, train.validate_every),
            ("--train.checkpoint-every", self.checkpoint_every, train.checkpoint_every),
        ]
        changes = [f"{name} {given} is {now}" for name, given, now in intervals if given != now]
        if changes:
            _log.info(
                "%d steps are fewer than --train.scale-below %d: %s; None takes them as given",
                total_steps,
                meant,
                ", ".join(changes),
            )
        return dataclasses.replace(optim, schedule=schedule), train

    def warn_of_short_run(self, optim: OptimConfig, total_steps: int, *, validates: bool) -> None:
        """Warn of settings for a longer run: a warm-up that takes much of this one, and validation
        only at its end.
        """
        warmup = optim.schedule.warmup_steps
        every = self.validate_every
        if warmup > total_steps * _LONG_WARMUP:
            _log.warning(
                "the learning rate rises during %d of %d steps, and reaches %.1e: "
                "--optim.schedule.warmup-steps %d takes a tenth of them",
                min(warmup, total_steps),
                total_steps,
                optim.lr * min(1, total_steps / warmup),
                total_steps // 10,
            )
        if validates and every != "epoch" and every > total_steps:
            _log.warning(
                "the run validates once, after its %d steps: --train.validate-every %d validates "
                "four times",
                total_steps,
                max(1, total_steps // 4),
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the updates until the end of the run: of `steps` or `epochs`, whichever comes
        first.
        """
        limits = [self.steps, self.epochs and self.epochs * steps_per_epoch]
        return min(limit for limit in limits if limit is not None)


REWARDS = ("findings", "severities", "ngrams", "novelty", "length", "sentences", "radgraph")
"""Names of the rewards of texts (`medvl.train.rewards.text_rewards`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of training on rewards."""

    method: Literal["self_critical", "group"] = "self_critical"
    """What a sampled text is compared with: the greedy text, or the others of its image."""
    samples: int = 1
    """Texts that are sampled for each image; 4 in CXRMate-2's `group`."""
    weights: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {**dict.fromkeys(REWARDS, 0.0), "findings": 1.0, "ngrams": 0.5}
    )
    """Weight of each of `REWARDS`; those without one are not computed."""
    text_encoder: str = "minilm"
    """Text encoder of the reward sentences, a preset with published weights."""
    temperature: float = 1.0
    """The policy's logits are divided by it, in sampling and in the loss."""
    entropy_weight: float = 0.05
    """Weight of the entropy of `self_critical`; 0.05 in EAST."""
    reference_weight: float = 0.0
    """Weight of the distance of `group` to the model at the start of the run, of which a copy is
    held; 0.04 in CXRMate-2.
    """
    word_weight: float = 0.0
    """Weight of the loss of words of the true reports, beside that of the sampled texts (Paulus et
    al., arXiv 1705.04304, equation 16).
    """
    seed: int = 0
    """Seed of sampling."""
    token_budget: int | None = None
    """Sampled tokens, over all ranks, after which the run ends."""
    second_budget: float | None = None
    """Seconds of sampling and of rewards, on the mean of the ranks, after which the run ends."""

    def __post_init__(self) -> None:
        check_choice(self.method, ("self_critical", "group"), "method")
        check_within(self, "[1, inf)", "samples")
        check_within(self, "(0, inf)", "temperature", "token_budget", "second_budget")
        check_within(self, "[0, inf)", "entropy_weight", "reference_weight", "word_weight")
        for name in self.weights:
            check_choice(name, REWARDS, "weights")
        if not self.used:
            raise ConfigError("expected a reward with a weight, got none", "empty", field="weights")
        if self.method == "group" and self.samples < 2:
            message = "group compares texts of one image: set samples to 2 or more, got 1"
            raise ConfigError(message, "conflict", field="samples")
        if self.method != "group" and self.reference_weight:
            message = "self_critical has no distance to the start: set reference_weight to 0"
            raise ConfigError(message, "conflict", field="reference_weight")

    @property
    def used(self) -> dict[str, float]:
        """Rewards that have a weight."""
        return {name: weight for name, weight in self.weights.items() if weight}
