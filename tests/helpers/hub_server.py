"""A small stand-in of the Hugging Face hub's API: repositories of regular files, with commits."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

TOKEN = "hf_test"


class _Hub(BaseHTTPRequestHandler):
    """Routes of the API that uploads and downloads of models use."""

    repos: dict[str, dict[str, dict[str, bytes]]]
    """Repository -> commit -> path -> content; the last commit is `main`."""
    private: set[str]

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "unauthorized"}, 401)
        if self.path == "/api/repos/create":
            data = json.loads(body)
            name = (
                f"{data['organization']}/{data['name']}"
                if data.get("organization")
                else data["name"]
            )
            if name in self.repos:
                return self._json({"error": "exists", "url": self._url(name)}, 409)
            self.repos[name] = {"0" * 40: {}}
            self.private |= (
                {name}
                if "private" in (data.get("visibility"), data.get("private") and "private")
                else set()
            )
            return self._json({"url": f"http://{self.headers['Host']}/{name}"})
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        owner, name, verb = self.path.removeprefix("/api/models/").split("/")[:3]
        if verb == "preupload":
            files = json.loads(body)["files"]
            return self._json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        commits = self.repos[f"{owner}/{name}"]
        content = dict(list(commits.values())[-1])
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            if entry["key"] == "file":
                content[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        oid = hashlib.sha1(body).hexdigest()
        commits[oid] = content
        return self._json(
            {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self._url(owner)}/{name}/commit/{oid}",
            }
        )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        if name not in self.repos or (
            name in self.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        commits = self.repos[name]
        revision = parts[5] if api and len(parts) > 5 else parts[3] if not api else "main"
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if api and parts[4:5] == ["tree"]:
            entries = commits[commit].items()
            return self._json([{"type": "file", "path": path, "size": len(data),
                "oid": hashlib.sha1(data).hexdigest()}
                               for path, data in entries])  # fmt: skip
        if api:
            files = [{"rfilename": path} for path in commits[commit]]
            return self._json({"id": name, "sha": commit, "siblings": files,
                "private": name in self.private, "tags": [],
                               "downloads": 0, "likes": 0})  # fmt: skip
        data = commits[commit]["/".join(parts[4:])]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
        return None

    def _url(self, name: str) -> str:
        return f"http://{self.headers['Host']}/{name}"

    def _json(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serve_hub(
    cache: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN
) -> Iterator[type[_Hub]]:
    """Run the stand-in and point huggingface_hub to it, as HF_ENDPOINT, HF_TOKEN and HF_HOME do
    before its import.
    """
    handler = type("Hub", (_Hub,), {"repos": {}, "private": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", token or "")
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()
