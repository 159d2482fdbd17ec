"""Commands for the corpora with boxes, and their results."""

from pathlib import Path

from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.schema import Sample


def box(label: str, x: float, y: float, width: float, height: float) -> dict[str, object]:
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def convert(root: Path, corpus: str, out: Path, *options: str) -> None:
    shared = ["--root", str(root), "--out", str(out), "--workers", "1", "--short-side", "32"]
    cli.main(["shards", corpus, *shared, *options])


def samples_of(out: Path, *splits: str) -> list[Sample]:
    sources = [ShardSource(out / split) for split in splits if (out / split).is_dir()]
    return [source.sample(place) for source in sources for place in range(len(source))]


def write_phantom(corpus: str, out: Path, patients: int, size: int, seed: int) -> None:
    sizes = ["--patients", str(patients), "--size", str(size), "--seed", str(seed)]
    cli.main(["phantom", corpus, "--out", str(out), "--workers", "1", *sizes])
