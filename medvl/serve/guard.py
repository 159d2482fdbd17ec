"""Checks of a request before it is read (addresses, token, rate), and the headers of every
response.

Nothing that a client has sent is logged or returned.
"""

import asyncio
import hmac
import ipaddress
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from medvl.serve.config import ServeConfig

_log = logging.getLogger("medvl.serve")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MOST_ADDRESSES = 4096
"""Addresses whose requests are counted at a time."""
_SUBSCRIBER_BITS = 64
"""First bits of an IPv6 address, which one subscriber has; the other 64 can be chosen freely."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


def address_of(client: tuple[str, int] | None) -> str:
    """Return the address that limits count: an IPv4 address, or the network of a subscriber in
    IPv6.
    """
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:  # a test client, or a Unix socket
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_interface(f"{address}/{_SUBSCRIBER_BITS}").network)


class Refused(Exception):
    """Error response to a request.

    Attributes:
        status: HTTP status.
        code, message: fields of the response.
        retry_after: seconds after which it may be sent again, None: never.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def response(self) -> JSONResponse:
        """Return the response."""
        headers = (
            {} if self.retry_after is None else {"retry-after": str(math.ceil(self.retry_after))}
        )
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(
            {"error": {"code": self.code, "message": self.message}}, self.status, headers
        )


class RateLimit:
    """Token buckets, one for each address: `per_minute` at once, refilled evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._full = float(per_minute)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> None:
        """Count a request. Raises `Refused` where the address has none left."""
        now = self._clock()
        left, before = self._buckets.pop(address, (self._full, now))
        left = min(self._full, left + (now - before) * self._full / 60)
        self._buckets[address] = (left - 1 if left >= 1 else left, now)
        while len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        if left < 1:
            wait = (1 - left) * 60 / self._full
            raise Refused(
                429, "rate", f"too many requests; try again in {math.ceil(wait)} seconds", wait
            )


class Guard:
    """ASGI middleware around the application.

    Every path under /api needs the token and counts for the rate. On this machine alone, only its
    own names are accepted as host, so that no page on the web can reach the server under a name of
    its own (DNS rebinding); requests of other origins are never accepted.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._config = config
        self._rate = RateLimit(config.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_guarded)
        except Refused as refused:
            await refused.response()(scope, receive, send_guarded)
        # The route is one of the application's own: a path that a client invented is not logged.
        route = getattr(scope.get("route"), "path", "other")
        _log.info(
            "%s %s %d %.0f ms",
            _method(scope),
            route,
            status,
            1000 * (time.perf_counter() - started),
        )

    def _check(self, scope: Scope) -> None:
        """Raise `Refused` for a request that fails a check."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._config.is_local and _name_of(host) not in (*_LOCAL_NAMES, self._config.host):
            raise Refused(421, "host", "this server answers to names of its own machine only")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, "origin", "requests of other origins are not served")
        if not scope["path"].startswith("/api"):
            return
        self._rate.take(address_of(scope.get("client")))
        if self._config.token is not None and not self._has_token(headers):
            raise Refused(
                401, "token", "expected the token that the server printed when it started"
            )

    def _has_token(self, headers: Headers) -> bool:
        given = headers.get("authorization", "").removeprefix("Bearer ")
        expected = self._config.token or ""
        return hmac.compare_digest(given.encode("latin-1"), expected.encode("latin-1"))


def _name_of(host: str) -> str:
    """Return a host header without its port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"


# Limits of connections: time until a request arrives, and a number for each address.

MOST_CONNECTIONS = 512
"""Connections of all addresses together."""


def limited_protocol(config: ServeConfig) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with the limits of one server.

    uvicorn closes a connection between requests after a while, but waits without limit for the end
    of a request's headers, and refuses everybody where too many connections are open. Here, a
    connection is closed that has sent no complete headers within `header_seconds`; and where an
    address, or the server, has too many connections, the one that waits longest for its headers
    makes room.
    """

    class Limited(_LimitedProtocol):
        limits: ClassVar = config
        waiting: ClassVar = {}
        open_by_address: ClassVar = Counter()

    return Limited


class _LimitedProtocol(H11Protocol):
    """Base of the protocols that `limited_protocol` returns; its class attributes are those of
    one server.
    """

    limits: ClassVar[ServeConfig]
    waiting: ClassVar[dict["_LimitedProtocol", None]]
    """Connections without complete headers, the one that waits longest first."""
    open_by_address: ClassVar[Counter[str]]

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
        """Close the connection that waits longest, of one address or of all; this one where none
        waits.
        """
        idle = (each for each in self.waiting if address is None or each.address == address)
        leaving = next(idle, self)
        leaving._stop_waiting()
        leaving.transport.abort()
