"""Conversion of a corpus to shards: parallel, resumable, and byte-identical for any number of
workers.

The path of a record:

    medvl.data.corpora  records of the corpus: sample fields, and paths of image and report
    plan.py             order by key and cut into shards, before any file is read
    pipeline.py         a task for each missing shard, in processes of this machine
    ray_engine.py       the same on a Ray cluster
    record.py           worker: read report and image, encode both; write tar and index

Each task returns a `ShardNote` (record.py). Notes are kept in OUT-private (conversion.py), so an
interrupted run resumes with the shards that have none. When all shards are finished, the manifests
are built from the notes. merge.py combines the parts of a conversion, and
`medvl.data.shards.verify` checks a folder against its manifest.
"""

import dataclasses
import errno
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import cv2
from tqdm import tqdm

from medvl.common.process import WORKER_BYTES, interrupts_blocked, limit_memory, memory_limited
from medvl.common.untrusted import ANYWHERE
from medvl.data.convert.options import ShardOptions, ShardRun, select_part
from medvl.data.convert.plan import (
    Conversion,
    PlannedShard,
    PrivateFolder,
    ShardPlan,
    count_by_split,
    has_repairs,
)
from medvl.data.convert.record import Engine, Progress, ShardNote, ShardTask, build_shard
from medvl.data.corpora.common.rows import RowCounts, listed
from medvl.data.corpora.common.tables import Plan
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.data.shards.upload import upload_shards, writable
from medvl.data.storage.location import is_address
from medvl.errors import BudgetError, CorpusError, ShardError

# Conversion in the processes of this machine.


class LocalEngine:
    """Processes of this machine; a single worker is this process."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, tasks: Iterable[ShardTask]) -> Progress:
        """Build shards, as `Engine.run`."""
        return self._run_here(tasks) if self.workers == 1 else self._run_in_pool(tasks)

    def _run_here(self, tasks: Iterable[ShardTask]) -> Progress:
        converted = 0
        for task in tasks:
            # the same limit as in a worker process, only while files are decoded
            with memory_limited(WORKER_BYTES):
                note = build_shard(task, _tick)
            converted += len(task.records)
            yield note, converted

    def _run_in_pool(self, tasks: Iterable[ShardTask]) -> Progress:
        # Spawn, not fork: codecs and progress bars start threads, and forking a threaded process
        # may deadlock.
        context = multiprocessing.get_context("spawn")
        counter = context.Value("q", 0)
        stop = context.Event()
        started = context.Event()
        pool = ProcessPoolExecutor(
            self.workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(counter, stop, started),
        )
        try:
            running = set[Future[ShardNote]]()
            for task in tasks:
                with interrupts_blocked():
                    running.add(pool.submit(_build_in_worker, task))
                # pickled tasks are large, so only a few are queued
                while len(running) >= 2 * self.workers:
                    yield from _collect(running, counter)
            while running:
                yield from _collect(running, counter)
        except BrokenProcessPool:
            message = (
                "a worker process died, probably for lack of memory; run the same command "
                "again with fewer --workers"
            )
            # each process imports the script again, which must not convert while it is imported
            if not started.is_set():
                message = (
                    "no worker process started; call medvl below `if __name__ == "
                    '"__main__":` in your script'
                )
            raise ShardError(message, "worker") from None
        finally:
            stop.set()  # after Ctrl-C or an error, workers leave their shard at the next image
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(
    running: set[Future[ShardNote]], counter: "Synchronized[int]"
) -> Iterator[tuple[ShardNote | None, int]]:
    finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
    if not finished:
        yield None, counter.value
    for future in finished:
        running.discard(future)
        yield future.result(), counter.value


_counter: "Synchronized[int] | None" = None
_stop: "Event | None" = None


def _start_worker(counter: "Synchronized[int]", stop: "Event", started: "Event") -> None:
    global _counter, _stop
    _counter = counter
    _stop = stop
    started.set()
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


# Manifests of a conversion, built from the notes of its shards.


def build_manifests(
    conversion: Conversion, notes: Iterable[ShardNote], planned: Mapping[str, int]
) -> dict[str, Manifest]:
    """Return the manifest of each split from the notes of its shards, in order. `planned`:
    images per split.
    """
    by_split: dict[str, list[ShardNote]] = {split: [] for split in planned}
    for note in notes:
        by_split[note.split].append(note)
    return {
        split: _manifest(conversion, split, group, planned[split])
        for split, group in by_split.items()
    }


def write_manifests(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Write each manifest into the folder of its split, unless it is there already."""
    for split, manifest in manifests.items():
        if not (out / split / MANIFEST).is_file() or Manifest.read(out / split) != manifest:
            manifest.write(out / split)


