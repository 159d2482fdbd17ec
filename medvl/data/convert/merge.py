"""The parts of a conversion put together: what one run over the whole corpus would have made, to the byte.

Parts share the plan of the whole corpus, so a shard has the same name and content whichever part makes it. Merging is
therefore to prove that all parts are of one plan, that every shard is there once, and that the whole is sound.
"""

import dataclasses
import heapq
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from medvl.common.files import write_atomic
from medvl.data.convert.conversion import SOURCES, Conversion, note_path, read_note, write_skipped, write_sources
from medvl.data.convert.options import parse_part
from medvl.data.convert.pipeline import write_manifests
from medvl.data.convert.writer import ShardNote
from medvl.data.shards.format import Manifest
from medvl.data.shards.verify import verify_shards
from medvl.data.splits import check_disjoint
from medvl.errors import ConfigError, ShardError

_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    folder: Path
    private: Path
    conversion: Conversion

    @property
    def name(self) -> str:
        return f"part {self.conversion.part} in {self.folder}"


def merge_parts(out: Path, folders: Sequence[Path], *, progress: bool = False) -> dict[str, Manifest]:
    """One folder of shards from all parts of a conversion. Returns the manifest of each split.

    Tars are linked where the file system allows it, else copied; the parts stay as they are. Every byte is then read
    and compared, as by `medvl verify`, before a manifest is written. The same call goes on after an interruption.

    Args:
        out: gets a folder a split; beside it the private folder, with what those of the parts hold.
        folders: the `--out` of each part, their private folders beside them, in any order.
        progress: show a bar.

    Raises:
        ConfigError: no part is given, parts are of different corpora, options, salts or package versions, or `out`
        holds something else.
        ShardError: a part is missing, given twice, unfinished or damaged.
        SplitError: a patient stands in two splits.
    """
    parts = _gather(folders)
    notes = _notes(parts)
    private = out.with_name(out.name + "-private")
    whole = dataclasses.replace(parts[0].conversion, part=None)
    whole.claim(out, private)
    for part in parts:
        for split, name in part.conversion.shards():
            for suffix in (".tar", ".index"):
                _place(part.folder / split / (name + suffix), out / split / (name + suffix))
            write_atomic(note_path(private, name), note_path(part.private, name).read_bytes())
    ordered = [notes[name] for _, name in whole.shards()]
    manifests = whole.manifests(ordered, whole.planned)
    _prove(manifests, out, parts, progress)
    write_skipped(ordered, private)
    with ExitStack() as stack:
        paths = [part.private / SOURCES for part in parts]
        files = [stack.enter_context(path.open(encoding="utf-8", errors="surrogateescape")) for path in paths]
        write_sources(heapq.merge(*files), private)
    write_manifests(manifests, out)
    return manifests


def _gather(folders: Sequence[Path]) -> list[_Part]:
    """All parts by number, once each, of one conversion."""
    named = {folder.resolve() for folder in folders}
    parts = []
    for folder in sorted(named):
        private = folder.with_name(folder.name + "-private")
        if folder.name.endswith("-private") and folder.with_name(folder.name.removesuffix("-private")) in named:
            continue  # a shell's parts/* names the private folders too
        parts.append(_Part(folder, private, Conversion.read(private)))
    if not parts:
        raise ConfigError("no part is given: name the --out of every part")
    first = parts[0]
    for part in parts:
        if part.conversion.part is None:
            raise ConfigError(f"{part.folder} is no part: it was made without --part")
        _compare(first, part)
    by_number: dict[int, _Part] = {}
    for part in parts:
        number, count = _number(part)
        if number in by_number:
            raise ShardError(f"part {number}/{count} is given twice: {by_number[number].folder} and {part.folder}")
        by_number[number] = part
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in by_number]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ShardError(f"not all parts are given: {', '.join(missing[:_SHOWN])}{more} missing")
    return [by_number[number] for number in sorted(by_number)]


def _number(part: _Part) -> tuple[int, int]:
    return parse_part(part.conversion.part or "")


def _compare(first: _Part, part: _Part) -> None:
    ours, theirs = (dataclasses.asdict(dataclasses.replace(each.conversion, part=None)) for each in (first, part))
    differing = [name for name, value in ours.items() if theirs[name] != value]
    if _number(first)[1] != _number(part)[1]:
        differing.append("number of parts")
    if differing:
        raise ConfigError(
            f"{first.name} and {part.name} differ in {', '.join(differing)}: all parts are made by one command, with "
            "one salt and the same package versions, but for --part and --out"
        )


def _notes(parts: Sequence[_Part]) -> dict[str, ShardNote]:
    """Of every shard, by name; all parts are finished."""
    notes: dict[str, ShardNote] = {}
    for part in parts:
        shards = part.conversion.shards()
        found = {name: read_note(part.private, part.folder / split, name) for split, name in shards}
        notes |= {name: note for name, note in found.items() if note is not None}
        lacking = [name for name, note in found.items() if note is None]
        if lacking or not (part.private / SOURCES).is_file():
            first = f" (first {lacking[0]})" if lacking else ""
            raise ShardError(
                f"{part.name} is not finished, {len(lacking)} of its {len(shards)} shards are missing{first}: "
                "run its command again"
            )
    return notes


def _place(source: Path, target: Path) -> None:
    """The file at another place: a hard link, or a copy where there can be none."""
    if target.exists() and target.samefile(source):
        return
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, partial)
    partial.replace(target)


def _prove(manifests: Mapping[str, Manifest], out: Path, parts: Sequence[_Part], progress: bool) -> None:
    """Raises ShardError or SplitError unless every byte is as its part wrote it and the whole adds up."""
    owners = {name: part for part in parts for _, name in part.conversion.shards()}
    for split, manifest in manifests.items():
        problems = verify_shards(out / split, manifest, progress=progress).problems
        if problems:
            damaged = {problem.partition(".")[0] for problem in problems} & set(owners)
            mend = "".join(
                f"; remove {owners[name].folder / split / name}.tar and run the command of its part again"
                for name in sorted(damaged)[:_SHOWN]
            )
            raise ShardError(
                f"{out / split} is not sound, no manifest is written: {'; '.join(problems[:_SHOWN])}{mend}"
            )
    check_disjoint({split: manifest.patients for split, manifest in manifests.items()}, str(out))
