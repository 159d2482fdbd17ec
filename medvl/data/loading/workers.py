"""Worker processes of a loader: their settings, and errors that name their cause."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import cv2

from medvl.common.process import keep_freed_memory, signals_blocked
from medvl.errors import LoaderError, ShardError, StorageError

# Errors of loader workers: a worker that dies or hangs raises LoaderError instead of blocking the
# run forever.

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

TIMEOUT = 600.0
"""Default seconds without a batch after which a worker is considered hung. A batch normally
takes about a second.
"""


class PassErrors(Generic[A, B]):
    """Wrapper of a collate function that returns a StorageError in place of a batch's items
    unchanged.
    """

    def __init__(self, collate: Callable[[A], B]) -> None:
        self.collate = collate

    def __call__(self, items: A | StorageError) -> B | StorageError:
        return items if isinstance(items, StorageError) else self.collate(items)


def with_worker_errors(batches: Iterable[T | ShardError | StorageError]) -> Iterator[T]:
    """Yield the batches of a DataLoader.

    Raises LoaderError when a worker process died, or returned nothing within the DataLoader's
    timeout, and ShardError or StorageError where a worker returned it in place of a batch. Hung
    workers are killed: otherwise Python waits for them at exit.
    """
    with (
        signals_blocked()
    ):  # by workers too, until they have set what they do with them (worker_setup.py)
        iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            explanation = worker_error(error)
            if explanation is None:
                raise
            for process in getattr(iterator, "_workers", ()):
                with contextlib.suppress(
                    RuntimeError
                ):  # torch's signal handler raises again for the same dead worker
                    process.kill()
                    process.join()
            raise explanation from error
        if isinstance(batch, ShardError | StorageError):
            raise batch
        yield batch


def worker_error(error: Exception) -> LoaderError | None:
    """Return the LoaderError for torch's message about a dead or hung worker; None for other
    errors.

    A worker that dies while it sends a batch breaks the connection to it (ConnectionError,
    EOFError). Exceptions raised inside a worker carry "in DataLoader worker process" and are not
    translated.
    """
    text = str(error)
    if isinstance(error, ConnectionError | EOFError) and "in DataLoader worker process" not in text:
        text = "DataLoader worker exited unexpectedly while sending a batch"
    if "DataLoader timed out" in text:
        return LoaderError(
            "a loader worker returned nothing within the timeout; check the disk or network "
            "that holds the shards and "
            "run the same command again, with --data.workers 0 to see where it hangs",
            "worker",
        )
    if "DataLoader worker" in text and (
        "killed by signal" in text or "exited unexpectedly" in text
    ):
        return LoaderError(
            f"a loader worker died ({text.split('. ')[0].rstrip('. ')}), probably for lack of "
            f"memory (or of shared "
            "memory, /dev/shm); run the same command again with fewer --data.workers",
            "worker",
        )
    return None


# Set-up of a loader's worker processes: priority, threads, and signals that are meant for the
# process above them.

_NICE = 5
"""Lower priority of worker processes beside a GPU: where they use all cores, the process that
queues its work comes first, and the GPU does not wait for it.
"""


def init_worker(worker: int, *, beside_gpu: bool = False) -> None:
    """Set up a loader's worker process (`worker_init_fn` of torch's DataLoader).

    Training stops after its step, which needs its workers. torchrun and Ctrl-C signal the process
    group, which a worker leaves; systemd and SLURM signal every process of a job with SIGTERM,
    which a worker heeds from its parent alone. A worker starts with both signals blocked
    (`signals_blocked`), so that none ends it before this is set up.
    """
    os.setpgid(0, 0)
    keep_freed_memory()
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM}
        )  # before there are threads, which inherit it
        threading.Thread(target=_end_for_parent, daemon=True).start()
    else:  # macOS has none
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if beside_gpu:
        os.nice(_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # one process per core already; the thread pool breaks after a fork
    )
    cv2.setNumThreads(0)


def _end_for_parent() -> None:
    """Wait for SIGTERM, and end the process where the parent sent it, which is how it stops its
    workers.
    """
    parent = (
        multiprocessing.parent_process()
    )  # of a fork server's child, the process that asked for it
    pid = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)