def check_samples(manifests: Mapping[str, Manifest], out: Path) -> None:
    """Raise CorpusError where no split has a sample; the message counts by reason what was left
    out.
    """
    if any(manifest.samples for manifest in manifests.values()):
        return
    reasons = sum(
        (Counter(manifest.excluded) + Counter(manifest.skipped) for manifest in manifests.values()),
        Counter(),
    )
    planned = sum(manifest.planned for manifest in manifests.values())
    advice = f"remove {out} and its private folder, or give another --out, once that is mended"
    if reasons["no_text"]:
        advice = "to keep images without text, use --keep-textless and another --out"
    message = f"{out}: no sample was written of {planned} ({listed(reasons)}); {advice}"
    raise CorpusError(message, "empty", field="out")


def _manifest(
    conversion: Conversion, split: str, notes: Sequence[ShardNote], planned: int
) -> Manifest:
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


def write_shards(
    plan: Plan, deid: Deidentifier, run: ShardRun, options: ShardOptions | None = None
) -> dict[str, Manifest]:
    """Convert a corpus, or the part `run.part` of it. Returns the manifest of each split.

    The manifests of a part are returned but not written; `merge_parts` writes those of the whole
    corpus.

    Args:
        plan: records of the whole corpus, from a module of `medvl.data.corpora`.
        deid: hasher that the plan was made with; the manifests store the fingerprint of its salt.
        run: output folder, budget, workers. A second run of the same plan resumes. Shards for an
            address are made in `run.staging` and uploaded, manifests last.
        options: storage format of the images.

    Raises:
        SplitError: a patient is in two splits.
        CorpusError: there are no records, or two with one key, or no sample could be written.
        ConfigError: `run.out` holds another conversion, or another process converts into it.
        BudgetError: more images are unreadable, or more rows unusable, than the budget allows.
        ShardError: the disk is full, or a worker died.
        StorageError: a remote store cannot be reached or refuses access.
    """
    options = options or ShardOptions()
    if is_address(run.out):
        address = writable(run.out)
        manifests = write_shards(
            plan, deid, dataclasses.replace(run, out=run.local_out, staging=None), options
        )
        upload_shards(run.local_out, address, progress=sys.stderr.isatty())
        return manifests
    private = PrivateFolder(run.out)
    _check_rows(plan.rows, run)
    shard_plan = ShardPlan(plan, options.samples_per_shard)
    conversion = Conversion.from_plan(shard_plan, options, deid.fingerprint, run.part)
    with conversion.claim(run.out, private):
        return _write_claimed(shard_plan, conversion, private, run, options)


def _write_claimed(
    shard_plan: ShardPlan,
    conversion: Conversion,
    private: PrivateFolder,
    run: ShardRun,
    options: ShardOptions,
) -> dict[str, Manifest]:
    """Convert the shards that are missing, and write the manifests."""
    shards = select_part(shard_plan.shards, run.part)
    stored = [private.read_note(run.out / shard.split, shard.name) for shard in shards]
    notes = {note.name: note for note in stored if note is not None}
    planned = count_by_split(shards)
    # the rows are those of all parts
    of_rows = shard_plan.rows.skipped.total() if run.part is None else 0
    budget = max(0, _budget(run, planned.total() + of_rows) - of_rows)
    if sum(len(note.skipped) for note in notes.values()) > budget:
        for shard in shards:
            note = notes.get(shard.name)
            if note is not None and note.skipped and _has_repairs(note, shard_plan, shard, private):
                del notes[shard.name]
    try:
        with closing(_convert(shard_plan, shards, notes, run, options)) as converted:
            for note in converted:
                private.write_note(note)
                notes[note.name] = note
                _check_budget(notes.values(), budget, private)
        _check_budget(notes.values(), budget, private)
        ordered = [notes[shard.name] for shard in shards]
        private.write_skipped(ordered, shard_plan.rows.messages)
        private.write_sources(shard_plan.sources(shards))
        manifests = build_manifests(conversion, ordered, planned)
        if conversion.part is None:
            check_samples(manifests, run.out)
            write_manifests(manifests, run.out)
        return manifests
    except OSError as error:
        if error.errno == errno.ENOSPC:
            state = f"{len(notes)} of {len(shards)} shards are finished and are kept"
            message = (
                f"no space left on the disk of {run.out}; free some space and run the "
                f"same command again ({state})"
            )
            raise ShardError(message, "unreadable") from error
        raise


