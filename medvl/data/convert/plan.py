"""The shard plan: records of a corpus ordered by key and cut into shards, with little memory per
image.
"""

import dataclasses
import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import listed
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, check_sample, sample_to_json
from medvl.data.splits import check_disjoint
from medvl.errors import CorpusError, SplitError

_BLOCK = 1 << 12


def shard_name(corpus: str, split: str, number: int) -> str:
    """Return the file name of a shard, without `.tar`."""
    return f"{corpus}-{split}-{number:06d}"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard:
    """Name of a shard and the positions of its records in the corpus."""

    name: str
    split: str
    positions_N: np.ndarray
    """int64, in the order of the shard."""

    def __len__(self) -> int:
        return len(self.positions_N)


def count_by_split(shards: Iterable[PlannedShard]) -> Counter[str]:
    """Return the number of planned images of each split."""
    planned = Counter[str]()
    for shard in shards:
        planned[shard.split] += len(shard)
    return planned


class ShardPlan:
    """All shards of a corpus. Memory holds the order only; records are read back when their shard
    is converted.

    Raises:
        CorpusError: there are no records, or two with one key.
        ShardError: a key is not a valid file name, or a field has the wrong type.
        SplitError: a patient is in two splits.
    """

    def __init__(self, plan: Plan, samples_per_shard: int) -> None:
        self.corpus = plan.corpus
        self.label_names = plan.label_names
        self.rows = plan.rows
        self.warnings = plan.warnings
        self.generators = plan.generators
        self._records = plan.records
        self.folders = plan.allowed_folders()
        self.shards = tuple(
            PlannedShard(
                shard_name(plan.corpus, split, number),
                split,
                order_N[start : start + samples_per_shard],
            )
            for split, order_N in sorted(order_by_key(plan).items())
            for number, start in enumerate(range(0, len(order_N), samples_per_shard))
        )

    def records(self, shard: PlannedShard) -> Iterator[Record]:
        """Read the records of one shard."""
        return (self._records[position] for position in shard.positions_N.tolist())

    def fingerprint(self) -> str:
        """Return the sha256 over all shard names and samples, labels included: the version of
        the corpus.
        """
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.name.encode())
            for record in self.records(shard):
                digest.update(sample_to_json(record.sample))
                if record.volume is not None:
                    digest.update(str(record.volume).encode())
        return digest.hexdigest()

    def sources(self, shards: Sequence[PlannedShard]) -> Iterator[str]:
        """Yield lines `key<TAB>path` of the images of some shards, sorted."""
        by_split: dict[str, list[PlannedShard]] = {}
        for shard in shards:
            by_split.setdefault(shard.split, []).append(shard)
        return heapq.merge(*map(self._source_lines, by_split.values()))

    def _source_lines(self, shards: Sequence[PlannedShard]) -> Iterator[str]:
        """Yield the lines of one split; its shards are ordered by key."""
        for shard in shards:
            for record in self.records(shard):
                if record.sample.image is not None:
                    yield f"{record.sample.key}\t{record.sample.image}\n"


def order_by_key(plan: Plan) -> dict[str, np.ndarray]:
    """Return the positions in `plan.records` of each split's records, int64, in the order of their
    keys.

    Raises CorpusError, ShardError and SplitError as `ShardPlan` does.
    """
    if not plan.records:
        detail = listed(plan.rows.left_out) or "empty table"
        raise CorpusError(f"{plan.corpus}: no image is left to convert ({detail})", "empty")
    numbers: dict[str, int] = {}
    splits = array("i")
    keys = _TextColumn()
    patients = _TextColumn()
    for record in plan.records:
        sample = record.sample
        check_sample(sample)
        splits.append(numbers.setdefault(sample.split, len(numbers)))
        keys.append(sample.key)
        patients.append(sample.patient)
    split_N = np.frombuffer(splits, np.intc)
    key_N = keys.values()
    order_N = np.argsort(key_N, kind="stable")
    repeated_N = key_N[order_N[1:]] == key_N[order_N[:-1]]
    if repeated_N.any():
        repeated = np.unique(key_N[order_N[1:]][repeated_N])
        message = (
            f"{plan.corpus}: {len(repeated)} images are listed more than once, first key "
            f"{repeated[0].decode()}"
        )
        raise CorpusError(message, "conflict", field="key")
    _check_patients(patients.values(), split_N, list(numbers), plan.corpus)
    split_N = split_N[order_N]
    return {split: order_N[split_N == number] for split, number in numbers.items()}


def _check_patients(
    patient_N: np.ndarray, split_N: np.ndarray, names: Sequence[str], corpus: str
) -> None:
    order_N = np.argsort(patient_N, kind="stable")
    patient_N = patient_N[order_N]
    split_N = split_N[order_N]
    leaked_N = (patient_N[1:] == patient_N[:-1]) & (split_N[1:] != split_N[:-1])
    if leaked_N.any():
        shared_N = np.isin(patient_N, patient_N[1:][leaked_N])
        shared = {
            name: [
                patient.decode("utf-8", "surrogatepass")
                for patient in patient_N[shared_N & (split_N == number)]
            ]
            for number, name in enumerate(names)
        }
        check_disjoint(shared, corpus)


class _TextColumn:
    """Short strings as an array of UTF-8 bytes, which sorts like them and takes an eighth of the
    memory of a list.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._pending: list[bytes] = []

    def append(self, text: str) -> None:
        """Add a string to the end of the column."""
        self._pending.append(text.encode("utf-8", "surrogatepass"))
        if len(self._pending) == _BLOCK:
            self._flush()

    def values(self) -> np.ndarray:
        """Return the strings as UTF-8 bytes (N,), in the order in which they were added."""
        self._flush()
        return np.concatenate(self._blocks)

    def _flush(self) -> None:
        if self._pending:
            self._blocks.append(np.array(self._pending, bytes))
            self._pending = []


# Removal of evaluation patients from a corpus before conversion.

EXCLUDED = "held_out_patient"


def hold_out(plan: Plan, folders: Sequence[Path], deid: Deidentifier) -> Plan:
    """Return the plan without the patients of some folders of shards; their images are counted as
    excluded.

    Raises SplitError when a folder was hashed with another salt than the plan, so that patients
    cannot be compared.
    """
    held_out: set[str] = set()
    for folder in folders:
        manifest = Manifest.read(folder)
        if manifest.salt != deid.fingerprint:
            message = f"{folder} was hashed with another salt; convert both with one --salt-file"
            raise SplitError(message, "mismatch", field="salt")
        held_out.update(manifest.patients)
    records = Records(record for record in plan.records if record.sample.patient not in held_out)
    excluded = Counter({EXCLUDED: len(plan.records) - len(records)})
    return dataclasses.replace(plan, records=records, rows=plan.rows.excluding(excluded))
