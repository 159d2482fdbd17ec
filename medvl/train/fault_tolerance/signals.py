"""SIGTERM and SIGINT as requests to stop a run after its step."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from medvl.common.interrupts import blocked

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager that records the first SIGTERM or SIGINT; the second one ends the process at once.

    Handlers are installed in the main thread only; Python does not allow them elsewhere, where the signals keep their
    effect.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the signal that was received."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            with blocked(*_STOPS):  # an interrupt between the two would leave one behind
                for number in _STOPS:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if callable(handler) or isinstance(handler, int) else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name
