"""The shard plan: records of a corpus ordered by key and cut into shards, with little memory per
image; and the identity of a conversion, stored in `OUT-private/plan.json`.

A resumed run compares the identity with its own, and `medvl merge` compares those of all parts.
"""

import contextlib
import dataclasses
import hashlib
import heapq
import importlib.metadata
import json
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import medvl
from medvl.common.config_io import upgrade_settings
from medvl.common.files import RunLock, new_file, private_folder, subfolder, sweep, write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.convert.options import ShardOptions, VolumeShardOptions, select_part
from medvl.data.convert.record import ShardNote, SkippedImage
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import listed
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, check_sample, sample_to_json
from medvl.data.splits import check_disjoint
from medvl.errors import ConfigError, CorpusError, ShardError, SplitError

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


# OUT-private beside a folder of shards: the plan, notes of finished shards, skipped images and
# source files.
#
# It names files of the corpus and must not be shared.


class PrivateFolder:
    """The private folder of the output folder `out`."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(out.name + "-private")
        self.plan, self.skipped, self.sources = (
            self.path / name for name in ("plan.json", "skipped.jsonl", "sources.tsv")
        )

    def create(self) -> Path:
        """Create the folder, or close an existing one and its files to other users; return its
        path.

        Raises ConfigError where it is a link or belongs to another user, as `private_folder`.
        """
        private_folder(self.path)
        for file in self.path.iterdir():
            if (
                file.is_file()
                and not file.is_symlink()
                and stat.S_IMODE(file.stat().st_mode) & 0o077
            ):
                file.chmod(0o600)
        return self.path

    def note_path(self, shard: str) -> Path:
        """Return the path of a shard's note."""
        return self.path / f"{shard}.json"

    def write_note(self, note: ShardNote) -> None:
        """Record a shard as finished."""
        write_atomic(self.note_path(note.name), note.to_json(), permissions=0o600)

    def read_note(self, folder: Path, shard: str) -> ShardNote | None:
        """Read the note of a shard in `folder`; None if the shard, its index or its note is
        missing or truncated.
        """
        tar = folder / f"{shard}.tar"
        try:
            note = ShardNote.from_json(self.note_path(shard).read_bytes())
            complete = tar.stat().st_size == note.size and tar.with_suffix(".index").is_file()
        except (OSError, ValueError, TypeError):
            return None
        return note if complete else None

    def write_skipped(
        self, notes: Iterable[ShardNote], rows: Iterable[tuple[str, str]] = ()
    ) -> None:
        """List the skipped rows of the corpus, and the skipped images, with reason and message;
        these name files.
        """
        lines = [json.dumps({"reason": reason, "message": message}) for reason, message in rows]
        lines += [
            json.dumps(
                {
                    "key": image.key,
                    "split": note.split,
                    "reason": image.reason,
                    "message": image.message,
                }
            )
            for note in notes
            for image in note.skipped
        ]
        write_atomic(self.skipped, "".join(line + "\n" for line in lines), permissions=0o600)

    def write_sources(self, lines: Iterable[str]) -> None:
        """List the source file of each key: sorted lines `key<TAB>path`, written as they are
        produced.
        """
        with new_file(self.sources, permissions=0o600) as file:
            file.writelines(line.encode(errors="surrogateescape") for line in lines)


