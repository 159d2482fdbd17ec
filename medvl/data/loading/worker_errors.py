"""Errors of loader workers: a worker that dies or hangs raises LoaderError instead of blocking the run forever."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from medvl.common.interrupts import signals_blocked
from medvl.errors import LoaderError, ShardError, StorageError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

TIMEOUT = 600.0
"""Default seconds without a batch after which a worker is considered hung. A batch normally takes about a second."""


class PassErrors(Generic[A, B]):
    """Wrapper of a collate function that returns a StorageError in place of a batch's items unchanged."""

    def __init__(self, collate: Callable[[A], B]) -> None:
        self.collate = collate

    def __call__(self, items: A | StorageError) -> B | StorageError:
        return items if isinstance(items, StorageError) else self.collate(items)


def with_worker_errors(batches: Iterable[T | ShardError | StorageError]) -> Iterator[T]:
    """Yield the batches of a DataLoader.

    Raises LoaderError when a worker process died, or returned nothing within the DataLoader's timeout, and ShardError
    or StorageError where a worker returned it in place of a batch. Hung workers are killed: otherwise Python waits for
    them at exit.
    """
    with signals_blocked():  # by workers too, until they have set what they do with them (worker_setup.py)
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
                with contextlib.suppress(RuntimeError):  # torch's signal handler raises again for the same dead worker
                    process.kill()
                    process.join()
            raise explanation from error
        if isinstance(batch, ShardError | StorageError):
            raise batch
        yield batch


def worker_error(error: Exception) -> LoaderError | None:
    """Return the LoaderError for torch's message about a dead or hung worker; None for other errors.

    A worker that dies while it sends a batch breaks the connection to it (ConnectionError, EOFError). Exceptions raised
    inside a worker carry "in DataLoader worker process" and are not translated.
    """
    text = str(error)
    if isinstance(error, ConnectionError | EOFError) and "in DataLoader worker process" not in text:
        text = "DataLoader worker exited unexpectedly while sending a batch"
    if "DataLoader timed out" in text:
        return LoaderError(
            "a loader worker returned nothing within the timeout; check the disk or network that holds the shards and "
            "run the same command again, with --data.workers 0 to see where it hangs",
            "worker",
        )
    if "DataLoader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text):
        return LoaderError(
            f"a loader worker died ({text.split('. ')[0].rstrip('. ')}), probably for lack of memory (or of shared "
            "memory, /dev/shm); run the same command again with fewer --data.workers",
            "worker",
        )
    return None
