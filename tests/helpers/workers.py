"""A process that is set up as a loader's worker."""

import time
from multiprocessing.synchronize import Event

from medvl.data.loading.workers import init_worker


def wait(ready: Event) -> None:
    """Set up as a worker, say so, and wait for a signal."""
    init_worker(0)
    ready.set()
    time.sleep(60)
