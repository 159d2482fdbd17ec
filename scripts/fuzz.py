"""Fuzzing of readers: every mutated file must be read or raise one of medvl's errors.

    python scripts/fuzz.py                              # 10,000 mutations per reader, some minutes on one core
    python scripts/fuzz.py dicom report --count 500
    python scripts/fuzz.py dicom --only 4711            # repeat one mutation, with its traceback

A mutation is determined by (seed, reader, number): bits flipped, bytes replaced, removed, duplicated or moved, numbers
set to extreme values, ends truncated. Each reader runs in a process of its own, so that crashes are detected; more than
ten seconds for a mutation is a failure. The exit status is 1 after any failure.
"""

import argparse
import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from medvl.errors import MedvlError

# The readers under test are internals, imported in the functions below.

SECONDS = 10
EXTREME_VALUES = (
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0",
    b"-1",
    b"1e999",
    b"\x80",
    b"../",
    b"{}",
)
PYDICOM_FILES = (
    *("CT_small", "MR_small_implicit", "MR_small_RLE", "MR_small_jp2klossless", "MR_small_jpeg_ls_lossless"),
    *("SC_rgb_jpeg_gdcm", "SC_rgb_small_odd_jpeg", "image_dfl", "liver_1frame", "ExplVR_BigEnd"),
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reading function with valid files."""

    read: Callable[[Path], Any]
    """Function that reads the file at a path."""
    valid: Sequence[bytes]


@dataclasses.dataclass
class Tally:
    """Outcomes of the mutations."""

    read: int = 0
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)
    """Type of medvl's error -> count."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of failures."""
    slowest: float = 0.0


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the data with one to six changes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 7))):
        size = len(changed)
        if size == 0:
            break
        # Headers matter most, so the first bytes are changed more often.
        start = int(rng.integers(min(size, 2048) if rng.random() < 0.6 else size))
        length = int(rng.integers(1, 9))
        match int(rng.integers(8)):
            case 0 | 1:
                changed[start] ^= 1 << int(rng.integers(8))
            case 2:
                changed[start : start + length] = rng.bytes(length)
            case 3:
                extreme = EXTREME_VALUES[int(rng.integers(len(EXTREME_VALUES)))]
                changed[start : start + len(extreme)] = extreme
            case 4:
                del changed[start : start + int(rng.integers(1, 600))]
            case 5:
                piece = changed[start : start + int(rng.integers(1, 600))]
                other = int(rng.integers(size))
                changed[other:other] = piece
            case 6:
                changed[start:start] = rng.bytes(length)
            case _:
                if rng.random() < 0.3:
                    del changed[start:]
    return bytes(changed)


