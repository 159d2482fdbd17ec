"""Stand-ins on this machine for the parts of Google Cloud Storage and of Azure Blob Storage that
gcsfs and adlfs use.
"""

import abc
import base64
import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "Sun, 01 Nov 2026 00:00:00 GMT"


@dataclasses.dataclass
class Objects:
    """Objects of one bucket by their key."""

    data: dict[str, bytes] = dataclasses.field(default_factory=dict)
    blocks: dict[tuple[str, str], bytes] = dataclasses.field(default_factory=dict)
    """(key, id) -> a block or session of an upload that has not ended."""

    PAGE: ClassVar[int] = 1000

    def below(self, prefix: str, after: str) -> tuple[list[tuple[str, bytes]], str]:
        """Return a page of the objects, and the key that the next page begins after; empty for
        the last.
        """
        found = sorted(
            item for item in self.data.items() if item[0].startswith(prefix) and item[0] > after
        )
        page = found[: self.PAGE]
        return page, page[-1][0] if len(found) > len(page) else ""


class _Handler(abc.ABC, http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(address.query, keep_blank_values=True).items()
        }
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.respond(self.command, unquote(address.path), query, body)

    @abc.abstractmethod
    def respond(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        """Answer a request."""

    def send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_part(self, data: bytes, **headers: str) -> None:
        """Answer with an object, or with the part of it that the request asks for."""
        asked = re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("range") or ""
        )
        if asked is None:
            self.send(200, data, **headers)
            return
        start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if start >= len(data):
            self.send(416, b"", Content_Range=f"bytes */{len(data)}")
            return
        self.send(
            206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}", **headers
        )

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request


class GoogleHandler(_Handler):
    """The JSON API: metadata, lists, downloads of parts, uploads in one request or in several."""

    def respond(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        found = re.fullmatch(r"/(?:(upload|download)/)?storage/v1/b/([^/]+)/o(?:/(.+))?", path)
        if found is None:
            self.send_json(404, {"error": {"code": 404, "message": path}})
            return
        kind, bucket, key = found.groups()
        if kind == "upload":
            self.receive(bucket, query, body)
        elif key is None:
            found, token = self.objects.below(query.get("prefix", ""), query.get("pageToken", ""))
            items = [self.metadata(bucket, name) for name, _ in found]
            more = {"nextPageToken": token} if token else {}
            self.send_json(200, {"kind": "storage#objects", "items": items, **more})
        elif key not in self.objects.data:
            self.send_json(404, {"error": {"code": 404, "message": f"no such object: {key}"}})
        elif method == "DELETE":
            del self.objects.data[key]
            self.send(204)
        elif kind == "download" or query.get("alt") == "media":
            self.send_part(self.objects.data[key], Content_Type="application/octet-stream")
        else:
            self.send_json(200, self.metadata(bucket, key))

    def receive(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        if query["uploadType"] == "multipart":
            _, described, content, _ = body.split(b"--==0==", 3)
            key = json.loads(described.split(b"\n\n", 1)[1])["name"]
            self.objects.data[key] = content.split(b"\n\n", 1)[1].removesuffix(b"\n")
            self.send_json(200, self.metadata(bucket, key))
        elif "upload_id" not in query:
            key = json.loads(body)["name"]
            self.objects.blocks[key, ""] = b""
            address = f"http://{self.headers['host']}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            self.send(200, b"{}", Location=address, Content_Type="application/json")
        else:
            key, total = query["upload_id"], int(self.headers["content-range"].rpartition("/")[2])
            self.objects.blocks[key, ""] += body
            if len(self.objects.blocks[key, ""]) < total:
                self.send(308, Range=f"bytes=0-{len(self.objects.blocks[key, '']) - 1}")
            else:
                self.objects.data[key] = self.objects.blocks.pop((key, ""))
                self.send_json(200, self.metadata(bucket, key))

    def metadata(self, bucket: str, key: str) -> dict[str, Any]:
        size = str(len(self.objects.data[key]))
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": key,
            "size": size,
            "generation": "1",
        }

    def send_json(self, status: int, value: Any) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")


class AzureHandler(_Handler):
    """The blob service: properties, lists, downloads of parts, uploads in one request or in
    blocks.
    """

    def respond(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        _, _, container, *rest = path.split("/")
        key = "/".join(rest)
        if method == "PUT":
            self.receive(key, query, body)
        elif query.get("comp") == "list":
            data = self.listed(container, query.get("prefix", ""), query.get("marker", ""))
            self.send(200, data, Content_Type="application/xml")
        elif not key:
            self.send(200, x_ms_version="2026-01-01", Last_Modified=_DATE, ETag="0")
        elif key not in self.objects.data:
            self.send(404, b"", x_ms_error_code="BlobNotFound")
        elif method == "DELETE":
            del self.objects.data[key]
            self.send(202)
        else:
            facts = {"x_ms_blob_type": "BlockBlob", "Last_Modified": _DATE, "ETag": "0"}
            self.send_part(self.objects.data[key], Content_Type="application/octet-stream", **facts)

    def receive(self, key: str, query: dict[str, str], body: bytes) -> None:
        if query.get("comp") == "block":
            self.objects.blocks[key, query["blockid"]] = body
        elif query.get("comp") == "blocklist":
            order = re.findall(r"<Latest>(.*?)</Latest>", body.decode())
            self.objects.data[key] = b"".join(
                self.objects.blocks.pop((key, name)) for name in order
            )
        else:
            self.objects.data[key] = body
        self.send(201, ETag="0", Last_Modified=_DATE)

    def listed(self, container: str, prefix: str, after: str) -> bytes:
        found, marker = self.objects.below(prefix, after)
        blobs = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Content-Length>{len(data)}</Content-Length>"
            f"<BlobType>BlockBlob</BlobType><Last-Modified>{_DATE}</Last-Modified></Properties></Blob>"
            for key, data in found
        )
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults '
            f'ContainerName="{container}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{blobs}</Blobs><NextMarker>{escape(marker)}</NextMarker></EnumerationResults>"
        ).encode()


AZURE_KEY = base64.b64encode(b"key of the stand-in").decode()


@contextmanager
def serve(handler: type[_Handler]) -> Iterator[tuple[int, Objects]]:
    """Run a stand-in with one bucket. Yields its port and its objects."""
    objects = Objects()
    bound = type(handler.__name__, (handler,), {"objects": objects})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        server.daemon_threads = True
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield server.server_port, objects
        server.shutdown()