def _convert(
    shard_plan: ShardPlan,
    shards: Sequence[PlannedShard],
    finished: Mapping[str, ShardNote],
    run: ShardRun,
    options: ShardOptions,
) -> Generator[ShardNote, None, None]:
    """Convert the shards that are not finished and show progress. Yields their notes in order of
    completion.
    """
    missing = [shard for shard in shards if shard.name not in finished]
    if not missing:
        return
    planned = sum(map(len, shards))
    done = planned - sum(map(len, missing))
    folders = ANYWHERE if options.follow_links else shard_plan.folders
    tasks = (
        ShardTask(
            shard.name,
            shard.split,
            run.out / shard.split,
            tuple(shard_plan.records(shard)),
            options,
            folders,
        )
        for shard in missing
    )
    engine = _create_engine(run, len(missing))
    quiet = not sys.stderr.isatty()
    with (
        tqdm(
            total=planned,
            initial=done,
            unit="sample",
            desc="shards",
            mininterval=10 if quiet else 0.2,
        ) as bar,
        closing(engine.run(tasks)) as results,
    ):
        for note, converted in results:
            if note is not None:
                yield note
            bar.update(done + converted - bar.n)
        bar.update(planned - bar.n)


def _has_repairs(
    note: ShardNote, shard_plan: ShardPlan, shard: PlannedShard, private: PrivateFolder
) -> bool:
    written = private.note_path(shard.name).stat().st_mtime
    return has_repairs(note, shard_plan.records(shard), written)


def _create_engine(run: ShardRun, shards: int) -> Engine:
    if run.engine == "ray":
        from medvl.data.convert.ray_engine import RayEngine

        return RayEngine(run.address, run.workers)
    return LocalEngine(min(run.workers or os.cpu_count() or 1, shards))


def _budget(run: ShardRun, total: int) -> int:
    return int(run.max_skipped if run.max_skipped >= 1 else run.max_skipped * total)


def _check_rows(rows: RowCounts, run: ShardRun) -> None:
    """Raise BudgetError where the plan skipped more rows, of the whole corpus, than the budget
    allows.
    """
    skipped = rows.skipped.total()
    budget = _budget(run, rows.read)
    if skipped > budget:
        state = f"{skipped} of {rows.read} {rows.unit} cannot be used ({listed(rows.skipped)})"
        advice = "repair them, or raise --max-skipped, and run again"
        detail = f": {rows.describe_skipped()}" if rows.messages else ""
        raise BudgetError(
            f"{state}, over the budget of {budget}{detail}; {advice}", "budget", field="max_skipped"
        )


def _check_budget(notes: Collection[ShardNote], budget: int, private: PrivateFolder) -> None:
    if sum(len(note.skipped) for note in notes) <= budget:
        return
    private.write_skipped(notes)
    reasons = Counter(image.reason for note in notes for image in note.skipped)
    detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    state = f"{reasons.total()} images are unreadable ({detail}), over the budget of {budget}"
    advice = (
        "correct their paths, repair them, or raise --max-skipped, and run again: finished "
        "shards are kept"
    )
    if "outside_folder" in reasons:
        advice = f"{advice}; a tree of links needs --follow-links and a new --out"
    if "image_missing" in reasons:
        advice = (
            f"{advice}; image_missing: the path has no file (paths of a table are relative "
            f"to --image-root)"
        )
    raise BudgetError(
        f"{state}; {private.skipped} lists them; {advice}", "budget", field="max_skipped"
    )
