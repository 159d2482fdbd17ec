"""Latency of `medvl serve` with several users at once, who each must get the answers for their own
image.

    python scripts/benchmark_serve.py  # a small model of random weights
    python scripts/benchmark_serve.py --checkpoint quickstart/convirt --users 1 8 32
    python scripts/benchmark_serve.py --device cuda --side 2500

The server is a process of its own. Every user sends an image that nobody else sends, again and
again, and waits for each answer. Before, every image is sent alone: an answer that differs from
that one is counted as wrong. Prints, for each route and number of users, the median, the 95th
percentile and the maximum of the latency, the rate, and the processor time of the server for an
answer, which other programs on the machine hardly change.
"""

import argparse
import asyncio
import contextlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

import medvl
from medvl.data import train_wordpiece
from medvl.data.images.codecs import encode_png
from medvl.eval import load_prompts

TEXTS = {
    "scores": ["Edema", "Pleural Effusion", "Large left pleural effusion"],
    "heatmap": ["Edema"],
    "view": [],
}


def main() -> int:
    """Run the benchmark and print its table. Returns 1 after a wrong answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a run; default a small ConVIRT of random weights"
    )
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4, help="requests of each user and route")
    parser.add_argument("--side", type=int, default=1024, help="side of the images in pixels")
    parser.add_argument("--routes", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument(
        "--batch", type=int, default=16, help="images of several users in one forward pass"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    images = [image(number, options.side) for number in range(max(options.users))]
    size = sum(map(len, images)) / len(images) / 1e6
    print(f"images of {options.side} x {options.side} pixels, {size:.2f} MB each")
    print(
        f"{'route':10} {'users':>5} {'median':>9} {'95 %':>9} {'maximum':>9} {'answers/s':>10} "
        f"{'CPU':>7} {'wrong':>6}"
    )
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.checkpoint or make_run(Path(folder)), options) as served,
    ):
        for route in options.routes:
            wrong += asyncio.run(measure(served, route, images, options.users, options.rounds))
    return int(wrong > 0)


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
    (folder / "best").mkdir()
    medvl.models.save(
        medvl.create_model("convirt", tokenizer=tokenizer, frozen_text_layers=0, **sizes),
        folder / "best",
    )
    return folder


@contextlib.contextmanager
def server(run: Path, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Start `medvl serve` on a free port and yield its address and process id."""
    limits = ["--requests-per-minute", "1000000", "--waiting", str(max(options.users))]
    limits += ["--batch", str(options.batch)]
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
        options.device,
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
            raise SystemExit("the server did not start:\n" + "".join(lines))
        yield found[1], process.pid
    finally:
        process.terminate()
        process.communicate(timeout=30)


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process so far; 0 where the system has no /proc."""
    stat = Path(f"/proc/{process}/stat")
    ticks = stat.read_text().rpartition(")")[2].split()[11:13] if stat.exists() else ["0"]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


async def ask(client: httpx2.AsyncClient, route: str, data: bytes) -> Any:
    """Send an image and return the answer."""
    response = await client.post(
        f"/api/{route}", files={"image": ("image", data)}, data={"text": TEXTS[route]}
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
    served: tuple[str, int], route: str, images: Sequence[bytes], users: Sequence[int], rounds: int
) -> int:
    """Print the latencies of a route and return the number of wrong answers."""
    total, (address, process) = 0, served
    limits = httpx2.Limits(max_connections=max(users))
    async with httpx2.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        expected = [await ask(client, route, data) for data in images]
        if len({str(answer) for answer in expected}) < len(images):
            raise SystemExit(
                "two images have the same answer, so that a wrong one would not be noticed"
            )
        for count in users:
            seconds: list[float] = []
            wrong = 0

            async def user(number: int, seconds: list[float] = seconds) -> int:
                differing = 0
                for _ in range(rounds):
                    started = time.perf_counter()
                    answer = await ask(client, route, images[number])
                    seconds.append(time.perf_counter() - started)
                    differing += not same(answer, expected[number])
                return differing

            started, used = time.perf_counter(), cpu_seconds(process)
            wrong = sum(await asyncio.gather(*(user(number) for number in range(count))))
            rate = len(seconds) / (time.perf_counter() - started)
            times = " ".join(
                f"{1000 * float(value):6.0f} ms" for value in np.quantile(seconds, [0.5, 0.95, 1.0])
            )
            spent = 1000 * (cpu_seconds(process) - used) / len(seconds)
            print(
                f"{route:10} {count:5} {times} {rate:10.1f} {spent:4.0f} ms {wrong:6}", flush=True
            )
            total += wrong
    return total


if __name__ == "__main__":
    raise SystemExit(main())
