"""Conversion in the processes of this machine."""

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import cv2

from medvl.common.interrupts import interrupts_blocked
from medvl.common.memory_limit import WORKER_BYTES, limit_memory, memory_limited
from medvl.data.convert.engine import Progress
from medvl.data.convert.note import ShardNote
from medvl.data.convert.shard_task import ShardTask, build_shard
from medvl.errors import ShardError


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
            with memory_limited(WORKER_BYTES):  # the same limit as in a worker process, only while files are decoded
                note = build_shard(task, _tick)
            converted += len(task.records)
            yield note, converted

    def _run_in_pool(self, tasks: Iterable[ShardTask]) -> Progress:
        # Spawn, not fork: codecs and progress bars start threads, and forking a threaded process may deadlock.
        context = multiprocessing.get_context("spawn")
        counter, stop, started = context.Value("q", 0), context.Event(), context.Event()
        pool = ProcessPoolExecutor(
            self.workers, mp_context=context, initializer=_start_worker, initargs=(counter, stop, started)
        )
        try:
            running = set[Future[ShardNote]]()
            for task in tasks:
                with interrupts_blocked():
                    running.add(pool.submit(_build_in_worker, task))
                while len(running) >= 2 * self.workers:  # pickled tasks are large, so only a few are queued
                    yield from _collect(running, counter)
            while running:
                yield from _collect(running, counter)
        except BrokenProcessPool:
            message = (
                "a worker process died, probably for lack of memory; run the same command again with fewer --workers"
            )
            if not started.is_set():  # each imports the script again, which must not convert while it is imported
                message = 'no worker process started; call medvl below `if __name__ == "__main__":` in your script'
            raise ShardError(message, "worker") from None
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


def _start_worker(counter: "Synchronized[int]", stop: "Event", started: "Event") -> None:
    global _counter, _stop
    _counter, _stop = counter, stop
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
