"""State of a run as stored in checkpoints, and the check that a checkpoint belongs to the same
run.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from medvl.common.config_io import differences, to_dict, upgrade_settings
from medvl.common.seeding import RULE, derive, reseed
from medvl.errors import CheckpointError, ConfigError, TrainingError
from medvl.models.checkpoint_folder import WEIGHT_PARTS
from medvl.schema import Batch
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import OPTIMIZER_PARTS, Checkpoints, Saved
from medvl.train.fault_tolerance.guards import LossSpikeDetector
from medvl.train.loop.logger import BestTracker, LossMeter, RunLogger
from medvl.train.loop.step import StepResult
from medvl.train.optim.optimizer import (
    LearningRate,
    Precision,
    load_optimizer_tensors,
    optimizer_tensors,
)
from medvl.train.parallel.distributed import BatchStream, RankInfo
from medvl.train.parallel.model import ParallelModel

if TYPE_CHECKING:
    from medvl.train.rewards.task import RewardTask

_log = logging.getLogger(__name__)

_IDENTITY_FIELDS = ("seed", "global_batch", "accumulate", "grad_cache", "precision")
"""Fields of `TrainConfig` that always determine the weights."""
_RECIPE_FIELDS = ("pretrained", "text_pretrained", "random_unet", "uncertain", "missing")
"""Settings of recipes that determine the start weights or the labels."""
_NOT_IDENTITY = (
    "train",
    "valid",
    "valid_split",
    "extra_train",
    "tokenizer",
    "cache",
    "workers",
    "valid_batch",
    "max_skipped",
    "text.file",
)
"""Settings of the data that do not determine the batches, or that are compared by content: shards
by the loader, a vocabulary and a file of statements in `start` (`medvl.train.run`).
"""


_BUDGETS = ("token_budget", "second_budget")
"""Settings of rewards that say when a run ends."""
_STEPS = "train.total_steps"
_NAMES = {
    _STEPS: "the number of steps (train.epochs, train.steps)",
    "start.vocabulary": "the vocabulary (data.tokenizer)",
    "randomness": "the rule of random numbers (the version of medvl)",
}
"""Parts of `identity` that no option sets."""


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """State of a run. It has no generator states: the random numbers of a step follow from its
    number.
    """

    model: ParallelModel
    stream: BatchStream
    optimizer: torch.optim.Optimizer
    precision: Precision
    rate: LearningRate
    tracker: BestTracker
    meter: LossMeter
    identity: Mapping[str, Any]
    """Settings that determine the weights, see `identity`."""
    configs: Mapping[str, Any]
    """Part of `identity` -> the config that it was written from."""
    spikes: LossSpikeDetector | None
    rewards: "RewardTask | None" = None
    step: int = 0
    """Updates made or skipped."""
    skipped: int = 0
    """Updates skipped because of non-finite values or a loss spike."""
    streak: int = 0
    """Number of the last updates that were skipped in a row."""
    rollbacks: int = 0
    """Rollbacks of the weights to an earlier checkpoint."""
    overflows: int = 0
    """Updates skipped while fp16's loss scale was too large."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last validation."""

    @classmethod
    def create(
        cls,
        model: ParallelModel,
        stream: BatchStream,
        optimizer: torch.optim.Optimizer,
        rate: LearningRate,
        precision: Precision,
        config: TrainConfig,
        run: Mapping[str, Any],
        configs: Mapping[str, Any],
        rewards: "RewardTask | None" = None,
    ) -> Self:
        """Create the state of a run before its first step; `run` as in `identity`, `configs` as
        in `check_identity`.
        """
        return cls(
            model=model,
            stream=stream,
            optimizer=optimizer,
            precision=precision,
            rate=rate,
            tracker=BestTracker(mode=config.best_mode, patience=config.early_stop_patience),
            meter=LossMeter(model.ranks),
            identity=identity(model.whole, run, rate),
            configs={"model.settings": getattr(model.whole, "config", None), **configs},
            spikes=None if config.spike_factor is None else LossSpikeDetector(config.spike_factor),
            rewards=rewards,
        )

    @property
    def ranks(self) -> RankInfo:
        """This process among the ranks."""
        return self.model.ranks

    @property
    def total_steps(self) -> int:
        """Updates until the end of the run."""
        return self.rate.total_steps

    @property
    def exhausted(self) -> bool:
        """Whether the run is over: all steps made, stopped early, or a budget used up."""
        spent = self.rewards is not None and self.rewards.exhausted
        return self.step >= self.total_steps or self.tracker.exhausted or spent

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON part of the state. Collective call."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "overflows": self.overflows,
            "streak": self.streak,
            "rollbacks": self.rollbacks,
            "spikes": None if self.spikes is None else self.spikes.state_dict(),
            "rewards": None if self.rewards is None else self.rewards.state_dict(),
            "metrics": {
                name: value if math.isfinite(value) else None
                for name, value in self.metrics.items()
            },
            "schedule": self.rate.state_dict(),
            "scaler": self.precision.state_dict(),
            "loader": self.stream.state_dict(),
            "best": self.tracker.state_dict(),
            "window": self.meter.state_dict(),
            "identity": self.identity,
            "world_size": self.ranks.size,
            "threads": torch.get_num_threads(),
        }

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """Return the complete optimiser state, with sharded weights on rank 0 only. Collective
        call.
        """
        return self.model.full_state(optimizer_tensors(self.optimizer, self.model.trained))

    def optimizer_parts(self) -> Mapping[str, Tensor]:
        """Return this rank's part of the optimiser state."""
        return optimizer_tensors(self.optimizer, self.model.trained)

    def restore(self, saved: Saved) -> None:
        """Restore everything from a checkpoint.

        Raises CheckpointError where it belongs to another run (naming the differences) or to other
        data.
        """
        check_identity(saved, self.identity, self.configs)
        state = saved.state
        if state["world_size"] != self.ranks.size:
            _log.warning(
                "the checkpoint was written on %d ranks, this run has %d: the batches are the "
                "same, but sums are "
                "rounded in another order, so the weights will not be equal bit for bit",
                state["world_size"],
                self.ranks.size,
            )
        try:
            self.stream.loader.load_state_dict(state["loader"])
        except ConfigError as error:
            raise CheckpointError(
                f"{saved.folder} does not match this data: {error}", "mismatch"
            ) from error
        self.restore_weights(saved)
        self.rate.load_state_dict(state["schedule"])
        self.tracker.load_state_dict(state["best"])
        self.meter.load_state_dict(state["window"])
        for name in ("step", "skipped", "overflows", "streak", "rollbacks"):
            setattr(self, name, state[name])
        if self.spikes is not None:
            self.spikes.load_state_dict(state["spikes"])
        if self.rewards is not None:
            self.rewards.load_state_dict(state["rewards"])
        self.metrics = {
            name: float("nan") if value is None else value
            for name, value in state["metrics"].items()
        }

    def restore_weights(self, saved: Saved) -> None:
        """Restore model and optimiser from a checkpoint; the position in the data stays as it
        is. Collective call.
        """
        if self.model.sharded and saved.in_parts:
            optimizer = self._restore_parts(saved.folder)
        else:
            checkpoint.model_files().load_weights(self.model.whole, saved.folder)
            self.model.load_from_whole()
            optimizer = self.model.local_state(saved.optimizer())
        load_optimizer_tensors(self.optimizer, self.model.trained, optimizer)
        self.precision.load_state_dict(saved.state["scaler"])

    def _restore_parts(self, folder: Path) -> Mapping[str, Tensor]:
        """Restore the weights of this rank, and return its part of the optimiser's state,
        without complete tensors.
        """
        # torch's part of it takes seconds to import
        from medvl.train.parallel import model as parts

        parts.read_parts(folder / WEIGHT_PARTS, self.model.weights(), self.ranks)  # in place
        optimizer = parts.empty_state(folder / OPTIMIZER_PARTS, self.model.trained)
        if optimizer:
            parts.read_parts(folder / OPTIMIZER_PARTS, optimizer, self.ranks)
        return optimizer


