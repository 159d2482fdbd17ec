"""Which records of a plan go into which shard, in compact columns: a plan of any size is ordered in little memory."""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from medvl.data.convert.options import ShardOptions
from medvl.data.convert.writer import ShardTask
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.shards.format import check_key
from medvl.data.splits import check_disjoint
from medvl.errors import CorpusError

_BLOCK = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A shard as planned: what it is called, and where in the plan its records are."""

    name: str
    split: str
    folder: Path
    places: np.ndarray
    """int64, in the order of the shard."""

    def __len__(self) -> int:
        return len(self.places)

    def records(self, plan: Sequence[Record]) -> Iterator[Record]:
        """Its records, one after the other."""
        return (plan[place] for place in self.places.tolist())

    def task(self, plan: Sequence[Record], options: ShardOptions) -> ShardTask:
        """What `build_shard` takes, with all its records in memory."""
        return ShardTask(self.name, self.split, self.folder, tuple(self.records(plan)), options)


def ordered_by_key(plan: Plan) -> dict[str, np.ndarray]:
    """Places in `plan.records`, int64, of each split's records in the order of their keys.

    Raises:
        CorpusError: no record, or two with one key. ShardError: a key cannot name a file. SplitError: a patient stands
        in two splits.
    """
    if not plan.records:
        detail = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(plan.excluded.items())) or "the table is empty"
        )
        raise CorpusError(f"{plan.corpus}: no image is left to convert ({detail})")
    numbers: dict[str, int] = {}
    splits, keys, patients = array("i"), _Texts(), _Texts()
    for record in plan.records:
        sample = record.sample
        check_key(sample.key)
        splits.append(numbers.setdefault(sample.split, len(numbers)))
        keys.append(sample.key)
        patients.append(sample.patient)
    split_N, key_N = np.frombuffer(splits, np.intc), keys.column()
    order_N = np.argsort(key_N, kind="stable")
    again_N = key_N[order_N[1:]] == key_N[order_N[:-1]]
    if again_N.any():
        twice = np.unique(key_N[order_N[1:]][again_N])
        raise CorpusError(
            f"{plan.corpus}: {len(twice)} images are listed more than once, first key {twice[0].decode()}"
        )
    _check_patients(patients.column(), split_N, list(numbers), plan.corpus)
    split_N = split_N[order_N]
    return {split: order_N[split_N == number] for split, number in numbers.items()}


def _check_patients(patient_N: np.ndarray, split_N: np.ndarray, names: Sequence[str], corpus: str) -> None:
    order_N = np.argsort(patient_N, kind="stable")
    patient_N, split_N = patient_N[order_N], split_N[order_N]
    torn_N = (patient_N[1:] == patient_N[:-1]) & (split_N[1:] != split_N[:-1])
    if torn_N.any():
        shared_N = np.isin(patient_N, patient_N[1:][torn_N])
        shared = {
            name: [patient.decode("utf-8", "surrogatepass") for patient in patient_N[shared_N & (split_N == number)]]
            for number, name in enumerate(names)
        }
        check_disjoint(shared, corpus)


class _Texts:
    """Short texts as a column of bytes: an eighth of what Python's own take. UTF-8 sorts as they do."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._waiting: list[bytes] = []

    def append(self, text: str) -> None:
        self._waiting.append(text.encode("utf-8", "surrogatepass"))
        if len(self._waiting) == _BLOCK:
            self._flush()

    def column(self) -> np.ndarray:
        self._flush()
        return np.concatenate(self._blocks)

    def _flush(self) -> None:
        if self._waiting:
            self._blocks.append(np.array(self._waiting, bytes))
            self._waiting = []
