"""What is done about updates that were left out: counted, named, budgeted; after several the weights go back."""

import logging
from pathlib import Path

from medvl.errors import CheckpointError, TrainingError
from medvl.train.config import TrainConfig
from medvl.train.fault_tolerance import checkpoint
from medvl.train.fault_tolerance.checkpoint import Checkpoints
from medvl.train.loop.logger import RunLogger
from medvl.train.loop.state import TrainState
from medvl.train.loop.step import StepResult

_log = logging.getLogger(__name__)

STREAK = 4
"""Updates left out one after the other that send the weights back."""
_SHOWN_KEYS = 8


class RollbackPolicy:
    """Keeps the account of updates that were left out."""

    def __init__(self, state: TrainState, config: TrainConfig, journal: RunLogger, checkpoints: Checkpoints) -> None:
        self._state, self._config, self._journal, self._checkpoints = state, config, journal, checkpoints

    def __call__(self, outcome: StepResult, step: int) -> bool:
        """Count the update number `step`, which was left out; True where the weights went back. A call of all ranks.

        Raises TrainingError where it is one more than the budget allows.
        """
        state, budget = self._state, self._config.nonfinite_budget
        state.skipped += 1
        state.streak += 1
        shown = self._name(outcome, step)
        if state.skipped > budget:
            what = "a loss or gradient that is not finite, or a spike of the loss"
            raise TrainingError(
                f"{state.skipped} updates had {what}, nonfinite_budget is {budget}; the last was step {step + 1} with "
                f"the samples {shown}. Look at those samples (all are in metrics.jsonl), lower optim.lr or set "
                "optim.clip_norm"
            )
        return state.streak == STREAK and state.rollbacks < self._config.rollbacks and self._go_back()

    def _name(self, outcome: StepResult, step: int) -> str:
        """Record the samples that are to blame, or may be; the first ones as a text."""
        everything = [key for keys in outcome.keys for key in keys]
        suspects, everyone = zip(*self._state.world.exchange([outcome.suspects(), everything]), strict=True)
        keys = sorted(key for rank in (suspects if any(suspects) else everyone) for key in rank)
        self._journal.record("skip", step + 1, {"reason": "spike" if outcome.spike else "not finite", "keys": keys})
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        shown = ", ".join(keys[:_SHOWN_KEYS]) + more
        reason = "the loss is a spike" if outcome.spike else "loss or gradient is not finite"
        _log.warning("step %d: %s, the update is left out; samples: %s", step + 1, reason, shown)
        return shown

    def _go_back(self) -> bool:
        """The weights of the newest sound checkpoint that has others than now; False where there is none."""
        state = self._state
        found = state.world.on_main(self._earlier)
        if found is None:
            return False
        state.restore_weights(checkpoint.read(Path(found)))
        state.streak = 0
        state.rollbacks += 1
        _log.warning(
            "%d updates in a row were left out: the weights go back to %s, the data go on (rollback %d of %d)",
            *(STREAK, found, state.rollbacks, self._config.rollbacks),
        )
        self._journal.record("rollback", state.step, {"checkpoint": Path(found).name})
        return True

    def _earlier(self) -> str | None:
        """A checkpoint from before the last update that was made: later ones hold the weights of now."""
        for step in self._checkpoints.steps():
            folder = self._checkpoints.at(step)
            if folder is None or step >= self._state.step - STREAK:
                continue
            try:
                checkpoint.verify(folder)
            except CheckpointError as error:
                _log.warning("%s; it is not gone back to", error)
                continue
            return str(folder)
        return None
