"""Small conversion plans, their options, and folders of shards made from them."""

import hashlib
import json
from pathlib import Path

from helpers.mimic_files import textured
from medvl.data.convert.options import ShardOptions
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.images.codecs import encode_png
from medvl.schema import Sample


def make_plan(folder: Path, count: int = 12, bad: dict[int, bytes] | None = None) -> Plan:
    """Return a plan of distinct images, two per patient, all in one split."""
    folder.mkdir(exist_ok=True)
    records = []
    for number in range(count):
        path = folder / f"{number}.png"
        if not path.exists():
            path.write_bytes((bad or {}).get(number) or encode_png(textured(number, 40, 50)))
        sample = Sample(
            key=f"key{number:03d}",
            corpus="lab",
            split="train",
            patient=f"patient{number // 2}",
            study=f"study{number // 2}",
            image=path,
            sections={"caption": f"This is image {number}."},
            labels={"even": int(number % 2 == 0)},
        )
        records.append(Record(sample))
    return Plan("lab", records, ("even",), RowCounts())


OPTIONS = ShardOptions(short_side=32, samples_per_shard=5, image_format="png")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def reseal(folder: Path, number: int) -> None:
    """Write the actual hashes of a modified shard into the manifest, so that only the deeper
    checks can detect it.
    """
    content = json.loads((folder / "manifest.json").read_text())
    tar = folder / f"lab-train-{number:06d}.tar"
    content["shards"][number]["sha256"] = hashlib.sha256(tar.read_bytes()).hexdigest()
    content["shards"][number]["index_sha256"] = hashlib.sha256(
        tar.with_suffix(".index").read_bytes()
    ).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))
