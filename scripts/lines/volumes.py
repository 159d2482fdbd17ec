"""The loader of volumes beside bare decompression, and the bytes of a volume.

Volumes are phantom chest CTs of HLIP's size, 112 x 336 x 336, whose noise decides their bytes. The
bare loop decompresses the same frames with zstandard, which every reader must do. Both are measured
in turns on the same volumes in CPU seconds of one process without workers.
"""

import time
from pathlib import Path

import zstandard
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report

from medvl.data import (
    Deidentifier,
    Plan,
    Record,
    Records,
    RowCounts,
    ShardRun,
    ShardSource,
    VolumeFile,
    VolumeShardOptions,
    VolumeTransform,
    WholeText,
    no_text,
    open_loader,
    write_shards,
)
from medvl.data.volumes.codec import read_volume_header  # internal: the bare loop reads its frames
from medvl.phantom import write_volumes
from medvl.schema import Sample

SIZE = (112, 336, 336)


def measure_volumes(bench: Bench) -> Report:
    """Measure the loader and bare decompression, in volumes per CPU second."""
    patients, size, passes = bench.size((4, SIZE, 3), (2, (16, 32, 32), 1))
    source = ShardSource(volume_shards(bench.folder / "volumes", patients, size))
    loader = open_loader(
        source,
        batch=1,
        image=VolumeTransform(size=size),
        text=WholeText(),
        tokenizer=no_text,
        train=False,
    )
    spent = bare = 0.0
    for _ in range(passes):
        started = time.process_time()
        for _ in loader:
            pass
        spent += time.process_time() - started
        bare += bare_seconds(source)
    count = passes * len(source)
    stored = sum(map(source.volume_bytes, range(len(source)))) / len(source)
    depth, height, width = size
    figures = {
        "volumes/s": count / spent,
        "of bare decompression": bare / spent,
        "MB": stored / 1e6,
        "MB in memory": 2 * depth * height * width / 1e6,
    }
    return report([], figures)


def volume_shards(folder: Path, patients: int, size: tuple[int, int, int]) -> Path:
    """Return shards of phantom chest CTs, which are made once."""
    out = folder / "shards"
    if not (out / "train" / "manifest.json").exists():
        write_volumes(folder, patients=patients, shape=size)
        records = Records(
            Record(
                Sample(
                    key=f"volume{number}",
                    corpus="phantom",
                    split="train",
                    patient=f"patient{number}",
                    study=f"study{number}",
                    image=folder / "nifti" / f"s{number:05d}_1.nii.gz",
                    sections={"findings": "A chest CT."},
                ),
                volume=VolumeFile(),
            )
            for number in range(patients)
        )
        plan = Plan("phantom", records, (), RowCounts())
        run = ShardRun(out=out, workers=1)
        write_shards(plan, Deidentifier(bytes(32)), run, VolumeShardOptions())
    return out / "train"


def bare_seconds(source: ShardSource) -> float:
    """Return the CPU seconds of decompressing the frames of all volumes from memory."""
    decompressor = zstandard.ZstdDecompressor()
    volumes = [source.image_bytes(position) for position in range(len(source))]
    started = time.process_time()
    for data in volumes:
        for offset, size, _ in read_volume_header(data).chunks:
            decompressor.decompress(memoryview(data)[offset : offset + size])
    return time.process_time() - started


LINES = (
    Line(
        name="volumes",
        device="cpu",
        measures="loader of volumes on one core, 112 x 336 x 336 voxels at 16 bits, zstd with low "
        "and high bytes apart",
        unit="volumes/s",
        rows=(
            TableRow(
                title="volumes of 112 x 336 x 336 from shards, one core",
                peer="bare decompression",
                ours="{volumes/s:.1f} volumes/s, {of bare decompression:.2f} times; "
                "{MB:.1f} MB each",
            ),
        ),
        seconds=60,
        function=measure_volumes,
    ),
)
