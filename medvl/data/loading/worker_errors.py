"""Worker processes of a loader that die or hang: said clearly, and never waited for without end."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from medvl.errors import LoaderError

Handed = TypeVar("Handed")

TIMEOUT = 600.0
"""Seconds after which a loader that has given nothing is taken to hang. A batch is a matter of a second."""


def watched(batches: Iterable[Handed]) -> Iterator[Handed]:
    """What torch's DataLoader gives, in its order.

    Raises LoaderError where a worker process has died, or has given nothing for the DataLoader's timeout. A worker that
    hangs is killed: at the end of the process Python would wait for it.
    """
    iterator = iter(batches)
    while True:
        try:
            handed = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            explanation = worker_error(error)
            if explanation is None:
                raise
            for process in getattr(iterator, "_workers", ()):
                with contextlib.suppress(RuntimeError):  # torch's own handler of signals: it tells of this very death
                    process.kill()
                    process.join()
            raise explanation from error
        yield handed


def worker_error(error: Exception) -> LoaderError | None:
    """What torch's words about a worker process mean; None where they are about something else.

    A worker may die while it hands a batch over, and then it is the connection to it that breaks off. What a worker
    itself has raised says so, and is its own.
    """
    text = str(error)
    if isinstance(error, ConnectionError | EOFError) and "in DataLoader worker process" not in text:
        text = "DataLoader worker exited unexpectedly, while it handed a batch over"
    if "DataLoader timed out" in text:
        return LoaderError(
            "a loader's worker process has given nothing for too long: look at the disk or the network that the "
            "shards are on, then give the same command again; --data.workers 0 shows where it hangs"
        )
    if "DataLoader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text):
        return LoaderError(
            f"a loader's worker process died ({text.split('. ')[0].rstrip('. ')}), most likely for lack of memory (or "
            "of shared memory: /dev/shm): give the same command again, with fewer --data.workers"
        )
    return None
