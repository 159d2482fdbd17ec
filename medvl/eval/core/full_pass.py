"""What goes into an evaluation: every sample of a loader, exactly once, and the hashes by which a result names it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from medvl.errors import EvaluationError
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.results import checkpoint_sha256
from medvl.schema import Batch


class FullPass:
    """The batches of a loader, and once they are through, the proof that they held every sample of its source once.

    Iterating raises `EvaluationError` behind the last batch where a sample came twice, was neither given nor skipped,
    or none came.

    Attributes:
        keys: of all samples, in the loader's order.
        unreadable: samples that the loader skipped, by reason: with the keys they make up the whole source.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.keys: list[str] = []
        self.unreadable: dict[str, int] = {}

    def __iter__(self) -> Iterator[Batch]:
        before = Counter(self._loader.skipped)
        for batch in self._loader:
            self.keys += batch.keys
            yield batch
        self.unreadable = dict(Counter(self._loader.skipped) - before)
        self._check(len(self._loader.source))

    def _check(self, expected: int) -> None:
        given, skipped = len(self.keys), sum(self.unreadable.values())
        if len(set(self.keys)) != given:
            raise EvaluationError(
                f"{given - len(set(self.keys))} images came twice: evaluate with a loader for evaluation"
            )
        if given + skipped != expected:
            raise EvaluationError(
                f"the loader gave {given} of {expected} images and skipped {skipped}: "
                "open it for evaluation (train=False, one rank), so that no batch is dropped"
            )
        if not given:
            raise EvaluationError("there is no image to evaluate")


def input_hashes(checkpoint: str | Path | None, **loaders: Loader | None) -> dict[str, str | None]:
    """For `Results.inputs`: the hash of the checkpoint, and by name that of what each loader reads; None of what is not
    there. Raises `EvaluationError` when the checkpoint is missing."""
    return {
        "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
        **{name: None if loader is None else loader.source.fingerprint for name, loader in loaders.items()},
    }
