"""Complete passes over a loader, and the identity of what an evaluation read."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from medvl.errors import EvaluationError, ShardError, SplitError
from medvl.eval.core.interfaces import Loader, Source
from medvl.eval.core.results import checkpoint_sha256
from medvl.schema import Batch, Sample


class FullPass:
    """Iterator over the batches of a loader that checks for every sample of the source to come exactly once.

    After the last batch it raises `EvaluationError` if a sample came twice, was neither yielded nor skipped, or if
    there was no sample at all.

    Attributes:
        keys: keys of all samples yielded, in the order of the loader.
        unreadable: counts of samples that the loader skipped, by reason; with `keys` they cover the whole source.
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
        yielded, skipped = len(self.keys), sum(self.unreadable.values())
        duplicates = yielded - len(set(self.keys))
        if duplicates:
            message = f"expected every image once, got {duplicates} again; open the loader with train=False"
            raise EvaluationError(message, "mismatch")
        if yielded + skipped != expected:
            message = f"expected {expected} images, got {yielded} and {skipped} skipped; use train=False and one rank"
            raise EvaluationError(message, "mismatch")
        if not yielded:
            raise EvaluationError("expected images to evaluate, got none", "empty")


def samples_by_key(source: Source) -> dict[str, tuple[int, Sample]]:
    """Return position and sample by key, without samples that cannot be read (the loader counts them)."""
    samples = {}
    for position in range(len(source)):
        try:
            sample = source.sample(position)
        except ShardError:
            continue
        samples[sample.key] = (position, sample)
    return samples


def check_disjoint_patients(valid: Iterable[str], test: Iterable[str]) -> None:
    """Raise SplitError if a patient of the validation images is also in the test images."""
    shared = len({*valid} & {*test})
    if shared:
        message = f"{shared} patients are in both validation and test; use splits that are disjoint by patient"
        raise SplitError(message, "leak")


def input_hashes(checkpoint: str | Path | None, **loaders: Loader | None) -> dict[str, str | None]:
    """Return the hashes of the checkpoint and, by name, of the source of each loader, for `Results.inputs`.

    Missing inputs are None. Raises `EvaluationError` if the checkpoint does not exist.
    """
    return {
        "checkpoint": None if checkpoint is None else checkpoint_sha256(checkpoint),
        **{name: None if loader is None else loader.source.fingerprint for name, loader in loaders.items()},
    }
