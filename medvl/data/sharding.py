"""From the records of a corpus to a folder of shards: in parallel, resumable, and the same whoever does the work.

The records of a split are ordered by key and cut into shards of a fixed number of records, so what goes into a shard
is known before any file is read. Each shard is one task: it is written under a temporary name, renamed when whole, and
noted as done. A run that was killed finds the notes and goes on; the number of workers changes nothing but the time.

Beside OUT lies OUT-private, which must not be shared: the notes, which file each key came from, and which files were
skipped and why.
"""

import errno
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

from medvl.data.conversion import (
    SKIPPED,
    Conversion,
    note_path,
    read_note,
    shard_name,
    share,
    write_skipped,
    write_sources,
)
from medvl.data.corpora.base import Plan, Record
from medvl.data.deid import Deidentifier
from medvl.data.memory import WORKER_BYTES, cap_memory
from medvl.data.shard_build import ShardNote, ShardTask, build_shard
from medvl.data.shard_options import ShardOptions, ShardRun
from medvl.data.shards import MANIFEST, Manifest, check_key
from medvl.data.splits import check_disjoint
from medvl.errors import BudgetError, CorpusError, ShardError
from medvl.files import write_atomic


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
    everything = list(_cut(plan.corpus, _check_plan(plan), run.out, options))
    conversion = Conversion.of(plan, everything, options, deid.fingerprint, run.part)
    conversion.claim(run.out, private)
    tasks = share(everything, run.part)
    found = {task.name: read_note(private, task.folder, task.name) for task in tasks}
    notes = {name: note for name, note in found.items() if note is not None}
    planned = sum(len(task.records) for task in tasks)
    budget = int(run.max_skipped if run.max_skipped >= 1 else run.max_skipped * planned)
    remaining = [task for task in tasks if task.name not in notes]
    try:
        if remaining:
            _run(remaining, notes, private, budget, planned, run.workers or os.cpu_count() or 1)
        _check_budget(notes.values(), budget, private)
        return _write_manifests(conversion, tasks, notes, run.out, private)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ShardError(
                f"the disk that holds {run.out} is full: free some space and run the same command again; "
                f"{len(notes)} of {len(tasks)} shards are done and will be kept"
            ) from error
        raise


def _check_plan(plan: Plan) -> dict[str, list[Record]]:
    if not plan.records:
        detail = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(plan.excluded.items())) or "the table is empty"
        )
        raise CorpusError(f"{plan.corpus}: no image is left to convert ({detail})")
    by_split: dict[str, list[Record]] = {}
    for record in plan.records:
        check_key(record.sample.key)
        by_split.setdefault(record.sample.split, []).append(record)
    twice = [key for key, count in Counter(record.sample.key for record in plan.records).items() if count > 1]
    if twice:
        raise CorpusError(f"{plan.corpus}: {len(twice)} images are listed more than once, first key {min(twice)}")
    check_disjoint({split: {r.sample.patient for r in records} for split, records in by_split.items()}, plan.corpus)
    for records in by_split.values():
        records.sort(key=lambda record: record.sample.key)
    return by_split


def _cut(corpus: str, by_split: Mapping[str, list[Record]], out: Path, options: ShardOptions) -> Iterator[ShardTask]:
    for split, records in sorted(by_split.items()):
        for number, start in enumerate(range(0, len(records), options.samples_per_shard)):
            part = tuple(records[start : start + options.samples_per_shard])
            yield ShardTask(shard_name(corpus, split, number), split, out / split, part, options)


def _run(
    tasks: list[ShardTask], notes: dict[str, ShardNote], private: Path, budget: int, planned: int, workers: int
) -> None:
    done = planned - sum(len(task.records) for task in tasks)
    skipped = sum(len(note.skipped) for note in notes.values())
    quiet = not sys.stderr.isatty()
    with tqdm(total=planned, initial=done, unit="img", desc="shards", mininterval=10 if quiet else 0.2) as bar:
        for note, converted in _results(tasks, min(workers, len(tasks))):
            if note is not None:
                write_atomic(note_path(private, note.name), note.to_json())
                notes[note.name] = note
                skipped += len(note.skipped)
                if skipped > budget:
                    _check_budget(notes.values(), budget, private)
            bar.update(done + converted - bar.n)
        bar.update(planned - bar.n)


def _results(tasks: list[ShardTask], workers: int) -> Iterator[tuple[ShardNote | None, int]]:
    """Finished notes as they come, and every half second the number of images done so far."""
    if workers == 1:
        converted = 0
        for task in tasks:
            note = build_shard(task, _tick)
            converted += len(task.records)
            yield note, converted
        return
    # Spawned, not forked: codecs and progress bars start threads, and a fork of a threaded process may hang.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(counter,))
    try:
        waiting, running = iter(tasks), set[Future[ShardNote]]()
        for task in waiting:
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
    conversion: Conversion, tasks: Sequence[ShardTask], notes: Mapping[str, ShardNote], out: Path, private: Path
) -> dict[str, Manifest]:
    write_skipped((notes[task.name] for task in tasks), private)
    records = sorted((record for task in tasks for record in task.records), key=lambda record: record.sample.key)
    write_sources((f"{record.sample.key}\t{record.sample.image}\n" for record in records), private)
    planned: Counter[str] = Counter()
    for task in tasks:
        planned[task.split] += len(task.records)
    manifests = conversion.manifests((notes[task.name] for task in tasks), planned)
    if conversion.part is None:
        write_manifests(manifests, out)
    return manifests


def write_manifests(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Those that are not there already, each in the folder of its split."""
    for split, manifest in manifests.items():
        if not (out / split / MANIFEST).is_file() or Manifest.read(out / split) != manifest:
            manifest.write(out / split)
