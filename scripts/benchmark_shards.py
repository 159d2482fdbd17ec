"""Conversion against bare decoding: DICOM files a second, in one process.

    python scripts/benchmark_shards.py                        # 120 phantom files of 2500 x 3000 pixels
    python scripts/benchmark_shards.py --root MIMIC-CXR --images 500

Bare decoding is `pydicom.dcmread(path).pixel_array` and nothing else. Conversion adds the window, the resize, the JPEG
encoding, the report, the hashes and the tar.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import pydicom

from medvl import phantom
from medvl.data.corpora import mimic_cxr
from medvl.data.corpora.base import Plan
from medvl.data.deid import Deidentifier
from medvl.data.shard_options import ShardOptions, ShardRun
from medvl.data.sharding import write_shards


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a MIMIC-CXR on disk; default: the phantom, drawn for this")
    parser.add_argument("--images", type=int, default=120)
    parser.add_argument("--size", type=int, default=2544, help="pixels of a phantom image's side")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.root
        if root is None:
            root = Path(folder) / "mimic-cxr"
            phantom.write_mimic_cxr(root, patients=max(1, options.images // 3), size=options.size)
        deid = Deidentifier(bytes(32))
        records = mimic_cxr.plan(root, deid).records[: options.images]
        paths = [record.sample.image for record in records if record.sample.image is not None]
        bare, converted = [], []
        for repeat in range(options.repeats):
            started = time.perf_counter()
            for path in paths:
                _ = pydicom.dcmread(path).pixel_array
            bare.append(len(paths) / (time.perf_counter() - started))
            run = ShardRun(out=Path(folder) / f"shards{repeat}", workers=1)
            started = time.perf_counter()
            write_shards(Plan("mimic-cxr", records, (), Counter()), deid, run, ShardOptions(keep_textless=True))
            converted.append(len(paths) / (time.perf_counter() - started))
        headers = [pydicom.dcmread(path, stop_before_pixels=True) for path in paths]
        syntaxes = Counter(header.file_meta.TransferSyntaxUID.name for header in headers)
    print(f"{len(paths)} files; best of {options.repeats}, one process")
    for name, count in sorted(syntaxes.items()):
        print(f"  {count:5} {name}")
    print(f"bare decoding   {max(bare):8.1f} files/s")
    print(f"conversion      {max(converted):8.1f} files/s, {max(converted) / max(bare):.2f} of it")


if __name__ == "__main__":
    main()
