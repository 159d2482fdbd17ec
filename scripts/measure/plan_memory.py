"""Peak memory of planning and converting a table, by its number of rows.

    python scripts/measure/plan_memory.py FOLDER 100000

Every row names a tiny PNG, so that only medvl's own memory grows; there are two images per patient.
The peak of a process never decreases: start one process per number of rows.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np

from medvl.data import Deidentifier, ShardRun, encode_png, write_shards
from medvl.data.corpora import table

TEXT = "The lungs are clear. There is no pleural effusion. Heart size is normal. " * 3
COLUMNS = table.TableColumns(image_column="image", patient_column="patient", text_column=("text",))


def measure(folder: Path, rows: int) -> dict[str, float]:
    """Return the peak memory of this process before, when planned, and when converted, in MB."""
    folder.mkdir()
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
    return {"MB before": before, "MB planned": planned, "MB converted": peak()}


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
