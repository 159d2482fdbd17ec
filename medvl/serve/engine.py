"""Work of requests: decoding in a few threads, models in one, and a bound on how much waits."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from medvl.serve.guard import Refused

Result = TypeVar("Result")
_DECODERS = 2


class Engine:
    """Threads of the server.

    One thread calls the models, so that requests are served in the order of their arrival and no model sees two of
    them at a time. A request must hold a place (`place`) from before it is read until it is answered; all places
    together bound the uploads in memory.

    Args:
        waiting: places besides that of the request that is served.
    """

    def __init__(self, waiting: int) -> None:
        self._places = waiting + 1
        self._models = ThreadPoolExecutor(1, "medvl-model")
        self._decoders = ThreadPoolExecutor(_DECODERS, "medvl-decode")

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place. Raises `Refused` where none is left."""
        if not self._places:
            raise Refused(429, "busy", "the server is busy; try again in a few seconds", 2)
        self._places -= 1
        try:
            yield
        finally:
            self._places += 1

    async def decode(self, function: Callable[[], Result]) -> Result:
        """Run a function that reads an image."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)

    async def infer(self, function: Callable[[], Result]) -> Result:
        """Run a function that calls models."""
        return await asyncio.get_running_loop().run_in_executor(self._models, function)

    def close(self) -> None:
        """End the threads after the work that has begun."""
        self._models.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)
