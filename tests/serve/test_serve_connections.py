"""Connections to a running server: silent and slow ones shut nobody out."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from helpers.served import served, tiny_convirt

from medvl.serve import ServeConfig, create_app
from medvl.serve.app import listen
from medvl.serve.guard import limited_protocol

REQUEST = b"GET /api/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def running(config: ServeConfig) -> Iterator[int]:
    """Run a server as `medvl.serve.app` does, and yield its port."""
    listener = listen(config)
    settings = uvicorn.Config(
        create_app([served(tiny_convirt())], None, config),
        http=limited_protocol(config),
        log_config=None,
        ws="none",
        limit_concurrency=512,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def ask(port: int, path: bytes = b"/api/models") -> bytes:
    """Return the status line of the answer to a request on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(REQUEST.replace(b"/api/models", path))
        return connection.recv(100).partition(b"\r\n")[0]


def closed_after(connection: socket.socket) -> float:
    """Return the seconds until the server closes a connection."""
    started = time.monotonic()
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return time.monotonic() - started


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    limits = ServeConfig(
        port=0, header_seconds=1, connections_per_address=20, requests_per_minute=100_000
    )
    with running(limits) as found:
        yield found


def test_silent_connections_shut_nobody_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(port) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    "sent", [b"", b"G", REQUEST[:-2], b"\r\n"], ids=["nothing", "a byte", "headers", "blank line"]
)
def test_a_connection_without_a_whole_request_is_closed(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        assert closed_after(connection) < 10


def test_headers_that_trickle_are_not_waited_for(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.1)
        ended, started = False, time.monotonic()
        while not ended and time.monotonic() - started < 20:
            try:
                connection.sendall(b"x")
                ended = connection.recv(10) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
        assert ended


def test_a_body_after_the_answer_is_not_read_forever(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 40")
        assert closed_after(connection) < 10


def test_a_connection_is_used_for_several_requests(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        answers = b""
        for sent, expected in (
            (REQUEST, 1),
            (REQUEST, 2),
            (REQUEST + REQUEST, 4),
        ):  # the last two at once
            connection.sendall(sent)
            while answers.count(b'"max_bytes"') < expected:
                answers += connection.recv(100_000)
        assert answers.count(b"HTTP/1.1 200 OK") == 4
