"""From the records of a corpus to a folder of shards: in parallel, resumable, and the same whoever does the work.

The records of a split are ordered by key and cut into shards of a fixed number of records, so what goes into a shard
is known before any file is read. Each shard is one task: it is written under a temporary name, renamed when whole, and
noted as done. A run that was killed finds the notes and goes on; the number of workers changes nothing but the time.

Beside OUT lies OUT-private, which must not be shared: the notes, which file each key came from, and which files were
skipped and why.
"""

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tqdm import tqdm

from medvl.data.corpora.base import Plan, Record
from medvl.data.deid import Deidentifier
from medvl.data.shard_build import ShardNote, ShardTask, build_shard
from medvl.data.shard_options import ShardOptions, ShardRun
from medvl.data.shards import MANIFEST, Manifest, check_key, sample_to_json
from medvl.data.splits import check_disjoint
from medvl.errors import BudgetError, ConfigError, CorpusError, ShardError
from medvl.files import write_atomic

_PACKAGES = ("medvl", "numpy", "opencv-python-headless", "pillow", "pydicom", "simplejpeg")


def write_shards(
    plan: Plan, deid: Deidentifier, run: ShardRun, options: ShardOptions | None = None
) -> dict[str, Manifest]:
    """Convert a corpus. Returns the manifest of each split.

    Args:
        plan: the records, from a module of `medvl.data.corpora`.
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
    by_split = _check_plan(plan)
    tasks = list(_cut(plan.corpus, by_split, run.out, options))
    _claim(run.out, private, plan, options, deid, tasks)
    notes = {task.name: note for task in tasks if (note := _finished(task, private)) is not None}
    budget = int(run.max_skipped if run.max_skipped >= 1 else run.max_skipped * len(plan.records))
    remaining = [task for task in tasks if task.name not in notes]
    try:
        if remaining:
            _run(remaining, notes, private, budget, len(plan.records), run.workers or os.cpu_count() or 1)
        _check_budget(notes.values(), budget, private)
        return _write_manifests(plan, by_split, [notes[task.name] for task in tasks], run.out, private, options, deid)
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
            yield ShardTask(f"{corpus}-{split}-{number:06d}", split, out / split, part, options)


def _claim(
    out: Path, private: Path, plan: Plan, options: ShardOptions, deid: Deidentifier, tasks: list[ShardTask]
) -> None:
    """Make the folders, or refuse those of another plan."""
    keys = hashlib.sha256()
    for task in tasks:
        keys.update(task.name.encode())
        for record in task.records:
            # The sample as planned, with its labels: a corrected table must not go on with the old table's shards.
            keys.update(sample_to_json(record.sample))
    identity = {
        "corpus": plan.corpus,
        "salt": deid.fingerprint,
        "records": keys.hexdigest(),
        "options": dataclasses.asdict(options),
    }
    path = private / "plan.json"
    if path.is_file():
        before = json.loads(path.read_bytes())
        differing = sorted(name for name in identity if before.get(name) != identity[name])
        if differing:
            raise ConfigError(
                f"{out} was begun with another {', '.join(differing)}: give another --out, "
                f"or remove {out} and {private} to start anew"
            )
    elif out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty and {path} is missing, so it cannot be continued: give another --out")
    for folder in (out, *{task.folder for task in tasks}):
        folder.mkdir(parents=True, exist_ok=True)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, json.dumps(identity, indent=1, sort_keys=True))


def _finished(task: ShardTask, private: Path) -> ShardNote | None:
    note_path, tar = private / f"{task.name}.json", task.folder / f"{task.name}.tar"
    try:
        note = ShardNote.from_json(note_path.read_bytes())
        whole = tar.stat().st_size == note.size and tar.with_suffix(".index").is_file()
    except (OSError, ValueError, TypeError):
        return None  # not done, or its note was cut short: the shard is made again
    return note if whole else None


def _run(
    tasks: list[ShardTask], notes: dict[str, ShardNote], private: Path, budget: int, planned: int, workers: int
) -> None:
    done = planned - sum(len(task.records) for task in tasks)
    quiet = not sys.stderr.isatty()
    with tqdm(total=planned, initial=done, unit="img", desc="shards", mininterval=10 if quiet else 0.2) as bar:
        for note, converted in _results(tasks, min(workers, len(tasks))):
            if note is not None:
                write_atomic(private / f"{note.name}.json", note.to_json())
                notes[note.name] = note
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


def _tick() -> None:
    if _counter is not None:
        with _counter.get_lock():
            _counter.value += 1


def _build_in_worker(task: ShardTask) -> ShardNote:
    return build_shard(task, _tick)


def _check_budget(notes: Iterable[ShardNote], budget: int, private: Path) -> None:
    reasons = Counter(reason for note in notes for _, reason, _ in note.skipped)
    if reasons.total() > budget:
        _write_skipped(notes, private)
        detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise BudgetError(
            f"{reasons.total()} images cannot be read ({detail}), more than the budget of {budget}; "
            f"{private / 'skipped.jsonl'} lists them. Mend them, or allow them with --max-skipped and run again: "
            "finished shards are kept"
        )


def _write_skipped(notes: Iterable[ShardNote], private: Path) -> None:
    rows = [
        json.dumps({"key": key, "split": note.split, "reason": reason, "message": message}, ensure_ascii=False)
        for note in notes
        for key, reason, message in note.skipped
    ]
    write_atomic(private / "skipped.jsonl", "".join(row + "\n" for row in rows))


def _write_manifests(
    plan: Plan,
    by_split: Mapping[str, list[Record]],
    notes: list[ShardNote],
    out: Path,
    private: Path,
    options: ShardOptions,
    deid: Deidentifier,
) -> dict[str, Manifest]:
    _write_skipped(notes, private)
    sources = (f"{record.sample.key}\t{record.sample.image}\n" for records in by_split.values() for record in records)
    write_atomic(private / "sources.tsv", "".join(sources))
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    manifests = {}
    for split in by_split:
        mine = [note for note in notes if note.split == split]
        skipped = sorted((key, reason) for note in mine for key, reason, _ in note.skipped)
        manifests[split] = Manifest(
            corpus=plan.corpus,
            split=split,
            samples=sum(note.samples for note in mine),
            shards=tuple(note.shard for note in mine),
            label_names=plan.label_names,
            patients=tuple(sorted({patient for note in mine for patient in note.patients})),
            salt=deid.fingerprint,
            planned=len(by_split[split]),
            excluded_from_corpus=dict(sorted(plan.excluded.items())),
            excluded=dict(sorted(_total(note.excluded for note in mine).items())),
            skipped=dict(sorted(Counter(reason for _, reason in skipped).items())),
            skipped_keys=tuple(skipped),
            warnings=dict(sorted(_total([*(note.warnings for note in mine), plan.noticed]).items())),
            options=dataclasses.asdict(options),
            packages=packages,
        )
        if not (out / split / MANIFEST).is_file() or Manifest.read(out / split) != manifests[split]:
            manifests[split].write(out / split)
    return manifests


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return Counter({name: count for name, count in total.items() if count})