def mutation(name: str, reader: Reader, seed: int, number: int) -> bytes:
    """Return mutation `number` of a reader's valid files."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    return mutated(reader.valid[number % len(reader.valid)], rng)


def fuzz(
    name: str, reader: Reader, seed: int, numbers: Sequence[int], scratch: Path, report_progress: Callable[[int], None]
) -> Tally:
    """Read mutations and count the outcomes; `report_progress` is called with the number of each before it is read."""
    tally, path = Tally(), scratch / f"{name}.bin"
    signal.signal(signal.SIGALRM, _raise_timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydicom, about damaged files
        for number in numbers:
            report_progress(number)
            path.write_bytes(mutation(name, reader, seed, number))
            started = time.perf_counter()
            signal.alarm(SECONDS)
            try:
                reader.read(path)
                tally.read += 1
            except MedvlError as error:
                tally.rejected[type(error).__name__] += 1
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                text = f"mutation {number}: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
                tally.failures.append(text)
            finally:
                signal.alarm(0)
            tally.slowest = max(tally.slowest, time.perf_counter() - started)
    return tally


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"over {SECONDS} s")


def _dicom(scratch: Path) -> Reader:
    import pydicom

    from medvl.data import read_dicom

    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    return Reader(
        lambda path: read_dicom(path, frame=0), [(folder / f"{name}.dcm").read_bytes() for name in PYDICOM_FILES]
    )


def _image(scratch: Path) -> Reader:
    from medvl.data import decode_image, encode_jpeg, encode_png

    grey = np.random.default_rng(0).integers(0, 256, (48, 40), dtype=np.uint8)
    color = np.repeat(grey[:, :, None], 3, axis=2)
    valid = [encode_jpeg(grey), encode_jpeg(color), encode_png(grey), encode_png(grey.astype(np.uint16) * 257)]
    return Reader(lambda path: decode_image(path.read_bytes(), color=True, max_pixels=1 << 20), valid)


def _report(scratch: Path) -> Reader:
    from medvl import phantom
    from medvl.data import read_report

    phantom.write_mimic_cxr(scratch / "corpus", patients=3, size=64, workers=1)
    valid = [path.read_bytes() for path in sorted((scratch / "corpus").rglob("s*.txt"))]
    return Reader(lambda path: read_report(path).sentences(), valid)


def _shards(scratch: Path) -> Path:
    """Write a folder with one shard of four samples."""
    from medvl.data import Deidentifier, Plan, Record, ShardOptions, ShardRun, encode_png, write_shards
    from medvl.schema import Sample

    folder = Path(tempfile.mkdtemp(dir=scratch))
    records = []
    for number in range(4):
        image = folder / f"{number}.png"
        image.write_bytes(encode_png(np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8)))
        sample = Sample(
            key=f"k{number}",
            corpus="lab",
            split="train",
            patient=f"p{number}",
            study=f"s{number}",
            image=image,
            sections={"findings": "Clear lungs. No effusion."},
            labels={"Edema": 1},
        )
        records.append(Record(sample))
    plan = Plan("lab", records, ("Edema",), Counter())
    run = ShardRun(out=folder / "out", workers=1)
    write_shards(plan, Deidentifier(bytes(32)), run, ShardOptions(short_side=16, image_format="png"))
    return folder / "out" / "train"


def _read_all(folder: Path) -> None:
    """Read every sample by the index, as the loader does, skipping unreadable samples."""
    from medvl.data import ShardSource

    source = ShardSource(folder)
    for position in range(min(len(source), 100)):
        try:
            source.sample(position)
            source.pixels(position)
        except MedvlError:
            continue


def _tar(scratch: Path) -> Reader:
    """Return a reader of tars as a stream, with verification under correct hashes, and by the index."""
    from medvl.common.files import sha256
    from medvl.data import read_samples, sample_from_json, verify_folder

    folder = _shards(scratch)
    tar = next(folder.glob("*.tar"))
    manifest = json.loads((folder / "manifest.json").read_text())

    def read(path: Path) -> None:
        shutil.copyfile(path, tar)
        manifest["shards"][0] |= {"sha256": sha256(tar), "bytes": tar.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        verify_folder(folder, decode=True)
        _read_all(folder)
        for raw in read_samples(io.BytesIO(path.read_bytes()), "it"):
            try:
                sample_from_json(raw.get("json", b""))
            except ValueError:  # documented; loaders skip the sample
                continue

    return Reader(read, [tar.read_bytes()])


def _index(scratch: Path) -> Reader:
    folder = _shards(scratch)
    index = next(folder.glob("*.index"))

    def read(path: Path) -> None:
        shutil.copyfile(path, index)
        _read_all(folder)

    return Reader(read, [index.read_bytes()])


def _manifest(scratch: Path) -> Reader:
    from medvl.data import check_against, verify_folder

    folder = _shards(scratch)
    manifest = folder / "manifest.json"

    def read(path: Path) -> None:
        shutil.copyfile(path, manifest)
        verified = verify_folder(folder)
        check_against(verified.manifest, dataclasses.replace(verified.manifest, patients=()))
        assert verified.manifest.fingerprint
        _read_all(folder)

    return Reader(read, [manifest.read_bytes()])


def _pickle(scratch: Path) -> Reader:
    """Return a reader of other projects' checkpoints, as in `medvl import`."""
    import torch

    from medvl.export.importers.torch_reader import read_checkpoint

    content = {
        "state_dict": {"conv.weight": torch.arange(24.0).view(2, 3, 4), "half": torch.ones(5).half()},
        "hyper_parameters": argparse.Namespace(lr=1e-4, path=Path("data")),
        "epoch": 3,
    }
    valid = []
    for zipped, saved in ((True, content), (False, content["state_dict"])):
        torch.save(saved, scratch / "valid.pt", _use_new_zipfile_serialization=zipped)
        valid.append((scratch / "valid.pt").read_bytes())
    return Reader(lambda path: read_checkpoint(path), valid)


def _table(scratch: Path) -> Reader:
    """Return a reader of a table in JSON lines, as in `medvl shards table`."""
    from medvl.data import Deidentifier, sample_to_json
    from medvl.data.corpora import table

    columns = table.TableColumns(
        image_column="image", patient_column="patient", text_column=("text",), tags_column=("tags",), age_column="age"
    )
    rows = [{"image": f"{n}.png", "patient": n, "text": "édema", "tags": ["a", "b"], "age": 40} for n in range(4)]

    def read(path: Path) -> None:
        shutil.copyfile(path, scratch / "t.jsonl")
        for sample in table.plan(scratch / "t.jsonl", columns, Deidentifier(bytes(32))).iter_samples():
            sample_to_json(sample)

    return Reader(read, ["".join(json.dumps(row) + "\n" for row in rows).encode()])


