"""Execution of requests: decoding in a few threads, models in one thread, limits of waiting
requests and of uploads.
"""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from medvl.serve.guard import Refused

Result = TypeVar("Result")
_DECODERS = 2


_Item = tuple[Any, Callable[[Any], Any], "asyncio.Future[Any]"]


class Pending:
    """Images that wait to be encoded together by one model.

    Args:
        encode: function of a list of images that returns a list of the same length.
        most: images of one call.
        wait: seconds that the first image waits for others while no other work is in progress.
    """

    def __init__(self, encode: Callable[[list[Any]], list[Any]], most: int, wait: float) -> None:
        self.encode = encode
        self.most = most
        self.wait = wait
        self.waiting: collections.deque[_Item] = collections.deque()
        self.task: asyncio.Task[None] | None = None


class Budget:
    """A number of places or bytes, of which one address may have a share."""

    def __init__(self, whole: int, share: float) -> None:
        self._left = whole
        self._most = max(1, int(share * whole))
        self._taken: collections.Counter[str] = collections.Counter()

    def check(self, address: str, number: int = 1) -> None:
        """Raise `Refused` where so many are not left, or the address would have more than its
        share.
        """
        if number > self._left or self._taken[address] + number > self._most:
            raise Refused(429, "busy", "the server is busy; try again in a few seconds", 2)

    def take(self, address: str, number: int) -> None:
        """Take a number of them. Raises as `check`."""
        self.check(address, number)
        self._left -= number
        self._taken[address] += number

    def give(self, address: str, number: int) -> None:
        """Give them back."""
        self._left += number
        self._taken[address] -= number
        if not self._taken[address]:
            del self._taken[address]


class Engine:
    """Threads of the server.

    One thread calls the models, so that requests are served in the order of their arrival. Images
    of several requests are encoded in one call (`together`). A request counts the bytes that it
    uploads (`upload`), and holds a place (`place`) from its last byte until it is answered: a slow
    upload takes its own bytes only.

    Args:
        waiting: number of requests that may wait besides the one being served.
        max_bytes: largest upload; all together may have as many bytes as all places.
        share: largest share of places, and of bytes, of one address.
    """

    def __init__(self, waiting: int, max_bytes: int, share: float = 1.0) -> None:
        self._places = Budget(waiting + 1, share)
        self._bytes = Budget((waiting + 1) * max_bytes, share)
        self._models = ThreadPoolExecutor(1, "medvl-model")
        self._decoders = ThreadPoolExecutor(_DECODERS, "medvl-decode")

    @contextlib.contextmanager
    def upload(self, address: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts received bytes; they are freed at the end of the context.

        Raises `Refused` where no place is left that could serve the request, and so does the
        function where the uploads have as many bytes as they may.
        """
        self._places.check(address)
        received = 0

        def count(number: int) -> None:
            nonlocal received
            self._bytes.take(address, number)
            received += number

        try:
            yield count
        finally:
            self._bytes.give(address, received)

    @contextlib.contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Hold a place within the context. Raises `Refused` if none is left."""
        self._places.take(address, 1)
        try:
            yield
        finally:
            self._places.give(address, 1)

    async def decode(self, function: Callable[[], Result]) -> Result:
        """Run a function that reads an image."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)

    async def infer(self, function: Callable[[], Result]) -> Result:
        """Run a function that calls models."""
        return await asyncio.get_running_loop().run_in_executor(self._models, function)

    async def together(
        self, pending: Pending, image: Any, finish: Callable[[Any], Result]
    ) -> Result:
        """Encode an image in one call with those of other requests, then run a function on the
        result.

        Args:
            pending: images that wait for the same model.
            image: input of `pending.encode`, in a list with others.
            finish: the request's own work with its encoded image, in the thread of the models.

        Raises what `encode` raises for this image alone, and what `finish` raises.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        pending.waiting.append((image, finish, future))
        if pending.task is None or pending.task.done():
            pending.task = asyncio.create_task(self._serve(pending))
        return await future

    async def _serve(self, pending: Pending) -> None:
        """Encode waiting images batch by batch until none is left."""
        taken: list[_Item] = []

        def run() -> list[tuple[Any, Exception | None]]:
            taken[:] = [
                pending.waiting.popleft() for _ in range(min(pending.most, len(pending.waiting)))
            ]
            return _run_batch(pending.encode, taken)

        try:
            await asyncio.sleep(pending.wait)
            while pending.waiting:  # more may have arrived while the thread was busy
                results = await self.infer(run)
                for (_, _, future), (result, error) in zip(taken, results, strict=True):
                    _settle(future, result, error)
        except Exception as error:  # no request may wait forever
            for _, _, future in (*taken, *pending.waiting):
                _settle(future, None, error)
            pending.waiting.clear()
            raise

    def close(self) -> None:
        """Stop the threads when their current work is finished."""
        self._models.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)


def _run_batch(
    encode: Callable[[list[Any]], list[Any]], items: list[_Item]
) -> list[tuple[Any, Exception | None]]:
    """Return the result or the error of each item; if a batch fails, its images are tried one by
    one.
    """
    try:
        encoded: list[Any] = encode([image for image, _, _ in items])
    except Exception as error:
        if len(items) == 1:
            return [(None, error)]
        return [result for item in items for result in _run_batch(encode, [item])]
    results: list[tuple[Any, Exception | None]] = []
    for (_, finish, _), each in zip(items, encoded, strict=True):
        try:
            results.append((finish(each), None))
        except Exception as error:
            results.append((None, error))
    return results


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    """Set the result or the error of a future, unless its request was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
