"""Conversion of a corpus to shards: parallel, resumable, and byte-identical for any number of workers.

A record moves one way:

    medvl.data.corpora   records of the corpus: sample fields, and paths of image and report
    plan.py              order by key and cut into shards of a fixed number of records, before any file is read
    pipeline.py          pass the records of each missing shard to a worker
    record.py            worker: read report and image, encode both
    writer.py            worker: write the tar and its index under a temporary name, then rename them

What comes back is a `ShardNote` (note.py). Notes are kept in OUT-private (private_folder.py), so an interrupted run
resumes with the shards that have none. When all shards are finished, manifests.py builds the manifests from the notes.
merge.py combines the parts of a conversion, and `medvl.data.shards.verify` checks a folder against its manifest.
"""

import dataclasses
import errno
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import cv2
from tqdm import tqdm

from medvl.common.interrupts import interrupts_blocked
from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.convert.conversion import Conversion
from medvl.data.convert.manifests import build_manifests, write_manifests
from medvl.data.convert.memory_limit import WORKER_BYTES, limit_memory, memory_limited
from medvl.data.convert.note import ShardNote
from medvl.data.convert.options import ShardOptions, ShardRun, select_part
from medvl.data.convert.plan import PlannedShard, ShardPlan, count_by_split
from medvl.data.convert.private_folder import PrivateFolder
from medvl.data.convert.record import convert_records
from medvl.data.convert.writer import write_shard
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.errors import BudgetError, ShardError


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTask:
    """Work of one worker: the records of a shard, and where to write it."""

    name: str
    split: str
    folder: Path
    records: tuple[Record, ...]
    options: ShardOptions
    folders: InputFolders
    """Folders that images and reports must be in."""


def write_shards(
    plan: Plan, deid: Deidentifier, run: ShardRun, options: ShardOptions | None = None
) -> dict[str, Manifest]:
    """Convert a corpus, or the part `run.part` of it. Returns the manifest of each split.

    The manifests of a part are returned but not written; `merge_parts` writes those of the whole corpus.

    Args:
        plan: records of the whole corpus, from a module of `medvl.data.corpora`.
        deid: hasher that the plan was made with; the manifests store the fingerprint of its salt.
        run: output folder, budget, workers. A second run of the same plan resumes.
        options: storage format of the images.

    Raises:
        SplitError: a patient is in two splits.
        CorpusError: there are no records, or two with one key.
        ConfigError: `run.out` holds another conversion, or another process converts into it.
        BudgetError: more images are unreadable than the budget allows.
        ShardError: the disk is full, or a worker died.
    """
    options = options or ShardOptions()
    private = PrivateFolder(run.out)
    shard_plan = ShardPlan(plan, options.samples_per_shard)
    conversion = Conversion.from_plan(shard_plan, options, deid.fingerprint, run.part)
    with conversion.claim(run.out, private):
        return _write_claimed(shard_plan, conversion, private, run, options)


def _write_claimed(
    shard_plan: ShardPlan, conversion: Conversion, private: PrivateFolder, run: ShardRun, options: ShardOptions
) -> dict[str, Manifest]:
    """Convert the shards that are missing, and write the manifests."""
    shards = select_part(shard_plan.shards, run.part)
    stored = [private.read_note(run.out / shard.split, shard.name) for shard in shards]
    notes = {note.name: note for note in stored if note is not None}
    planned = count_by_split(shards)
    budget = int(run.max_skipped if run.max_skipped >= 1 else run.max_skipped * planned.total())
    try:
        with closing(_convert(shard_plan, shards, notes, run, options)) as converted:
            for note in converted:
                private.write_note(note)
                notes[note.name] = note
                _check_budget(notes.values(), budget, private)
        _check_budget(notes.values(), budget, private)
        ordered = [notes[shard.name] for shard in shards]
        private.write_skipped(ordered)
        private.write_sources(shard_plan.sources(shards))
        manifests = build_manifests(conversion, ordered, planned)
        if conversion.part is None:
            write_manifests(manifests, run.out)
        return manifests
    except OSError as error:
        if error.errno == errno.ENOSPC:
            kept = f"{len(notes)} of {len(shards)} shards are finished and are kept"
            message = f"no space left on the disk of {run.out}; free some space and run the same command again ({kept})"
            raise ShardError(message, "unreadable") from error
        raise


