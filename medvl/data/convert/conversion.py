"""What a conversion is of: everything that decides its shards, and what the manifests tell of the corpus.

It lies in `OUT-private/plan.json`. A run that goes on compares it with its own plan, and `medvl merge` compares the
parts by it.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from medvl.common.files import write_atomic
from medvl.data.convert.options import ShardOptions, parse_part
from medvl.data.convert.plan import Piece
from medvl.data.convert.writer import ShardNote
from medvl.data.corpora.common.tables import Plan
from medvl.data.shards.format import Manifest, sample_to_json
from medvl.errors import ConfigError, ShardError

Item = TypeVar("Item")

PLAN = "plan.json"
SKIPPED = "skipped.jsonl"
SOURCES = "sources.tsv"

_PACKAGES = ("medvl", "numpy", "opencv-python-headless", "pillow", "pydicom", "simplejpeg")
_IDENTITY = ("corpus", "options", "part", "records", "salt")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A corpus as planned, and how it is stored; the same for all parts but for `part`."""

    corpus: str
    salt: str
    """Fingerprint of the salt."""
    records: str
    """sha256 over all samples as planned and the shards they go into: the version of the corpus."""
    options: Mapping[str, Any]
    part: str | None
    """`i/n`, or None for all of the corpus."""
    label_names: tuple[str, ...]
    excluded: Mapping[str, int]
    """Images that a rule left out of the plan."""
    noticed: Mapping[str, int]
    planned: Mapping[str, int]
    """Images by split, of all parts together."""
    packages: Mapping[str, str]

    @classmethod
    def of(
        cls, plan: Plan, pieces: Iterable[Piece], options: ShardOptions, salt: str, part: str | None
    ) -> "Conversion":
        """That of a plan; `pieces` are those of the whole corpus."""
        records, planned = hashlib.sha256(), Counter[str]()
        for piece in pieces:
            planned[piece.split] += len(piece)
            records.update(piece.name.encode())
            for record in piece.records(plan.records):
                # The sample as planned, with its labels: a corrected table must not go on with the old table's shards.
                records.update(sample_to_json(record.sample))
        return cls(
            corpus=plan.corpus,
            salt=salt,
            records=records.hexdigest(),
            options=dataclasses.asdict(options),
            part=part,
            label_names=plan.label_names,
            excluded=_total([plan.excluded]),
            noticed=_total([plan.warnings]),
            planned=dict(planned),
            packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        )

    @classmethod
    def read(cls, private: Path) -> "Conversion":
        """Raises ShardError when the file is missing or damaged."""
        path = private / PLAN
        if not path.is_file():
            raise ShardError(f"{path} is missing: `medvl shards` writes it beside the shards; copy that folder too")
        try:
            content = _load(path)
            return cls(**{**content, "label_names": tuple(content["label_names"])})
        except (TypeError, KeyError) as error:
            raise ShardError(f"{path} is damaged, or of another version of medvl: make its shards again") from error

    def claim(self, out: Path, private: Path) -> None:
        """Make the folders of a conversion, or go on with them.

        Raises ConfigError when they hold another one, or something else.
        """
        path = private / PLAN
        if path.is_file():
            before = _load(path)
            differing = [name for name in _IDENTITY if before.get(name) != getattr(self, name)]
            if differing:
                raise ConfigError(
                    f"{out} was begun with another {', '.join(differing)}: give another --out, "
                    f"or remove {out} and {private} to start anew"
                )
        elif out.exists() and any(out.iterdir()):
            raise ConfigError(
                f"{out} is not empty and {path} is missing, so it cannot be continued: give another --out"
            )
        for split in self.planned:
            (out / split).mkdir(parents=True, exist_ok=True)
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True))

    def shards(self) -> list[tuple[str, str]]:
        """(split, name) of each shard of this part, or of the whole corpus, in their order."""
        names = [
            (split, shard_name(self.corpus, split, number))
            for split, planned in sorted(self.planned.items())
            for number in range(-(-planned // self.options["samples_per_shard"]))
        ]
        return list(share(names, self.part))

    def manifests(self, notes: Iterable[ShardNote], planned: Mapping[str, int]) -> dict[str, Manifest]:
        """The manifest of each split of `planned` (images by split) from the notes of its shards, in their order."""
        by_split: dict[str, list[ShardNote]] = {split: [] for split in planned}
        for note in notes:
            by_split[note.split].append(note)
        return {split: self._manifest(split, mine, planned[split]) for split, mine in by_split.items()}

    def _manifest(self, split: str, notes: Sequence[ShardNote], planned: int) -> Manifest:
        skipped = sorted((key, reason) for note in notes for key, reason, _ in note.skipped)
        return Manifest(
            corpus=self.corpus,
            split=split,
            samples=sum(note.samples for note in notes),
            shards=tuple(note.shard for note in notes),
            label_names=self.label_names,
            patients=tuple(sorted({patient for note in notes for patient in note.patients})),
            salt=self.salt,
            planned=planned,
            excluded_from_corpus=self.excluded,
            excluded=_total(note.excluded for note in notes),
            skipped=dict(sorted(Counter(reason for _, reason in skipped).items())),
            skipped_keys=tuple(skipped),
            warnings=_total([*(note.warnings for note in notes), self.noticed]),
            options=self.options,
            packages=self.packages,
        )


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        raise ShardError(f"{path} cannot be read ({type(error).__name__}): make its shards again") from error
    return content


def shard_name(corpus: str, split: str, number: int) -> str:
    """File name of a shard without `.tar`."""
    return f"{corpus}-{split}-{number:06d}"


def share(items: Sequence[Item], part: str | None) -> Sequence[Item]:
    """Every n-th item from the i-th on, for part `i/n`: each part gets its share of every split. None: all."""
    if part is None:
        return items
    number, parts = parse_part(part)
    return items[number - 1 :: parts]


def note_path(private: Path, name: str) -> Path:
    """Where the note of a finished shard lies."""
    return private / f"{name}.json"


def read_note(private: Path, folder: Path, name: str) -> ShardNote | None:
    """The note of a shard; None while the shard, its index or its note is missing or cut short."""
    tar = folder / f"{name}.tar"
    try:
        note = ShardNote.from_json(note_path(private, name).read_bytes())
        whole = tar.stat().st_size == note.size and tar.with_suffix(".index").is_file()
    except (OSError, ValueError, TypeError):
        return None
    return note if whole else None


def write_skipped(notes: Iterable[ShardNote], private: Path) -> None:
    """List what could not be read, and why: for the private folder, as the messages name files."""
    rows = [
        json.dumps({"key": key, "split": note.split, "reason": reason, "message": message}, ensure_ascii=False)
        for note in notes
        for key, reason, message in note.skipped
    ]
    write_atomic(private / SKIPPED, "".join(row + "\n" for row in rows))


def write_sources(lines: Iterable[str], private: Path) -> None:
    """Which file each key came from: lines `key<TAB>path`, sorted, written as they come."""
    path = private / SOURCES
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)
    partial.replace(path)


def _total(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return {name: count for name, count in sorted(total.items()) if count}
