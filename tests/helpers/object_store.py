"""An object store on this machine (moto's server), behind a proxy that breaks answers on
request.
"""

import dataclasses
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Fault = str
"""reset, truncated, short, slow, silent, 503, expired, denied or missing."""
EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>token secret-token expired</Message></Error>"


@dataclasses.dataclass
class Proxy:
    """A proxy before the store. `fault` decides on each request: the name of a fault, or None to
    pass it on.
    """

    port: int = 0
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    requests: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    """(method, path, bytes answered) of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail_first(self, times: int, fault: Fault, part: str = "") -> None:
        """Answer the first requests of each path that contains `part` with a fault."""
        seen: dict[str, int] = {}

        def decide(method: str, path: str) -> Fault | None:
            if part not in path:
                return None
            seen[path] = seen.get(path, 0) + 1
            return fault if seen[path] <= times else None

        self.fault = decide

    def fail_always(self, fault: Fault, part: str = "") -> None:
        """Answer every request of a path that contains `part` with a fault."""
        self.fault = lambda method, path: fault if part in path else None

    def heal(self) -> None:
        """Answer as the store does."""
        self.fault = lambda method, path: None

    def answered(self, part: str = "", method: str = "GET") -> int:
        """Number of requests of paths that contain `part`."""
        return sum(1 for verb, path, _ in self.requests if verb == method and part in path)


def _handler(proxy: Proxy, host: str, port: int) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            fault = proxy.fault(self.command, self.path)
            if fault == "slow":
                time.sleep(0.2)
            if fault == "silent":
                time.sleep(3)
            if fault in ("reset", "silent"):
                self.break_off()
                return
            if fault in ("503", "expired", "denied", "missing"):
                status = {"503": 503, "expired": 400, "denied": 403, "missing": 404}[fault]
                self.answer(status, [], EXPIRED if fault == "expired" else b"")
                return
            connection = http.client.HTTPConnection(host, port)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            data = response.read()
            headers = [
                item
                for item in response.getheaders()
                if item[0].lower() not in ("transfer-encoding", "connection")
            ]
            if fault == "short":
                data = data[: len(data) // 2]
            self.answer(response.status, headers, data, cut=fault == "truncated")
            connection.close()

        def answer(
            self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False
        ) -> None:
            proxy.requests.append((self.command, self.path, len(data)))
            self.send_response_only(status)
            is_head = self.command == "HEAD"
            for name, value in headers:
                if name.lower() != "content-length" or is_head:
                    self.send_header(name, value)
            if not is_head:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not is_head:
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.break_off()

        def break_off(self) -> None:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    return Handler


@contextmanager
def proxied(host: str, port: int) -> Iterator[Proxy]:
    """Run a proxy before a server of this machine."""
    proxy = Proxy()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy, host, port)) as server:
        server.daemon_threads = True
        proxy.port = server.server_port
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield proxy
        server.shutdown()


@dataclasses.dataclass
class Bucket:
    """A bucket of the store."""

    name: str
    proxy: Proxy
    client: Any

    @property
    def address(self) -> str:
        return f"s3://{self.name}"

    def upload(self, folder: Path, prefix: str) -> str:
        """Upload a folder without medvl. Returns its address."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.put_object(
                    Bucket=self.name,
                    Key=f"{prefix}/{path.relative_to(folder).as_posix()}",
                    Body=path.read_bytes(),
                )
        return f"{self.address}/{prefix}"

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return body

    def objects(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return sorted(item["Key"] for item in found)
