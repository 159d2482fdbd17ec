"""From the records of a corpus to a folder of shards: in parallel, resumable, and the same whoever does the work.

The records of a split are ordered by key and cut into shards of a fixed number of records, so what goes into a shard
is known before any file is read. Of a plan, memory holds that order; the records of a shard are read back when its turn
comes. Each shard is one task: it is written under a temporary name, renamed when whole, and noted as done. A run that
was killed finds the notes and goes on; the number of workers changes nothing but the time.

Beside OUT lies OUT-private, which must not be shared: the notes, which file each key came from, and which files were
skipped and why.
"""

import errno
import heapq
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tqdm import tqdm

from medvl.common.files import write_atomic
from medvl.data.convert.conversion import (
    SKIPPED,
    Conversion,
    note_path,
    read_note,
    shard_name,
    share,
    write_skipped,
    write_sources,
)
from medvl.data.convert.memory_limit import WORKER_BYTES, cap_memory, capped_memory
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.plan import Piece, ordered_by_key
from medvl.data.convert.writer import ShardNote, ShardTask, build_shard
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.errors import BudgetError, ShardError


def write_shards(
    plan: Plan, deid: Deidentifier, run: ShardRun, options: ShardOptions | None = None
) -> dict[str, Manifest]:
    """Convert a corpus, or the part of it that `run.part` names. Returns the manifest of each split.

    A part is no folder of shards yet: its manifests are returned and not written; `merge_parts` writes those of the
    whole.

    Args:
        plan: the records, from a module of `medvl.data.corpora`: those of the whole corpus, for a part too.
        deid: the hasher that the plan was made with; its salt's fingerprint goes into the manifests.
        run: where the shards go, budget, workers. A second run of the same plan goes on where the first one ended.
        options: how images are stored.

    Raises:
        SplitError: a patient stands in two splits. CorpusError: no record, or two with one key. ConfigError: `run.out`
        holds shards of another plan. BudgetError: more unreadable images than the budget. ShardError: the disk is full,
        or a worker died.
    """
    options = options or ShardOptions()
    private = run.out.with_name(run.out.name + "-private")
    everything = list(_cut(plan, run.out, options.samples_per_shard))
    conversion = Conversion.of(plan, everything, options, deid.fingerprint, run.part)
    conversion.claim(run.out, private)
    pieces = share(everything, run.part)
    found = {piece.name: read_note(private, piece.folder, piece.name) for piece in pieces}
    notes = {name: note for name, note in found.items() if note is not None}
    planned = sum(map(len, pieces))
    budget = int(run.max_skipped if run.max_skipped >= 1 else run.max_skipped * planned)
    remaining = [piece for piece in pieces if piece.name not in notes]
    try:
        if remaining:
            tasks = (piece.task(plan.records, options) for piece in remaining)
            done = planned - sum(map(len, remaining))
            workers = min(run.workers or os.cpu_count() or 1, len(remaining))
            _run(tasks, done, planned, notes, private, budget, workers)
        _check_budget(notes.values(), budget, private)
        return _write_manifests(conversion, plan.records, pieces, notes, run.out, private)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ShardError(
                f"the disk that holds {run.out} is full: free some space and run the same command again; "
                f"{len(notes)} of {len(pieces)} shards are done and will be kept"
            ) from error
        raise


def _cut(plan: Plan, out: Path, size: int) -> Iterator[Piece]:
    for split, places in sorted(ordered_by_key(plan).items()):
        for number, start in enumerate(range(0, len(places), size)):
            name = shard_name(plan.corpus, split, number)
            yield Piece(name, split, out / split, places[start : start + size])


