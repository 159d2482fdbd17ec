"""Merging the parts of a conversion: the same bytes as one run over the whole corpus.

All parts share the plan of the whole corpus, so a shard has the same name and content whichever
part writes it. Merging checks that all parts have one plan and that every shard is present once,
links the shards into one folder, and verifies it.
"""

import dataclasses
import heapq
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from medvl.common.files import temporary_name, write_atomic
from medvl.data.convert.options import parse_part
from medvl.data.convert.pipeline import build_manifests, check_samples, write_manifests
from medvl.data.convert.plan import Conversion, PrivateFolder
from medvl.data.convert.record import ShardNote
from medvl.data.shards.format import Manifest
from medvl.data.shards.verify import verify_shards
from medvl.data.splits import check_disjoint
from medvl.data.storage.location import require_local
from medvl.errors import ConfigError, ShardError

_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Finished conversion of a part of a corpus."""

    folder: Path
    private: PrivateFolder
    conversion: Conversion

    @property
    def name(self) -> str:
        """Part and folder, for messages."""
        return f"part {self.conversion.part} in {self.folder}"

    @property
    def number(self) -> tuple[int, int]:
        """Numbers i and n of part i/n."""
        return parse_part(self.conversion.part or "")


def merge_parts(
    out: Path, folders: Sequence[Path], *, progress: bool = False
) -> dict[str, Manifest]:
    """Merge all parts of a conversion into one folder of shards. Returns the manifest of each
    split.

    Tars are hard-linked where the file system allows it, else copied; the parts are left unchanged.
    Every byte is verified, as by `medvl verify`, before a manifest is written. Call it again to
    resume after an interruption.

    Args:
        out: output folder, one subfolder per split; its private folder gets the private files of
            the parts.
        folders: the `--out` of each part, with their private folders beside them, in any order.
        progress: show a progress bar.

    Raises:
        ConfigError: no part is given, the parts differ in corpus, options, salt or package
            versions, or `out` has other content.
        CorpusError: no part has a sample.
        ShardError: a part is missing, given twice, unfinished or damaged.
        SplitError: a patient is in two splits.
    """
    require_local(out, "out")
    parts = _read_parts(folders)
    notes = _read_notes(parts)
    private = PrivateFolder(out)
    conversion = dataclasses.replace(parts[0].conversion, part=None)
    with conversion.claim(out, private):
        return _merge_into(out, private, conversion, parts, notes, progress)


def _merge_into(
    out: Path,
    private: PrivateFolder,
    conversion: Conversion,
    parts: Sequence[_Part],
    notes: Mapping[str, ShardNote],
    progress: bool,
) -> dict[str, Manifest]:
    """Link the shards of all parts into `out`, verify them and write the manifests."""
    for part in parts:
        for split, name in part.conversion.shards():
            for suffix in (".tar", ".index"):
                _link(part.folder / split / (name + suffix), out / split / (name + suffix))
            write_atomic(
                private.note_path(name),
                part.private.note_path(name).read_bytes(),
                permissions=0o600,
            )
    ordered = [notes[name] for _, name in conversion.shards()]
    manifests = build_manifests(conversion, ordered, conversion.planned)
    check_samples(manifests, out)
    _verify(manifests, out, parts, progress)
    private.write_skipped(ordered)
    with ExitStack() as stack:
        paths = [part.private.sources for part in parts]
        files = [
            stack.enter_context(path.open(encoding="utf-8", errors="surrogateescape"))
            for path in paths
        ]
        private.write_sources(heapq.merge(*files))
    write_manifests(manifests, out)
    return manifests


def _read_parts(folders: Sequence[Path]) -> list[_Part]:
    """Return all parts of one conversion, ordered by number."""
    resolved = {folder.resolve() for folder in folders}
    parts = []
    for folder in sorted(resolved):
        if (
            folder.name.endswith("-private")
            and folder.with_name(folder.name.removesuffix("-private")) in resolved
        ):
            continue  # a shell's parts/* includes the private folders
        private = PrivateFolder(folder)
        parts.append(_Part(folder, private, Conversion.read(private)))
    if not parts:
        raise ConfigError("expected the --out of every part, got none", "missing", field="parts")
    for part in parts:
        if part.conversion.part is None:
            raise ConfigError(
                f"{part.folder} is not a part: it was converted without --part",
                "conflict",
                field="part",
            )
        _check_same_conversion(parts[0], part)
    by_number: dict[int, _Part] = {}
    for part in parts:
        number, count = part.number
        if number in by_number:
            twice = f"{by_number[number].folder} and {part.folder}"
            raise ShardError(f"part {number}/{count} is given twice: {twice}", "conflict")
        by_number[number] = part
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in by_number]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ShardError(
            f"missing parts: {', '.join(missing[:_SHOWN])}{more}", "missing", field="parts"
        )
    return [by_number[number] for number in sorted(by_number)]


def _check_same_conversion(first: _Part, part: _Part) -> None:
    ours, theirs = (
        dataclasses.asdict(dataclasses.replace(each.conversion, part=None))
        for each in (first, part)
    )
    differing = [name for name, value in ours.items() if theirs[name] != value]
    if first.number[1] != part.number[1]:
        differing.append("number of parts")
    if differing:
        fields = ", ".join(differing)
        advice = (
            "convert all parts with one command, salt and set of package versions, "
            "changing only --part and --out"
        )
        raise ConfigError(
            f"{first.name} and {part.name} differ in {fields}; {advice}", "mismatch", field=fields
        )


def _read_notes(parts: Sequence[_Part]) -> dict[str, ShardNote]:
    """Return the note of every shard by name. Raises ShardError when a part is unfinished."""
    notes: dict[str, ShardNote] = {}
    for part in parts:
        shards = part.conversion.shards()
        stored = {name: part.private.read_note(part.folder / split, name) for split, name in shards}
        notes |= {name: note for name, note in stored.items() if note is not None}
        missing = [name for name, note in stored.items() if note is None]
        if missing or not part.private.sources.is_file():
            first = f" (first {missing[0]})" if missing else ""
            state = f"{len(missing)} of {len(shards)} shards are missing{first}"
            raise ShardError(
                f"{part.name} is not finished: {state}; run its command again", "missing"
            )
    return notes


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where links are not supported."""
    if target.exists() and target.samefile(source):
        return
    partial = temporary_name(target)
    try:
        os.link(source, partial)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, partial)
    partial.replace(target)


def _verify(
    manifests: Mapping[str, Manifest], out: Path, parts: Sequence[_Part], progress: bool
) -> None:
    """Raise ShardError or SplitError unless the merged folder is intact and its splits are
    disjoint.
    """
    part_of = {name: part for part in parts for _, name in part.conversion.shards()}
    for split, manifest in manifests.items():
        problems = verify_shards(out / split, manifest, progress=progress).problems
        if problems:
            damaged = {problem.partition(".")[0] for problem in problems} & set(part_of)
            repair = "".join(
                f"; remove {part_of[name].folder / split / name}.tar and run the command of its "
                f"part again"
                for name in sorted(damaged)[:_SHOWN]
            )
            damage = "; ".join(problems[:_SHOWN])
            raise ShardError(
                f"{out / split} is damaged, no manifest was written: {damage}{repair}", "mismatch"
            )
    check_disjoint({split: manifest.patients for split, manifest in manifests.items()}, str(out))