def build_shard(task: ShardTask, tick: Callable[[], None]) -> ShardNote:
    """Convert and write one shard; unreadable images are noted, not raised. `tick` is called after each record.

    Raises OSError when writing fails.
    """
    note = ShardNote(task.name, task.split)
    samples = convert_records(task.records, task.options, task.folders, note, tick)
    return note.complete(write_shard(task.folder, task.name, samples))


def _convert(
    shard_plan: ShardPlan,
    shards: Sequence[PlannedShard],
    finished: Mapping[str, ShardNote],
    run: ShardRun,
    options: ShardOptions,
) -> Generator[ShardNote, None, None]:
    """Convert the shards that are not finished and show progress. Yields their notes in order of completion."""
    missing = [shard for shard in shards if shard.name not in finished]
    if not missing:
        return
    planned = sum(map(len, shards))
    done = planned - sum(map(len, missing))
    folders = ANYWHERE if options.follow_links else shard_plan.folders
    tasks = (
        ShardTask(shard.name, shard.split, run.out / shard.split, tuple(shard_plan.records(shard)), options, folders)
        for shard in missing
    )
    workers = min(run.workers or os.cpu_count() or 1, len(missing))
    quiet = not sys.stderr.isatty()
    with (
        tqdm(total=planned, initial=done, unit="img", desc="shards", mininterval=10 if quiet else 0.2) as bar,
        closing(_run_tasks(tasks, workers)) as results,
    ):
        for note, converted in results:
            if note is not None:
                yield note
            bar.update(done + converted - bar.n)
        bar.update(planned - bar.n)


def _run_tasks(tasks: Iterable[ShardTask], workers: int) -> Generator[tuple[ShardNote | None, int], None, None]:
    """Yield notes of finished shards, or None every half second, with the number of converted images so far."""
    if workers == 1:
        converted = 0
        for task in tasks:
            with memory_limited(WORKER_BYTES):  # the same limit as in a worker process, only while files are decoded
                note = build_shard(task, _tick)
            converted += len(task.records)
            yield note, converted
        return
    # Spawn, not fork: codecs and progress bars start threads, and forking a threaded process may deadlock.
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(counter, stop))
    try:
        running = set[Future[ShardNote]]()
        for task in tasks:
            with interrupts_blocked():
                running.add(pool.submit(_build_in_worker, task))
            while len(running) >= 2 * workers:  # pickled tasks are large, so only a few are queued
                yield from _collect(running, counter)
        while running:
            yield from _collect(running, counter)
    except BrokenProcessPool:
        advice = "run the same command again with fewer --workers"
        raise ShardError(f"a worker process died, probably for lack of memory; {advice}", "worker") from None
    finally:
        stop.set()  # after Ctrl-C or an error, workers leave their shard at the next image
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: set[Future[ShardNote]], counter: "Synchronized[int]") -> Iterator[tuple[ShardNote | None, int]]:
    finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
    if not finished:
        yield None, counter.value
    for future in finished:
        running.discard(future)
        yield future.result(), counter.value


_counter: "Synchronized[int] | None" = None
_stop: "Event | None" = None


def _start_worker(counter: "Synchronized[int]", stop: "Event") -> None:
    global _counter, _stop
    _counter, _stop = counter, stop
    cv2.setNumThreads(0)  # one process per core already
    limit_memory(WORKER_BYTES)


def _tick() -> None:
    if _stop is not None and _stop.is_set():
        raise KeyboardInterrupt
    if _counter is not None:
        with _counter.get_lock():
            _counter.value += 1


def _build_in_worker(task: ShardTask) -> ShardNote:
    return build_shard(task, _tick)


def _check_budget(notes: Collection[ShardNote], budget: int, private: PrivateFolder) -> None:
    if sum(len(note.skipped) for note in notes) <= budget:
        return
    private.write_skipped(notes)
    reasons = Counter(reason for note in notes for _, reason, _ in note.skipped)
    detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    state = f"{reasons.total()} images are unreadable ({detail}), over the budget of {budget}"
    advice = "repair them, or raise --max-skipped and run again: finished shards are kept"
    if "outside_folder" in reasons:
        advice = f"{advice}; a tree of links needs --follow-links and a new --out"
    raise BudgetError(f"{state}; {private.skipped} lists them; {advice}", "budget", field="max_skipped")