def _run(
    tasks: Iterable[ShardTask],
    done: int,
    planned: int,
    notes: dict[str, ShardNote],
    private: Path,
    budget: int,
    workers: int,
) -> None:
    skipped = sum(len(note.skipped) for note in notes.values())
    quiet = not sys.stderr.isatty()
    with tqdm(total=planned, initial=done, unit="img", desc="shards", mininterval=10 if quiet else 0.2) as bar:
        for note, converted in _results(tasks, workers):
            if note is not None:
                write_atomic(note_path(private, note.name), note.to_json())
                notes[note.name] = note
                skipped += len(note.skipped)
                if skipped > budget:
                    _check_budget(notes.values(), budget, private)
            bar.update(done + converted - bar.n)
        bar.update(planned - bar.n)


def _results(tasks: Iterable[ShardTask], workers: int) -> Iterator[tuple[ShardNote | None, int]]:
    """Finished notes as they come, and every half second the number of images done so far."""
    if workers == 1:
        converted = 0
        for task in tasks:
            with capped_memory(WORKER_BYTES):  # as in the processes below; for no longer than strangers' files are open
                note = build_shard(task, _tick)
            converted += len(task.records)
            yield note, converted
        return
    # Spawned, not forked: codecs and progress bars start threads, and a fork of a threaded process may hang.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(counter,))
    try:
        running = set[Future[ShardNote]]()
        for task in tasks:
            running.add(pool.submit(_build_in_worker, task))
            if len(running) >= 2 * workers:  # tasks are large: keep few of them pickled
                yield from _collect(running, counter)
        while running:
            yield from _collect(running, counter)
    except BrokenProcessPool:
        raise ShardError(
            "a worker process died, most likely for lack of memory: run the same command again, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: set[Future[ShardNote]], counter: "Synchronized[int]") -> Iterator[tuple[ShardNote | None, int]]:
    finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
    if not finished:
        yield None, counter.value
    for future in finished:
        running.discard(future)
        yield future.result(), counter.value


_counter: "Synchronized[int] | None" = None


def _start_worker(counter: "Synchronized[int]") -> None:
    import cv2

    global _counter
    _counter = counter
    cv2.setNumThreads(0)  # one process a core already
    cap_memory(WORKER_BYTES)


def _tick() -> None:
    if _counter is not None:
        with _counter.get_lock():
            _counter.value += 1


def _build_in_worker(task: ShardTask) -> ShardNote:
    return build_shard(task, _tick)


def _check_budget(notes: Iterable[ShardNote], budget: int, private: Path) -> None:
    reasons = Counter(reason for note in notes for _, reason, _ in note.skipped)
    if reasons.total() > budget:
        write_skipped(notes, private)
        detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise BudgetError(
            f"{reasons.total()} images cannot be read ({detail}), more than the budget of {budget}; "
            f"{private / SKIPPED} lists them. Mend them, or allow them with --max-skipped and run again: "
            "finished shards are kept"
        )


def _write_manifests(
    conversion: Conversion,
    records: Sequence[Record],
    pieces: Sequence[Piece],
    notes: Mapping[str, ShardNote],
    out: Path,
    private: Path,
) -> dict[str, Manifest]:
    write_skipped((notes[piece.name] for piece in pieces), private)
    by_split: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_split.setdefault(piece.split, []).append(piece)
    write_sources(heapq.merge(*(_source_lines(mine, records) for mine in by_split.values())), private)
    planned = {split: sum(map(len, mine)) for split, mine in by_split.items()}
    manifests = conversion.manifests((notes[piece.name] for piece in pieces), planned)
    if conversion.part is None:
        write_manifests(manifests, out)
    return manifests


def _source_lines(pieces: Sequence[Piece], records: Sequence[Record]) -> Iterator[str]:
    """Sorted, as pieces of one split follow one another by key."""
    for piece in pieces:
        for record in piece.records(records):
            yield f"{record.sample.key}\t{record.sample.image}\n"


def write_manifests(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Those that are not there already, each in the folder of its split."""
    for split, manifest in manifests.items():
        if not (out / split / MANIFEST).is_file() or Manifest.read(out / split) != manifest:
            manifest.write(out / split)