def _plain_pickle(scratch: Path) -> Reader:
    """Return a reader of questions that are published as a pickle."""
    from medvl.common.untrusted import ANYWHERE
    from medvl.data.corpora.common.pickle_reader import read_plain_pickle

    valid = b"\x80\x03]q\0(}q\1(X\2\0\0\0idq\2X\1\0\0\0aX\1\0\0\0nK\7u}q\3(h\2NX\1\0\0\0sG?\xe0\0\0\0\0\0\0ue."
    return Reader(lambda path: repr(read_plain_pickle(path, ANYWHERE)), [valid])


def _safetensors(scratch: Path) -> Reader:
    import safetensors.torch
    import torch

    from medvl.encoders import read_tensors

    valid = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 3).half()})

    def read(path: Path) -> None:
        shutil.copyfile(path, path.with_suffix(".safetensors"))
        read_tensors(path.with_suffix(".safetensors"))

    return Reader(read, [valid])


def _serve(scratch: Path) -> Reader:
    """Return a sender of forms to the server of `medvl serve`, with a model of random weights."""
    from starlette.testclient import TestClient

    from medvl import create_model
    from medvl.data import encode_png, train_wordpiece
    from medvl.eval import load_prompts
    from medvl.models import ConVIRTConfig
    from medvl.serve import ServeConfig, ServedModel, create_app

    prompts = load_prompts("chexpert_pairs")
    config = ConVIRTConfig(image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=32, frozen_text_layers=0)
    model = create_model(config, tokenizer=train_wordpiece(prompts.texts(), vocab_size=200)).eval()
    app = create_app([ServedModel("tiny", model, prompts, None)], None, ServeConfig(requests_per_minute=1_000_000))
    client = TestClient(app, base_url="http://localhost")
    grey = np.random.default_rng(0).integers(0, 256, (48, 40), dtype=np.uint8)
    fields = {"frame": "0", "center": "40", "width": "400", "text": "edema"}
    form = {name: (None, value.encode()) for name, value in fields.items()}
    valid = []
    for image in (encode_png(grey), _dicom(scratch).valid[0]):
        headers = {"content-type": "multipart/form-data; boundary=0123456789abcdef"}
        body = client.build_request("POST", "/", files={"image": ("image", image), **form}, headers=headers).read()
        valid.append(headers["content-type"].encode() + b"\n" + body)

    def read(path: Path) -> None:
        kind, _, body = path.read_bytes().partition(b"\n")
        for route in ("view", "scores"):
            response = client.post(f"/api/{route}", content=body, headers={b"content-type": kind})
            if response.status_code >= 500:
                raise RuntimeError(f"status {response.status_code}")
            if response.status_code >= 400:
                raise MedvlError(f"status {response.status_code}")

    return Reader(read, valid)


READERS: dict[str, Callable[[Path], Reader]] = {
    "dicom": _dicom,
    "image": _image,
    "report": _report,
    "table": _table,
    "tar": _tar,
    "index": _index,
    "manifest": _manifest,
    "pickle": _pickle,
    "plain_pickle": _plain_pickle,
    "safetensors": _safetensors,
    "serve": _serve,
}
"""Name -> function that builds a reader in a folder of its own."""


def _in_process(name: str, seed: int, count: int, place: Any, results: Any) -> None:
    def report_progress(number: int) -> None:
        place.value = number

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders in Rust print caught panics
    with tempfile.TemporaryDirectory() as folder:
        reader = READERS[name](Path(folder))
        results.put(fuzz(name, reader, seed, range(count), Path(folder), report_progress))


def survey(name: str, seed: int, count: int) -> Tally:
    """Fuzz a reader in a process of its own; its abnormal exit is a failure."""
    context = multiprocessing.get_context("spawn")
    place, results = context.Value("q", -1), context.SimpleQueue()
    process = context.Process(target=_in_process, args=(name, seed, count, place, results))
    process.start()
    process.join()
    if process.exitcode == 0:
        return results.get()
    return Tally(failures=[f"mutation {place.value}: the process ended with {process.exitcode}"])


def main() -> None:
    """Run the fuzzer and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], help="default: all")
    parser.add_argument("--count", type=int, default=10_000, help="mutations per reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this mutation of one reader, with its traceback")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            (name,) = options.readers
            reader = READERS[name](Path(folder))
            (Path(folder) / "one.bin").write_bytes(mutation(name, reader, options.seed, options.only))
            print(reader.read(Path(folder) / "one.bin"))
        return
    print("| reader | mutations | read | rejected | failures | slowest |\n|---|---|---|---|---|---|")
    failures: dict[str, list[str]] = {}
    for name in options.readers or READERS:
        tally = survey(name, options.seed, options.count)
        rejected = ", ".join(f"{count} {kind}" for kind, count in tally.rejected.most_common())
        cells = (name, options.count, tally.read, rejected or "–", len(tally.failures), f"{tally.slowest:.2f} s")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failures[name] = tally.failures
    for name, texts in failures.items():
        for text in texts[:20]:
            print(f"{name}: {text}")
    sys.exit(1 if any(failures.values()) else 0)


if __name__ == "__main__":
    main()
