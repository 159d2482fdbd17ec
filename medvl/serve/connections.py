"""Limits of connections: time until a request arrives, and a number for each address."""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from medvl.serve.config import ServeConfig
from medvl.serve.guard import address_of

MOST_CONNECTIONS = 512
"""Connections of all addresses together."""


def limited_protocol(config: ServeConfig) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with the limits of one server.

    uvicorn closes a connection between requests after a while, but waits without limit for the end of a request's
    headers, and refuses everybody where too many connections are open. Here, a connection is closed that has sent no
    complete headers within `header_seconds`; and where an address, or the server, has too many connections, the one
    that waits longest for its headers makes room.
    """

    class Limited(_LimitedProtocol):
        limits, waiting, open_by_address = config, {}, Counter()

    return Limited


class _LimitedProtocol(H11Protocol):
    """Base of the protocols that `limited_protocol` returns; its class attributes are those of one server."""

    limits: ServeConfig
    waiting: dict["_LimitedProtocol", None]
    """Connections without complete headers, the one that waits longest first."""
    open_by_address: Counter[str]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self.address = address_of(self.client)
        self.open_by_address[self.address] += 1
        if self.open_by_address[self.address] > self.limits.connections_per_address:
            self._make_room(self.address)
        elif len(self.connections) >= MOST_CONNECTIONS:
            self._make_room(None)
        if not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.open_by_address[self.address] -= 1
        if not self.open_by_address[self.address]:
            del self.open_by_address[self.address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._has_request():
            self._wait()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._stop_waiting()
        self.waiting[self] = None
        self._timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self, address: str | None) -> None:
        """Close the connection that waits longest, of one address or of all; this one where none waits."""
        idle = (each for each in self.waiting if address is None or each.address == address)
        leaving = next(idle, self)
        leaving._stop_waiting()
        leaving.transport.abort()