def identity(model: nn.Module, run: Mapping[str, Any], rate: LearningRate) -> dict[str, Any]:
    """Return the settings besides the data that determine the weights; a run resumes only where all
    are the same.

    They are selected from `run`, the JSON values in the `config.json` of each checkpoint.

    Not part of it: logging, saving and the number of ranks. The length of the run is part of it
    only where the learning rate depends on it, and validation only where it controls the learning
    rate.
    """
    settings = getattr(model, "config", None)
    train = run["train"]
    entries: dict[str, Any] = {
        "model": {
            "name": getattr(model, "name", type(model).__name__),
            "settings": to_dict(settings) if dataclasses.is_dataclass(settings) else None,
        },
        "optim": run["optim"],
        "train": {name: train[name] for name in _IDENTITY_FIELDS},
        "randomness": RULE,
    }
    if train["spike_factor"] is not None:
        entries["train"]["spike_factor"] = train["spike_factor"]
    if "rewards" in run:
        entries["rewards"] = _without(run["rewards"], _BUDGETS)
    if train["packed_text"]:  # dropout draws numbers for other positions
        entries["train"]["packed_text"] = True
    if rate.depends_on_length or train.get("scale_below") is not None:
        entries["train"]["total_steps"] = rate.total_steps
    if rate.depends_on_metric:
        entries["train"] |= {
            name: train[name] for name in ("validate_every", "best_metric", "best_mode")
        }
    settings = run.get("settings", {})
    entries["start"] = run.get("start", {})  # hashes of checkpoints
    entries["recipe"] = {name: settings[name] for name in _RECIPE_FIELDS if name in settings}
    entries["data"] = _without(settings.get("data", {}), _NOT_IDENTITY)
    return json.loads(json.dumps(entries))


