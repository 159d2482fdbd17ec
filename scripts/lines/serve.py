"""Latency of `medvl serve` with several users at once, who each must get the answers for their own
image.

The server is a process of its own. Every user sends an image that nobody else sends, again and
again, and waits for each answer. Before, every image is sent alone: an answer that differs from
that one is wrong, and ends the line.
"""

import asyncio
import contextlib
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from measure.bench import Bench
from measure.line import Line, Report, SkipLine, TableRow, report
from measure.records import ROOT

import medvl
from medvl.data import train_wordpiece
from medvl.data.images.codecs import encode_png
from medvl.eval import load_prompts

RUN = ROOT / "quickstart/convirt"
"""Run of the quickstart, whose checkpoint the line serves."""
TEXTS = ["Edema", "Pleural Effusion", "Large left pleural effusion"]
BATCH = 16
"""Images of several users in one forward pass."""


def measure_scores(bench: Bench) -> Report:
    """Measure the latency of scores for 1, 8 and 32 users.

    Raises SkipLine without the quickstart's checkpoint, and RuntimeError after a wrong answer.
    """
    users, rounds, side = bench.size(((1, 8, 32), 3, 1024), ((1, 2), 1, 64))
    if not bench.dry_run and not RUN.is_dir():
        raise SkipLine(f"expected a run in {RUN}, got none; run scripts/quickstart.sh")
    run = RUN if not bench.dry_run else make_run(bench.folder / "serve")
    images = [image(number, side) for number in range(max(users))]
    with server(run, max(users)) as address:
        return report([], asyncio.run(measure(address, images, users, rounds)))


def image(seed: int, side: int) -> bytes:
    """Return a PNG of smooth noise that no other seed has."""
    rng = np.random.default_rng(seed)
    coarse = np.kron(
        rng.integers(40, 216, (8, 8), dtype=np.uint8), np.ones((side // 8, side // 8), np.uint8)
    )
    return encode_png(coarse + rng.integers(0, 8, coarse.shape, dtype=np.uint8))


def make_run(folder: Path) -> Path:
    """Write a checkpoint of random weights as RUN/best and return RUN."""
    tokenizer = train_wordpiece(load_prompts("chexpert_ensemble").texts(), vocab_size=300)
    sizes: dict[str, Any] = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 128,
    }
    (folder / "best").mkdir(parents=True)
    medvl.models.save(
        medvl.create_model("convirt", tokenizer=tokenizer, frozen_text_layers=0, **sizes),
        folder / "best",
    )
    return folder


@contextlib.contextmanager
def server(run: Path, users: int) -> Iterator[str]:
    """Start `medvl serve` on a free port and yield its address."""
    limits = ["--requests-per-minute", "1000000", "--waiting", str(users)]
    limits += ["--batch", str(BATCH)]
    command = [
        sys.executable,
        "-m",
        "medvl",
        "serve",
        "--checkpoint",
        str(run),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"open (http://\S+)", line)
            if found:
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(lines))
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


async def ask(client: httpx2.AsyncClient, data: bytes) -> Any:
    """Send an image and return the answer."""
    response = await client.post(
        "/api/scores", files={"image": ("image", data)}, data={"text": TEXTS}
    )
    response.raise_for_status()
    return response.json()


def same(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal, numbers up to 1e-5: images of a batch are rounded in
    another order.
    """
    if isinstance(answer, float) and isinstance(expected, float):
        return math.isclose(answer, expected, abs_tol=1e-5)
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(
            same(answer[name], expected[name]) for name in answer
        )
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    return bool(answer == expected)


async def measure(
    address: str, images: Sequence[bytes], users: Sequence[int], rounds: int
) -> dict[str, float]:
    """Return the median and the largest latency for each number of users."""
    figures: dict[str, float] = {}
    limits = httpx2.Limits(max_connections=max(users))
    async with httpx2.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        expected = [await ask(client, data) for data in images]
        if len({str(answer) for answer in expected}) < len(images):
            raise RuntimeError("expected different answers for different images, got equal ones")
        for count in users:
            seconds: list[float] = []

            async def user(number: int, seconds: list[float] = seconds) -> None:
                for _ in range(rounds):
                    started = time.perf_counter()
                    answer = await ask(client, images[number])
                    seconds.append(time.perf_counter() - started)
                    if not same(answer, expected[number]):
                        raise RuntimeError(f"expected user {number}'s answer, got another one")

            await asyncio.gather(*(user(number) for number in range(count)))
            figures[f"{count} users, median ms"] = 1000 * float(np.median(seconds))
            figures[f"{count} users, largest ms"] = 1000 * max(seconds)
    first, most = (f"{count} users, median ms" for count in (users[0], users[-1]))
    return {"one user, ms": figures[first], "most users, ms": figures[most], **figures}


LINES = (
    Line(
        name="serve",
        device="cpu",
        measures="scores of the quickstart's ConVIRT for images of 1,024 px, 1 and 32 users",
        unit="ms",
        rows=(
            TableRow(
                title="`medvl serve`, scores, one user and 32 users",
                ours="{one user, ms:.0f} and {most users, ms:.0f} ms",
            ),
        ),
        seconds=60,
        function=measure_scores,
    ),
)
