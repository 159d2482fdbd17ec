"""Manifests of a conversion, built from the notes of its shards."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medvl.data.convert.conversion import Conversion
from medvl.data.convert.note import ShardNote
from medvl.data.corpora.common.row_counts import listed
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.errors import CorpusError


def build_manifests(
    conversion: Conversion, notes: Iterable[ShardNote], planned: Mapping[str, int]
) -> dict[str, Manifest]:
    """Return the manifest of each split from the notes of its shards, in order. `planned`: images per split."""
    by_split: dict[str, list[ShardNote]] = {split: [] for split in planned}
    for note in notes:
        by_split[note.split].append(note)
    return {split: _manifest(conversion, split, group, planned[split]) for split, group in by_split.items()}


def write_manifests(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Write each manifest into the folder of its split, unless it is there already."""
    for split, manifest in manifests.items():
        if not (out / split / MANIFEST).is_file() or Manifest.read(out / split) != manifest:
            manifest.write(out / split)


def check_samples(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Raise CorpusError where no split has a sample; the message counts by reason what was left out."""
    if any(manifest.samples for manifest in manifests.values()):
        return
    reasons = sum(
        (Counter(manifest.excluded) + Counter(manifest.skipped) for manifest in manifests.values()), Counter()
    )
    planned = sum(manifest.planned for manifest in manifests.values())
    advice = f"remove {out} and its private folder, or give another --out, once that is mended"
    if reasons["no_text"]:
        advice = "to keep images without text, use --keep-textless and another --out"
    message = f"{out}: no sample was written of {planned} ({listed(reasons)}); {advice}"
    raise CorpusError(message, "empty", field="out")


def _manifest(conversion: Conversion, split: str, notes: Sequence[ShardNote], planned: int) -> Manifest:
    skipped = sorted((image.key, image.reason) for note in notes for image in note.skipped)
    return Manifest(
        corpus=conversion.corpus,
        split=split,
        samples=sum(note.samples for note in notes),
        shards=tuple(note.shard for note in notes),
        label_names=conversion.label_names,
        patients=tuple(sorted({patient for note in notes for patient in note.patients})),
        salt=conversion.salt,
        planned=planned,
        excluded_from_corpus=conversion.excluded,
        rows=conversion.rows,
        excluded=_total(note.excluded for note in notes),
        skipped=dict(sorted(Counter(reason for _, reason in skipped).items())),
        skipped_keys=tuple(skipped),
        warnings=_total([*(note.warnings for note in notes), conversion.corpus_warnings]),
        options=conversion.options,
        packages=conversion.packages,
        generators=conversion.generators,
    )


def _total(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return {name: count for name, count in sorted(total.items()) if count}
