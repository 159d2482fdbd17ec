"""What `scripts/fuzz.py` fuzzes: readers, each with valid files."""

import argparse
import dataclasses
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.data import RowCounts
from medvl.errors import MedvlError

# The readers under test are internals, imported in the functions below.

PYDICOM_FILES = (
    "CT_small",
    "MR_small_implicit",
    "MR_small_RLE",
    "MR_small_jp2klossless",
    "MR_small_jpeg_ls_lossless",
    "SC_rgb_jpeg_gdcm",
    "SC_rgb_small_odd_jpeg",
    "image_dfl",
    "liver_1frame",
    "ExplVR_BigEnd",
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reading function with valid files."""

    read: Callable[[Path], Any]
    """Function that reads the file at a path."""
    valid: Sequence[bytes]


def _dicom(scratch: Path) -> Reader:
    import pydicom

    from medvl.data import read_dicom

    folder = Path(pydicom.__file__).parent / "data" / "test_files"
    return Reader(
        lambda path: read_dicom(path, frame=0),
        [(folder / f"{name}.dcm").read_bytes() for name in PYDICOM_FILES],
    )


def _image(scratch: Path) -> Reader:
    from medvl.data import decode_image, encode_jpeg, encode_png

    grey = np.random.default_rng(0).integers(0, 256, (48, 40), dtype=np.uint8)
    color = np.repeat(grey[:, :, None], 3, axis=2)
    valid = [
        encode_jpeg(grey),
        encode_jpeg(color),
        encode_png(grey),
        encode_png(grey.astype(np.uint16) * 257),
    ]
    return Reader(
        lambda path: decode_image(path.read_bytes(), color=True, max_pixels=1 << 20), valid
    )


def _report(scratch: Path) -> Reader:
    from medvl import phantom
    from medvl.data import read_report

    phantom.write_mimic_cxr(scratch / "corpus", patients=3, size=64, workers=1)
    valid = [path.read_bytes() for path in sorted((scratch / "corpus").rglob("s*.txt"))]
    return Reader(lambda path: read_report(path).sentences(), valid)


def _shards(scratch: Path) -> Path:
    """Write a folder with one shard of four samples."""
    from medvl.data import (
        Deidentifier,
        Plan,
        Record,
        ShardOptions,
        ShardRun,
        encode_png,
        write_shards,
    )
    from medvl.schema import Sample

    folder = Path(tempfile.mkdtemp(dir=scratch))
    records = []
    for number in range(4):
        image = folder / f"{number}.png"
        image.write_bytes(
            encode_png(np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8))
        )
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
    plan = Plan("lab", records, ("Edema",), RowCounts())
    run = ShardRun(out=folder / "out", workers=1)
    write_shards(
        plan, Deidentifier(bytes(32)), run, ShardOptions(short_side=16, image_format="png")
    )
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
    """Return a reader of tars as a stream, with verification under correct hashes, and by the
    index.
    """
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

    from medvl.encoders.weight_files import read_weight_file

    content = {
        "state_dict": {
            "conv.weight": torch.arange(24.0).view(2, 3, 4),
            "half": torch.ones(5).half(),
        },
        "hyper_parameters": argparse.Namespace(lr=1e-4, path=Path("data")),
        "epoch": 3,
    }
    valid = []
    for zipped, saved in ((True, content), (False, content["state_dict"])):
        torch.save(saved, scratch / "valid.pt", _use_new_zipfile_serialization=zipped)
        valid.append((scratch / "valid.pt").read_bytes())
    return Reader(lambda path: read_weight_file(path), valid)


def _table(scratch: Path) -> Reader:
    """Return a reader of a table in JSON lines, as in `medvl shards table`."""
    from medvl.data import Deidentifier, sample_to_json
    from medvl.data.corpora import table

    columns = table.TableColumns(
        image_column="image",
        patient_column="patient",
        text_column=("text",),
        tags_column=("tags",),
        age_column="age",
    )
    rows = [
        {"image": f"{n}.png", "patient": n, "text": "édema", "tags": ["a", "b"], "age": 40}
        for n in range(4)
    ]

    def read(path: Path) -> None:
        shutil.copyfile(path, scratch / "t.jsonl")
        for sample in (
            table.Table(table=scratch / "t.jsonl", columns=columns)
            .plan(Deidentifier(bytes(32)))
            .iter_samples()
        ):
            sample_to_json(sample)

    return Reader(read, ["".join(json.dumps(row) + "\n" for row in rows).encode()])


def _plain_pickle(scratch: Path) -> Reader:
    """Return a reader of questions that are published as a pickle."""
    from medvl.common.untrusted import ANYWHERE
    from medvl.data.corpora.figures.m3ae_arrow import read_plain_pickle

    valid = (
        b"\x80\x03]q\0(}q\1(X\2\0\0\0idq\2X\1\0\0\0aX\1\0\0\0nK\7u}q\3"
        b"(h\2NX\1\0\0\0sG?\xe0\0\0\0\0\0\0ue."
    )
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
    config = ConVIRTConfig(
        image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=32, frozen_text_layers=0
    )
    model = create_model(config, tokenizer=train_wordpiece(prompts.texts(), vocab_size=200)).eval()
    app = create_app(
        [ServedModel("tiny", model, prompts, None)],
        None,
        ServeConfig(requests_per_minute=1_000_000),
    )
    client = TestClient(app, base_url="http://localhost")
    grey = np.random.default_rng(0).integers(0, 256, (48, 40), dtype=np.uint8)
    fields = {"frame": "0", "center": "40", "width": "400", "text": "edema"}
    form = {name: (None, value.encode()) for name, value in fields.items()}
    valid = []
    for image in (encode_png(grey), _dicom(scratch).valid[0]):
        headers = {"content-type": "multipart/form-data; boundary=0123456789abcdef"}
        body = client.build_request(
            "POST", "/", files={"image": ("image", image), **form}, headers=headers
        ).read()
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


LIMIT = 1 << 16
"""Voxels and bytes of the volumes below."""


def _hounsfield() -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, (4, 6, 5)).astype(np.int16)


def _nifti(scratch: Path) -> Reader:
    import gzip

    import nibabel

    from medvl.data import VolumeLimits, read_nifti

    limits = VolumeLimits(file_bytes=1 << 20, voxels=LIMIT)
    affine = np.diag([-0.8, -0.8, 2.0, 1.0])
    plain = nibabel.Nifti1Image(_hounsfield().T, affine).to_bytes()
    scaled = nibabel.Nifti1Image(_hounsfield().T.astype(np.uint8), affine)
    scaled.header.set_slope_inter(2.0, -100.0)
    second = nibabel.Nifti2Image(_hounsfield().T.astype(np.float32), affine).to_bytes()
    valid = [plain, gzip.compress(plain, mtime=0), scaled.to_bytes(), second]
    return Reader(lambda path: read_nifti(path, limits=limits), valid)


def _npz(scratch: Path) -> Reader:
    from medvl.data import VolumeLimits
    from medvl.data.volumes.npz import read_npz

    limits = VolumeLimits(file_bytes=1 << 20, voxels=LIMIT)
    valid = []
    for save in (np.savez, np.savez_compressed):
        content = io.BytesIO()
        save(content, ct=_hounsfield())
        valid.append(content.getvalue())
    places: dict[str, Any] = {"orientation": "IPL", "spacing": (2.0, 0.8, 0.8)}
    return Reader(lambda path: read_npz(path, "ct", limits=limits, **places), valid)


def _volume(scratch: Path) -> Reader:
    """Return a reader of the members of shards that hold volumes."""
    from medvl.data import VolumeLimits
    from medvl.data.volumes.codec import decode_volume, encode_volume

    limits = VolumeLimits(voxels=LIMIT)
    valid = [encode_volume(_hounsfield(), chunk=chunk) for chunk in (1, 3, 16)]

    def read(path: Path) -> None:
        decode_volume(path.read_bytes(), limits=limits)
        decode_volume(path.read_bytes(), slice(1, 3), limits=limits)

    return Reader(read, valid)


def _series(scratch: Path) -> Reader:
    """Return a reader of a DICOM series of which one slice is mutated, also from memory."""
    from medvl import phantom
    from medvl.data import VolumeLimits, read_dicom_series
    from medvl.data.volumes.dicom_series import decode_dicom_series

    limits = VolumeLimits(file_bytes=1 << 20, files=8, voxels=LIMIT)
    phantom.write_volumes(scratch / "ct", patients=1, shape=(4, 16, 16), dicom=True, seed=0)
    series = next(path for path in sorted((scratch / "ct" / "dicom").iterdir()))
    slices = sorted(series.iterdir())
    mutated = slices[1]
    valid = [mutated.read_bytes()]

    def read(path: Path) -> None:
        shutil.copyfile(path, mutated)
        decode_dicom_series([each.read_bytes() for each in slices], limits=limits)
        read_dicom_series(series, limits=limits)

    return Reader(read, valid)


def _parquet(scratch: Path) -> Reader:
    """Return a reader of the tables that corpora of questions are published as."""
    import pyarrow
    import pyarrow.parquet

    from medvl.common.untrusted import ANYWHERE
    from medvl.data.corpora.common.formats import read_parquet
    from medvl.data.corpora.questions.cxr_qba import _COLUMNS, _LIMITS

    valid = []
    for codec in ("snappy", "none"):
        rows = {name: [f"{name} {number}" for number in range(8)] for name in _COLUMNS}
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(rows), content, compression=codec)
        valid.append(content.getvalue())
    return Reader(lambda path: list(read_parquet(path, _COLUMNS, ANYWHERE, _LIMITS)), valid)


def _zip(scratch: Path) -> Reader:
    """Return a reader of the archive of CXR-QBA."""
    import zipfile

    from medvl.common.untrusted import ANYWHERE
    from medvl.data.corpora.questions.cxr_qba import _read_archive

    names = [f"p10/s{number}.qa.json" for number in range(3)]
    text = json.dumps({"questions": [{"question": "Is there edema?", "answers": []}]})
    valid = []
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", kind) as archive:
            for name in names:
                archive.writestr(zipfile.ZipInfo(name), text, kind)
        valid.append(content.getvalue())
    chosen: dict[str, Any] = {f"s{number}": {} for number in range(3)}
    return Reader(lambda path: _read_archive(path, chosen, ANYWHERE), valid)


def _predictions(scratch: Path) -> Reader:
    """Return a reader of the answers of other harnesses, in each of their forms."""
    from medvl.data.annotations import Question
    from medvl.eval.vqa.outside import read_answers

    questions = [
        Question(id=f"q{n}", question="Is it?", answer="yes", answer_type="closed", split="test")
        for n in range(3)
    ]
    own = [{"id": each.id, "answer": "yes", "score": 0.5} for each in questions]
    other = [{"doc_id": n, "filtered_resps": ["yes"]} for n in range(3)]
    kit = [{"question_id": each.id, "response": "The answer is yes."} for each in questions]
    lines = ["".join(f"{json.dumps(row)}\n" for row in rows).encode() for rows in (own, other)]

    def read(path: Path) -> None:
        suffix = ".json" if path.read_bytes()[:1] == b"[" else ".jsonl"
        shutil.copyfile(path, scratch / f"answers{suffix}")
        read_answers(scratch / f"answers{suffix}", questions)

    return Reader(read, [*lines, json.dumps(kit).encode()])


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
    "nifti": _nifti,
    "npz": _npz,
    "volume": _volume,
    "series": _series,
    "parquet": _parquet,
    "zip": _zip,
    "predictions": _predictions,
}
"""Name -> function that builds a reader in a folder of its own."""
