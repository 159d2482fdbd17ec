"""Benchmark of the memory of planning and converting a table, by its number of rows.

    python scripts/benchmark_plan.py 100000

Every row names a tiny PNG, so that only medvl's own memory grows; there are two images per patient.
Run one process per number of rows, because the peak memory of a process never decreases.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path

import numpy as np

from medvl.data import Deidentifier, ShardRun, encode_png, write_shards
from medvl.data.corpora import table

TEXT = "The lungs are clear. There is no pleural effusion. Heart size is normal. " * 3
COLUMNS = table.TableColumns(image_column="image", patient_column="patient", text_column=("text",))


def main() -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=int)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pixels = encode_png(np.zeros((16, 16), np.uint8))
        with (folder / "rows.jsonl").open("w") as file:
            for number in range(rows):
                (folder / f"{number}.png").write_bytes(pixels)
                row = {
                    "image": f"{number}.png",
                    "patient": f"p{number // 2}",
                    "text": f"Image {number}. {TEXT}",
                }
                file.write(json.dumps(row) + "\n")
        deid, before = Deidentifier(bytes(32)), peak()
        plan = table.Table(table=folder / "rows.jsonl", columns=COLUMNS).plan(deid)
        planned = peak()
        write_shards(plan, deid, ShardRun(out=folder / "shards", workers=1))
    print(
        f"{rows} rows: peak {before:.0f} MB before, {planned:.0f} when planned, {peak():.0f} "
        f"when converted"
    )


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
