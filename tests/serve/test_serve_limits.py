"""What the server refuses, and what it never keeps: wrong tokens, hosts, sizes, rates, types;
files and logs.
"""

import asyncio
import logging
import struct
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
from helpers.errors import raises
from helpers.served import HOST, PLENTY, client, dicom, png, post, served, tiny_convirt

from medvl.cli import main as cli
from medvl.data.images.codecs import encode_jpeg
from medvl.errors import ConfigError
from medvl.serve import ServeConfig, create_app
from medvl.serve.app import listen
from medvl.serve.engine import Budget, Engine
from medvl.serve.guard import RateLimit, Refused, address_of

TOKEN = "a-token-of-more-than-16"
SERVED = served(tiny_convirt())
SECRET = "Mustermann^Erika"


def png_header(width: int, height: int) -> bytes:
    """Return a PNG of this size in its header, without pixels."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def code(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_api_needs_the_token_and_the_page_does_not() -> None:
    app = client([SERVED], config=ServeConfig(token=TOKEN))
    assert app.get("/").status_code == 200
    assert code(app.get("/api/models")) == (401, "token")
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "é"):
        assert code(
            app.get("/api/models", headers={"authorization": f"Bearer {wrong}".encode()})
        ) == (401, "token")
    assert app.get("/api/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.example"}, (421, "host")),
        ({"host": "localhost.evil.example:80"}, (421, "host")),
        ({"host": "localhost:8765", "origin": "http://evil.example"}, (403, "origin")),
        ({"host": "localhost:8765", "origin": "null"}, (403, "origin")),
    ],
)
def test_pages_of_others_cannot_reach_the_server(headers: dict, expected: tuple[int, str]) -> None:
    app = client([SERVED])
    assert code(app.get("/api/models", headers=headers)) == expected
    assert code(app.get("/", headers=headers)) == expected


@pytest.mark.parametrize("host", ["localhost:8765", "127.0.0.1:1", "[::1]:8765", "localhost"])
def test_names_of_this_machine_are_accepted(host: str) -> None:
    app = client([SERVED])
    assert (
        app.get("/api/models", headers={"host": host, "origin": f"http://{host}"}).status_code
        == 200
    )


def test_rate_is_limited_for_each_address_and_refills() -> None:
    app = client([SERVED], config=ServeConfig(requests_per_minute=3))
    answers = [app.get("/api/models") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert code(answers[3]) == (429, "rate")
    assert int(answers[3].headers["retry-after"]) > 0
    assert app.get("/").status_code == 200
    now = [0.0]
    limit = RateLimit(60, lambda: now[0])
    for _ in range(60):
        limit.take("a")
    limit.take("b")
    with pytest.raises(Refused):
        limit.take("a")
    now[0] = 1.0
    limit.take("a")
    with pytest.raises(Refused):
        limit.take("a")


def test_large_uploads_are_refused_with_and_without_a_length() -> None:
    app = client([SERVED], config=ServeConfig(max_megabytes=1))
    assert code(post(app, "view", bytes(1_100_000))) == (413, "too_large")
    body = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        + bytes(1_100_000)
        + b"\r\n--x--\r\n"
    )

    def chunks():
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert code(app.post("/api/view", content=chunks(), headers=headers)) == (413, "too_large")


async def never_ends() -> AsyncIterator[bytes]:
    yield b"--x\r\n"
    await asyncio.sleep(60)


FORM = {"content-type": "multipart/form-data; boundary=x"}


def test_uploads_that_stop_shut_nobody_out() -> None:
    app = create_app(
        [SERVED], None, ServeConfig(requests_per_minute=1000, waiting=1, stall_seconds=0.5)
    )

    async def run() -> tuple[list[tuple[int, str]], int]:
        async with httpx2.AsyncClient(transport=_Streaming(app), base_url=HOST) as to:
            slow = [
                asyncio.create_task(to.post("/api/view", content=never_ends(), headers=FORM))
                for _ in range(34)
            ]
            await asyncio.sleep(0.05)
            other = await to.post("/api/view", files={"image": ("i", png())})
            return [code(answer) for answer in await asyncio.gather(*slow)], other.status_code

    slow, other = asyncio.run(run())
    assert other == 200
    assert slow == [(408, "slow")] * 34


def test_an_upload_must_arrive_in_time() -> None:
    app = create_app([SERVED], None, ServeConfig(upload_seconds=0.3))

    async def trickles() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    async def run() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=_Streaming(app), base_url=HOST) as to:
            return await to.post("/api/view", content=trickles(), headers=FORM)

    assert code(asyncio.run(run())) == (408, "slow")


def test_more_than_waiting_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app([SERVED], None, ServeConfig(requests_per_minute=1000, waiting=1))
    served_at_last = asyncio.Event()

    async def wait(self: Engine, function: Any) -> Any:
        await served_at_last.wait()
        return function()

    monkeypatch.setattr(Engine, "decode", wait)

    async def run() -> tuple[tuple[int, str], list[int]]:
        async with httpx2.AsyncClient(transport=_Streaming(app), base_url=HOST) as to:
            held = [
                asyncio.create_task(to.post("/api/view", files={"image": ("i", png())}))
                for _ in range(2)
            ]
            await asyncio.sleep(0.2)
            third = await to.post("/api/view", files={"image": ("i", png())})
            served_at_last.set()
            return code(third), [answer.status_code for answer in await asyncio.gather(*held)]

    assert asyncio.run(run()) == ((429, "busy"), [200, 200])


def test_places_and_bytes_are_shared_between_addresses() -> None:
    budget = Budget(10, 0.5)
    budget.take("a", 5)
    with pytest.raises(Refused):
        budget.take("a", 1)
    budget.take("b", 5)
    with pytest.raises(Refused):
        budget.check("c")
    budget.give("a", 5)
    budget.check("c", 5)
    engine = Engine(1, 100)
    with engine.upload("a") as count:
        count(150)
        with engine.upload("b") as other, pytest.raises(Refused):
            other(51)
    with engine.upload("b") as count:
        count(200)  # the bytes of the others are free again


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("::1", 1), "::1"),
        (("2001:db8:1:2:3::4", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::9", 1), "2001:db8:1:2::/64"),
        (("testclient", 1), ""),
        (None, ""),
    ],
)
def test_a_subscriber_in_ipv6_is_one_address(client: tuple[str, int] | None, address: str) -> None:
    assert address_of(client) == address


class _Streaming(httpx2.ASGITransport):
    """Passes the body of a request on as it is made, as a connection does."""

    async def handle_async_request(self, request):
        body, status, parts, headers = request.stream.__aiter__(), 0, [], []

        async def receive():
            try:
                return {"type": "http.request", "body": await anext(body), "more_body": True}
            except StopAsyncIteration:
                return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message["headers"]
            else:
                parts.append(message.get("body", b""))

        scope = {"type": "http", "method": request.method, "path": request.url.path,
            "query_string": b"", "http_version": "1.1",
                 "headers": [(name.lower(), value) for name, value in request.headers.raw],
                 "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http",
                 "root_path": "", "raw_path": request.url.raw_path}  # fmt: skip
        await self.app(scope, receive, send)
        return httpx2.Response(status, headers=headers, content=b"".join(parts))


def test_forms_are_checked() -> None:
    app = client([SERVED])
    assert code(app.post("/api/view", content=b"x")) == (415, "wrong_type")
    assert code(
        app.post("/api/view", content=b"x", headers={"content-type": "multipart/form-data"})
    ) == (
        400,
        "malformed",
    )
    assert code(app.post("/api/view", files={"text": (None, "edema")})) == (400, "missing")
    # else the answer would be about all findings
    assert code(post(app, "scores", png(), findings="edema")) == (400, "unknown_name")
    image = {"image": (None, "text")}  # a field of text in place of a file
    assert code(app.post("/api/view", files=image)) == (400, "missing")
    assert code(post(app, "view", png(), center="1")) == (400, "out_of_range")
    assert code(post(app, "view", png(), center="1", width="-1")) == (400, "out_of_range")
    assert code(post(app, "view", png(), center="nan", width="1")) == (400, "wrong_type")
    assert code(post(app, "view", png(), frame="-1")) == (400, "out_of_range")
    assert code(post(app, "view", png(), frame="1e9")) == (400, "out_of_range")
    assert code(post(app, "scores", png(), ["a" * 501])) == (413, "too_large")
    assert code(post(app, "scores", png(), [f"a {n}" for n in range(40)]))[0] in (400, 413)
    assert code(post(app, "heatmap", png())) == (400, "missing")
    assert code(app.get("/api/nothing")) == (404, "not_found")
    assert code(app.get("/../../etc/passwd")) == (404, "not_found")
    assert code(app.get("/api/view")) == (405, "not_found")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (422, "empty")),
        (b"<html>", (415, "unknown_format")),
        (png()[:60], (422, "truncated")),
        (bytes(128) + b"DICM" + bytes(40), (422, "no_pixels")),
        (dicom()[:-500], (422, "truncated")),
        (png_header(100_000, 100_000), (413, "too_large")),
        (encode_jpeg(np.zeros((2, 400), np.uint8)), (422, "too_small")),
    ],
)
def test_damaged_images_are_refused_by_name(data: bytes, expected: tuple[int, str]) -> None:
    app = client([SERVED])
    for route in ("view", "scores"):
        assert code(post(app, route, data)) == expected


def test_no_image_breaks_the_server() -> None:
    app, rng = client([SERVED]), np.random.default_rng(0)
    starts = [png(), dicom(), encode_jpeg(np.zeros((40, 40), np.uint8))]
    statuses = set()
    for number in range(90):
        data = bytearray(starts[number % 3])
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(len(data))] = rng.integers(256)
        data = data[: rng.integers(1, len(data) + 1)] if number % 4 == 0 else data
        response = post(app, "view" if number % 2 else "scores", bytes(data), ["Edema"])
        assert response.status_code in (200, 413, 415, 422), response.text
        assert response.status_code == 200 or response.json()["error"]["message"]
        statuses.add(response.status_code)
    assert {200, 422} <= statuses
    assert post(app, "scores", png()).status_code == 200


def test_nothing_is_stored_and_logs_hold_nothing_of_a_request(monkeypatch, caplog, capsys) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was made")

    for name in ("NamedTemporaryFile", "TemporaryFile", "mkstemp", "mkdtemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", refuse)
    caplog.set_level(logging.DEBUG)
    app = client([SERVED])
    large = dicom(
        np.random.default_rng(0).integers(0, 4095, (1200, 1200)).astype(np.uint16),
        PatientName=SECRET,
    )
    assert len(large) > 2_000_000
    bodies = [
        post(app, "scores", large, [SECRET], name=SECRET),
        post(app, "heatmap", png(), [SECRET], name=SECRET),
        post(app, "answer", png(), [SECRET], name=SECRET),
        post(app, "view", large[:-9], name=SECRET),
        post(app, "view", large.replace(b"MONOCHROME2", SECRET[:11].encode()), name=SECRET),
        app.get(f"/{SECRET}", headers={"x-patient": SECRET}),
        app.get(f"/api/models?patient={SECRET}"),
    ]
    assert [body.status_code for body in bodies] == [200, 200, 200, 422, 422, 404, 200]
    monkeypatch.setattr(
        type(SERVED.model), "embed_images", lambda *_: (_ for _ in ()).throw(RuntimeError(SECRET))
    )
    failed = post(app, "scores", png(), [SECRET])
    assert code(failed) == (500, "internal")
    printed = capsys.readouterr()
    logged = "\n".join(
        record.getMessage() for record in caplog.records if "httpx" not in record.name
    )  # the client's
    for text in (
        logged,
        printed.out,
        printed.err,
        failed.text,
        *(body.text for body in bodies[1:]),
    ):
        assert SECRET not in text.replace("%5E", "^")
        assert SECRET[:11] not in text
    assert "POST /api/scores 500" in logged
    assert "RuntimeError at" in logged
    assert "GET other 404" in logged


def test_32_users_at_once_get_the_scores_of_their_own_images() -> None:
    alone = client([SERVED])
    images = [png(seed) for seed in range(32)]
    expected = [
        post(alone, "scores", image, ["Edema", f"finding {n}"]).json()
        for n, image in enumerate(images)
    ]
    assert len({answer["models"][0]["result"][0]["score"] for answer in expected}) == 32
    app = create_app([SERVED], None, PLENTY)

    async def run() -> list:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=HOST) as to:
            return await asyncio.gather(
                *(
                    to.post(
                        "/api/scores",
                        files={"image": ("i", image)},
                        data={"text": ["Edema", f"finding {n}"]},
                    )
                    for n, image in enumerate(images)
                )
            )

    # Images of several users are encoded together, which rounds differently.
    for answer, alone_answer in zip(asyncio.run(run()), expected, strict=True):
        [scores], [alone_scores] = (
            [model["result"] for model in each["models"]] for each in (answer.json(), alone_answer)
        )
        assert [score["text"] for score in scores] == [score["text"] for score in alone_scores]
        assert [score["score"] for score in scores] == pytest.approx(
            [score["score"] for score in alone_scores], abs=1e-5
        )


def test_missing_packages_and_ports_in_use_are_named(monkeypatch, capsys) -> None:
    with listen(ServeConfig(port=0)) as taken:
        taken.listen()
        with raises(ConfigError, "in_use", "port"):
            listen(ServeConfig(port=taken.getsockname()[1]))
    with pytest.raises(SystemExit):
        cli.main(["serve"])
    assert "expected one or 2 checkpoints" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--checkpoint", "runs/convirt"])
    assert "pip install 'medvl[serve]'" in capsys.readouterr().err