_PACKAGES = ("numpy", "opencv-python-headless", "pillow", "pydicom", "simplejpeg")
_IDENTITY = {
    "corpus": "the corpus' name",
    "options": "the options of the images or shards",
    "part": "the part",
    "records": "the records (rows, columns or splits)",
    "salt": "the salt",
}
"""Field of a conversion that a resumed run must share -> its name in messages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A planned corpus and its options. All parts of one conversion differ in `part` only."""

    corpus: str
    salt: str
    """Fingerprint of the salt."""
    records: str
    """`ShardPlan.fingerprint` of the corpus."""
    options: Mapping[str, Any]
    part: str | None
    """`i/n`, or None for the whole corpus."""
    label_names: tuple[str, ...]
    excluded: Mapping[str, int]
    """Rows left out before planning by an option or a rule, by reason."""
    corpus_warnings: Mapping[str, int]
    """Repairs to the tables of the corpus, by rule."""
    planned: Mapping[str, int]
    """Images per split, over all parts."""
    packages: Mapping[str, str]
    generators: tuple[Mapping[str, Any], ...] = ()
    """Generators of synthetic images (`Manifest.generators`)."""
    rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rows of the corpus, as `Manifest.rows`."""

    @classmethod
    def from_plan(
        cls, plan: ShardPlan, options: ShardOptions, salt: str, part: str | None
    ) -> "Conversion":
        """Return the identity of a plan, which covers the whole corpus."""
        return cls(
            corpus=plan.corpus,
            salt=salt,
            records=plan.fingerprint(),
            options=options.stored(),
            part=part,
            label_names=plan.label_names,
            excluded=_nonzero(plan.rows.excluded),
            rows=plan.rows.to_json(),
            corpus_warnings=_nonzero(plan.warnings),
            planned=dict(count_by_split(plan.shards)),
            packages=package_versions(),
            generators=plan.generators,
        )

    @classmethod
    def read(cls, private: PrivateFolder) -> "Conversion":
        """Read `plan.json`. Raises ShardError when it is missing or damaged."""
        if not private.plan.is_file():
            raise ShardError(
                f"{private.plan} does not exist; copy it beside the shards", "not_found"
            )
        try:
            content = _load(private.plan)
            return cls(
                **{
                    **content,
                    **{
                        name: tuple(content.get(name, ())) for name in ("label_names", "generators")
                    },
                }
            )
        except (TypeError, KeyError) as error:
            raise ShardError(
                f"{private.plan} is damaged or of another version; convert again", "malformed"
            ) from error

    @contextlib.contextmanager
    def claim(self, out: Path, private: PrivateFolder) -> Iterator[None]:
        """Create the output folders, or resume in them, and lock them within the block.

        Raises ConfigError when they hold another conversion or other files, or another process
        writes them.
        """
        self._check_folders(out, private)
        private.create()
        with RunLock(private.path, error=ConfigError, field="out"):
            self._check_folders(out, private)  # another process may have finished since
            for split in self.planned:
                sweep(subfolder(out, split))  # partial shards of a killed process
            content = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
            write_atomic(private.plan, content, permissions=0o600)
            yield

    def _check_folders(self, out: Path, private: PrivateFolder) -> None:
        if private.plan.is_file():
            stored = _load(private.plan)
            today = dataclasses.asdict(self)
            for content in (stored, today):
                content["options"] = _all_options(content.get("options", {}))
            differing = [name for name in _IDENTITY if stored.get(name) != today[name]]
            if differing:
                advice = f"give another --out, or remove {out} and {private.path} to start again"
                message = (
                    f"{out} holds another conversion: it differs in "
                    f"{', '.join(_IDENTITY[name] for name in differing)}"
                )
                raise ConfigError(f"{message}; {advice}", "exists", field=", ".join(differing))
        elif out.exists() and any(out.iterdir()):
            message = f"{out} is not empty and {private.plan} does not exist; give another --out"
            raise ConfigError(message, "exists", field="out")

    def shards(self) -> list[tuple[str, str]]:
        """Return (split, name) of each shard of this part, or of the whole corpus, in order."""
        names = [
            (split, shard_name(self.corpus, split, number))
            for split, planned in sorted(self.planned.items())
            for number in range(-(-planned // self.options["samples_per_shard"]))
        ]
        return list(select_part(names, self.part))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that determine the bytes of a shard."""
    # medvl's own from the code: a checkout on PYTHONPATH is not installed.
    return {
        "medvl": medvl.__version__,
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _all_options(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored options with the defaults of those that are left out, or were added since."""
    config = VolumeShardOptions() if "volume" in stored else ShardOptions()
    return upgrade_settings(stored, config)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        raise ShardError(
            f"cannot read {path} ({type(error).__name__}); convert again", "malformed"
        ) from error
    return content


def _nonzero(counter: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counter.items()) if count}


# Search for skipped images that may have become readable, so that a resumed conversion reads them
# again.


def has_repairs(note: ShardNote, records: Iterable[Record], since: float) -> bool:
    """Return whether a skipped image of a shard was added, changed, or is now expected under
    another path.

    Args:
        note: note of the finished shard.
        records: records of the shard.
        since: time at which the note was written, in seconds since the epoch.
    """
    skipped = {image.key: image for image in note.skipped}
    return any(
        _is_repaired(record, skipped[record.sample.key], since)
        for record in records
        if record.sample.key in skipped
    )


def _is_repaired(record: Record, skipped: SkippedImage, since: float) -> bool:
    if tuple(map(str, record.files)) != skipped.files:
        return True
    if skipped.reason.endswith("_missing"):
        return all(path.exists() for path in record.files)
    return any(_change_time(path) > since for path in record.files)


def _change_time(path: Path) -> float:
    """Return the time of the last change of a file, or of a link to it; 0 if it does not exist."""
    try:
        return max(path.stat().st_ctime, path.lstat().st_ctime)
    except OSError:
        return 0.0