def _without(tree: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return a tree of settings without those of these dotted names."""
    rest = {name: value for name, value in tree.items() if prefix + name not in names}
    return {
        name: _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in rest.items()
    }


def check_identity(
    saved: Saved, expected: Mapping[str, Any], configs: Mapping[str, Any] | None = None
) -> None:
    """Raise CheckpointError naming every setting that differs between a checkpoint's run and
    this one.

    Settings that did not exist when the checkpoint was written count as their defaults.

    Args:
        saved: the checkpoint.
        expected: `identity` of this run.
        configs: dotted name of a part of `identity` -> the config dataclass of this run that it was
            written from; other parts must hold the same settings.
    """
    stored = saved.state.get("identity", {})
    for path, config in (configs or {}).items():
        if dataclasses.is_dataclass(config):
            stored = _upgraded(stored, path.split("."), config, expected)
    added = [
        path for path, old, _ in differences(saved.state.get("identity", {}), stored) if old is None
    ]
    if added:
        _log.info(
            "%s was written before the settings %s existed: their defaults apply",
            saved.folder,
            ", ".join(added),
        )
    rows = differences(stored, expected)
    if len(rows) > 1:  # the number of steps follows from the others
        rows = [row for row in rows if row[0] != _STEPS]
    if rows:
        changes = "; ".join(
            f"{_NAMES.get(path, path)} was {old!r} and is {new!r}" for path, old, new in rows
        )
        same = " ".join(option for path, old, _ in rows if (option := _option(path, old)))
        advice = (
            f"resume it with {same or 'the same settings'}, or start a new run in another run_dir"
        )
        message = f"{saved.folder} belongs to another run: {changes}; {advice}"
        raise CheckpointError(message, "mismatch", field=rows[0][0])


def _upgraded(
    stored: Mapping[str, Any], path: Sequence[str], config: Any, expected: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a stored identity with upgraded settings in its part at `path`."""
    name, *rest = path
    if not isinstance(stored.get(name), Mapping) or not isinstance(expected.get(name), Mapping):
        return stored
    if rest:
        part = _upgraded(stored[name], rest, config, expected[name])
    else:
        part = upgrade_settings(stored[name], config, expected[name])
    return {**stored, name: part}


def _option(path: str, value: Any) -> str:
    """Return the option of the command line that sets a value of `identity`; "" where none does
    so directly.
    """
    if (
        isinstance(value, Mapping)
        or path in _NAMES
        or path.startswith("start.")
        or path.endswith(".kind")
    ):
        return ""
    for prefix, group in (
        ("model.settings.", "model."),
        ("recipe.", ""),
        ("rewards.", "rewards."),
        ("train.", "train."),
        ("optim.", "optim."),
    ):
        if path.startswith(prefix):
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            return f"--{group}{path.removeprefix(prefix).replace('_', '-')} {text}"
    return f"--{path.replace('_', '-')} {value}" if path.startswith("data.") else ""


def resume_path(resume: str, own: Path | None, run_dir: Path) -> Path | None:
    """Return the checkpoint to start from, given the newest valid one of the run folder.

    The folder's own checkpoint takes precedence: a command that starts from another run's
    checkpoint resumes its own run when it is repeated. Raises CheckpointError where `resume`
    conflicts with the folder.
    """
    if resume == "never" and own is not None:
        raise CheckpointError(
            f"{run_dir} holds checkpoints and resume is 'never'; choose another run_dir",
            "exists",
            field="resume",
        )
    if resume in ("auto", "never"):
        return own
    start = Path(resume).resolve()
    if own is not None and start != own.resolve() and own.resolve().parent == start.parent:
        raise CheckpointError(
            f"{resume} is not the newest checkpoint of {run_dir}; remove the newer ones to resume "
            "from it, or start from it in another run_dir",
            "conflict",
            field="resume",
        )
    return own or start


# Validation during training: losses over the validation batches, and evaluators.

Evaluator = Callable[[Any], Mapping[str, float]]
"""Function from a model in eval mode to metrics by name. Called on rank 0 only, while the other
ranks wait.
"""


def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: RankInfo,
    precision: Precision,
    seed: int,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """Return the losses over all batches as `loss` and `loss/<term>`: means weighted by the sizes
    of the batches.

    `batches` are this rank's: numbers r, r + W, r + 2 W, ... of all for rank r of W. A contrastive
    loss takes its negatives from one batch. Random numbers (masking) are seeded by the number of
    the batch and sums are exactly rounded, so the result is the same for any number of ranks.

    Raises TrainingError where two ranks have the same batch, or there is none.
    """
    rows: list[Tensor] = []
    sizes: list[int] = []
    names: list[str] = []
    first_keys: list[str] = []
    for position, batch in enumerate(batches):
        reseed(derive(seed, "validation", ranks.rank + position * ranks.size), ranks.device)
        with precision.autocast():
            losses = model(place(batch))
        names = ["loss", *(f"loss/{name}" for name in losses.terms)]
        rows.append(torch.stack([losses.total, *losses.terms.values()]).double())
        sizes.append(len(batch))
        first_keys.append(batch.keys[0])
    values = torch.stack(rows).tolist() if rows else []
    parts = ranks.exchange(
        {"names": names, "sizes": sizes, "values": values, "first": first_keys[:1]}
    )
    firsts = [key for part in parts for key in part["first"]]
    if len(set(firsts)) != len(firsts):
        raise TrainingError(
            "ranks have the same validation batches; open the loader with rank and world",
            "mismatch",
        )
    total = sum(size for part in parts for size in part["sizes"])
    if not total:
        raise TrainingError(
            "the valid loader yields no batch; leave it out, or give it data", "empty"
        )
    sums = [
        (size, row)
        for part in parts
        for size, row in zip(part["sizes"], part["values"], strict=True)
    ]
    names = next(part["names"] for part in parts if part["names"])
    return {
        name: _exact_sum(size * row[i] for size, row in sums) / total
        for i, name in enumerate(names)
    }


def run_evaluators(model: nn.Module, evaluators: Sequence[Evaluator]) -> dict[str, float]:
    """Return the metrics of all evaluators. Raises ConfigError where two return the same name."""
    results: dict[str, float] = {}
    for evaluator in evaluators:
        for name, value in evaluator(model).items():
            if name in results:
                raise ConfigError(
                    f"two evaluators return a metric {name!r}; rename one",
                    "conflict",
                    field="evals",
                )
            results[name] = float(value)
    return results


def _exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once so that order does not matter; NaN where a value is not
    finite.
    """
    terms = list(values)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan


# Policy for skipped updates: count and log them, stop at the budget, roll back after four in a
# row.


STREAK = 4
"""Skipped updates in a row that trigger a rollback."""
_SHOWN_KEYS = 8


class RollbackPolicy:
    """Handling of skipped updates. Calls are collective."""

    def __init__(
        self, state: TrainState, config: TrainConfig, logger: RunLogger, checkpoints: Checkpoints
    ) -> None:
        self._state = state
        self._config = config
        self._logger = logger
        self._checkpoints = checkpoints

    def __call__(self, result: StepResult, step: int) -> bool:
        """Count the skipped update number `step`; return whether the weights were rolled back.

        Raises TrainingError where the budget is exceeded.
        """
        state = self._state
        budget = self._config.nonfinite_budget
        state.skipped += 1
        state.streak += 1
        samples = self._log_samples(result, step)
        if state.skipped > budget:
            message = (
                f"{state.skipped} updates were skipped, nonfinite_budget is {budget}; the last was "
                f"step {step + 1} with the samples {samples}. Check them (all in metrics.jsonl), "
                "lower optim.lr or set optim.clip_norm"
            )
            raise TrainingError(message, "nonfinite", field="nonfinite_budget")
        return (
            state.streak == STREAK
            and state.rollbacks < self._config.rollbacks
            and self._roll_back()
        )

    def _log_samples(self, result: StepResult, step: int) -> str:
        """Log the samples that caused the skip, or all candidates; return the first ones as a
        text.
        """
        all_keys = [key for keys in result.keys for key in keys]
        suspects, candidates = zip(
            *self._state.ranks.exchange([result.nonfinite_keys(), all_keys]), strict=True
        )
        keys = sorted(key for rank in (suspects if any(suspects) else candidates) for key in rank)
        self._logger.record(
            "skip", step + 1, {"reason": "spike" if result.spike else "not finite", "keys": keys}
        )
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        samples = ", ".join(keys[:_SHOWN_KEYS]) + more
        reason = "loss spike" if result.spike else "non-finite loss or gradient"
        _log.warning("step %d: %s, update skipped; samples: %s", step + 1, reason, samples)
        return samples

    def _roll_back(self) -> bool:
        """Restore the weights of the newest valid checkpoint from before the streak; return
        False without one.
        """
        state = self._state
        path = state.ranks.on_main(self._earlier_checkpoint)
        if path is None:
            return False
        state.restore_weights(checkpoint.read(Path(path)))
        state.streak = 0
        state.rollbacks += 1
        _log.warning(
            "%d updates skipped in a row: weights rolled back to %s, data continue (rollback %d "
            "of %d)",
            STREAK,
            path,
            state.rollbacks,
            self._config.rollbacks,
        )
        self._logger.record("rollback", state.step, {"checkpoint": Path(path).name})
        return True

    def _earlier_checkpoint(self) -> str | None:
        """Return a valid checkpoint from before the last update that was made; later ones hold
        the current weights.
        """
        for step in self._checkpoints.steps():
            folder = self._checkpoints.at(step)
            if folder is None or step >= self._state.step - STREAK:
                continue
            try:
                checkpoint.verify(folder)
            except CheckpointError as error:
                _log.warning("%s; not used for the rollback", error)
                continue
            return str(folder)
        return None
