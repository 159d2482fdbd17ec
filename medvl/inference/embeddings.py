"""Embeddings of images in a Parquet file: one row for each image of shards, folders or files.

Columns are `key`, `patient`, `study`, `split`, `view`, `label/NAME` (1, 0, -1 or null), and
`embedding`, a list of float32 of fixed size; with patches also `patches`, a flat list of P * D
numbers. Rows of image files have their path as the key; the other columns of these are null. The
metadata of the schema names the checkpoint, the data and the computation:

    medvl.checkpoint   sha256 of the weights
    medvl.data         fingerprint of the shards, or of the content of the files
    medvl.vector       "encode_image" (L2-normalised) or "pooled"
    medvl.patches      shape and grid of `patches`, or null

Batches begin at multiples of the batch size, counted in the order of the data. Rows are written in
parts to `FILE.parts`, each at once, and joined at the end. An interrupted command continues at the
first row that no part has, with the same batches, so that the file has the same bytes. The last
bits of a vector depend on the batch size and the device, which the metadata names, and on the
number of threads.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
from torch import Tensor
from tqdm import tqdm

from medvl.common.files import RunLock, discard, new_file, subfolder, sweep, write_json
from medvl.common.untrusted import ANYWHERE, parse_json, read_json
from medvl.data.loading.sources import ConcatSource, Subset
from medvl.data.shards.format import MANIFEST
from medvl.data.shards.source import ShardSource
from medvl.data.storage.webdataset_tars import is_tar_pattern
from medvl.data.transforms.image import EvalTransform
from medvl.data.volumes.transform import embedded_parts
from medvl.errors import ConfigError, EvaluationError, ImageError, ShardError
from medvl.eval.core.open import open_for_evaluation, open_source, resolve_device
from medvl.eval.core.results import checkpoint_sha256
from medvl.inference.folder import find_images, find_volumes, image_name, read_files
from medvl.inference.models import batches, open_model
from medvl.inference.volumes import reads_volumes
from medvl.models.base import System, evaluating
from medvl.models.downstream.classifier import pooled_encoder_of
from medvl.models.dual_encoders.bases.base import DualEncoder

FORMAT = 1
"""Version of the columns and the metadata."""
_PREFIX = "medvl."
_SETTINGS = "settings.json"
_PART_ROWS = 1024
_PART_BYTES = 32 << 20
"""A part ends with the batch that reaches either."""
_READERS = 4
_BLOCK = 1 << 20  # bytes of a file that are hashed at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingFile:
    """A written file of embeddings."""

    path: Path
    rows: int
    dim: int
    """Numbers of an embedding."""
    vector: str
    """"encode_image" or "pooled"."""
    skipped: Mapping[str, int]
    """Reason -> number of images without a row."""


def embed(
    checkpoint: Path | str,
    data: Sequence[Path | str],
    out: Path,
    *,
    pooled: bool = False,
    patches: bool = False,
    batch: int = 16,
    workers: int = 2,
    frame: int | None = None,
    modality: Sequence[str] = (),
    device: str = "auto",
    replace: bool = False,
    progress: bool | None = None,
) -> EmbeddingFile:
    """Write the embeddings of images to a Parquet file; a second call continues an interrupted one.

    An embedding is `model.encode_image` of `medvl.load(checkpoint)`, of shape (E,), for a
    dual-encoder, and the pooled vector (D,) of the image encoder for other systems. Both are
    bit for bit those of the model on the same batch of images. Memory does not grow with the data.

    Args:
        checkpoint: what `medvl.load` takes.
        data: folders of shards, folders with such folders (one for each split), or webdataset
            tars; or image files and folders with them, as `medvl.inference.folder.find_images`
            finds them; for a model of volumes, NIfTI files and folders of DICOM series.
        out: file that ends in .parquet.
        pooled: write the pooled vector for dual-encoders too, as `medvl eval probe` reads it.
        patches: write the patches of the image encoder, (P, D), too.
        batch: images of a batch; more are faster on a GPU and need more memory.
        workers: loader processes for shards.
        frame: frame of multi-frame DICOM files, from 0; without it they are skipped.
        modality: modalities of DICOM files to accept; empty for all.
        device: auto, cpu or cuda.
        replace: replace a file of another checkpoint, of other data or of other options.
        progress: True for a progress bar, None for one on a terminal.

    Raises:
        ConfigError: `out` has embeddings of another checkpoint, other data or other options; the
            model reads no pixels; no image has a row.
        CheckpointError, ShardError, ImageError: an input is missing or damaged.
        BudgetError: too many samples of shards are unreadable. Unreadable files are skipped.
        EvaluationError: a vector is not finite.
    """
    if batch < 1:
        message = f"expected batch of 1 or more, got {batch}"
        raise ConfigError(message, "out_of_range", field="batch")
    _check_out(out)
    model = open_model(checkpoint).to(resolve_device(device)).eval()
    reads_pooled = pooled or not isinstance(model, DualEncoder)
    if reads_pooled or patches:
        pooled_encoder_of(model)  # raises for a model without one
    images = _open(data, model, batch=batch, workers=workers, frame=frame, modality=modality)
    identity = {
        "format": FORMAT,
        "checkpoint": checkpoint_sha256(checkpoint),
        "data": images.fingerprint,
        "vector": "pooled" if reads_pooled else "encode_image",
        "with_patches": patches,
        "batch": batch,
        "device": model.device.type,
        **images.settings,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = out.with_name(f"{out.name}.parts")
    finished = _finished(out, identity, replace=replace)
    if finished is not None:
        if parts.is_dir():  # killed between the last two steps
            discard(parts)
        return finished
    subfolder(out.parent, parts.name)
    with RunLock(parts, error=ConfigError, field="out"):
        sweep(parts)
        _check_parts(parts, identity, replace=replace)
        _write_parts(parts, images, _Encoder(model, reads_pooled, patches), progress=progress)
        result = _join(parts, out, identity, len(images))
    discard(parts)
    return result


# What is embedded.


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Columns of an image, beside its vectors."""

    key: str
    patient: str | None = None
    study: str | None = None
    split: str | None = None
    view: str | None = None
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Images at the positions from the end of the last batch to `stop`, without skipped ones."""

    stop: int
    rows: Sequence[_Row]
    images: tuple[Tensor, ...] | None
    """`Batch.embedded`; None where all images were skipped."""
    skipped: Mapping[str, int]


class _Images(Protocol):
    """Images of shards, or of files."""

    fingerprint: str
    label_names: tuple[str, ...]
    settings: Mapping[str, Any]
    """Options that decide which images have a row."""

    def __len__(self) -> int: ...

    def batches(self, start: int) -> Iterator[_Batch]:
        """Yield the images from a position, which is a multiple of the batch size, to the end."""


class _ShardImages:
    """Images of shards, in their order."""

    settings: Mapping[str, Any] = {}

    def __init__(
        self, folders: Sequence[Path | str], transform: EvalTransform, batch: int, workers: int
    ) -> None:
        sources = [open_source(str(folder), synthetic=True) for folder in folders]
        self._source: ShardSource | ConcatSource = (
            sources[0] if len(sources) == 1 else ConcatSource(sources)
        )
        self.fingerprint = self._source.fingerprint
        self.label_names = tuple(self._source.label_names)
        self._transform = transform
        self._batch = batch
        self._workers = workers

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, start: int) -> Iterator[_Batch]:
        """See `_Images`."""
        positions = np.arange(start, len(self))
        if not len(positions):
            return
        loader = open_for_evaluation(
            Subset(self._source, positions),
            self._transform,
            batch=self._batch,
            workers=self._workers,
        )
        before = Counter[str]()
        stop = start
        for batch in loader:
            first = start + loader.last_batch * self._batch
            stop = min(first + self._batch, len(self))
            skipped = Counter(loader.skipped)
            rows = self._rows(batch.keys, first, stop)
            yield _Batch(stop, rows, batch.embedded, skipped - before)
            before = skipped
        if stop < len(self):  # batches at the end without any image
            yield _Batch(len(self), [], None, Counter(loader.skipped) - before)

    def _rows(self, keys: Sequence[str], first: int, stop: int) -> list[_Row]:
        """Return the rows of a batch, which holds the readable samples of some positions."""
        samples = {}
        for position in range(first, stop):
            with contextlib.suppress(ShardError):  # the loader has counted it
                sample = self._source.sample(position)
                samples[sample.key] = sample
        return [
            _Row(one.key, one.patient, one.study, one.split, one.view, one.labels)
            for one in map(samples.__getitem__, keys)
        ]


class _FileImages:
    """Image files, in the order of `find_images`."""

    label_names: tuple[str, ...] = ()

    def __init__(
        self,
        paths: Sequence[Path | str],
        model: System,
        batch: int,
        frame: int | None,
        modality: Sequence[str],
    ) -> None:
        self._paths = find_volumes(paths) if reads_volumes(model) else find_images(paths)
        self._model = model
        self._batch = batch
        self._frame = frame
        self._modality = tuple(name.strip().upper() for name in modality)
        self.settings: Mapping[str, Any] = {"frame": frame, "modality": sorted(self._modality)}
        with ThreadPoolExecutor(_READERS) as pool:
            digests = list(pool.map(_digest, self._paths))
        lines = [
            f"{image_name(path)} {digest}"
            for path, digest in zip(self._paths, digests, strict=True)
        ]
        self.fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._paths)

    def batches(self, start: int) -> Iterator[_Batch]:
        """See `_Images`."""
        for first in range(start, len(self), self._batch):
            paths = self._paths[first : first + self._batch]
            pixels = read_files(self._model, paths, self._frame, self._modality)
            readable = [one for one in pixels if not isinstance(one, str)]
            rows = [
                _Row(image_name(path))
                for path, one in zip(paths, pixels, strict=True)
                if not isinstance(one, str)
            ]
            images = None
            if readable:
                images = embedded_parts(next(batches(self._model, readable, len(readable))))
            skipped = Counter(one for one in pixels if isinstance(one, str))
            yield _Batch(first + len(paths), rows, images, skipped)


def _digest(path: Path) -> str:
    """Return the hash of a file, or of the files of a series."""
    if path.is_dir():
        digests = [_digest(file) for file in sorted(path.rglob("*")) if file.is_file()]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()
    try:
        with ANYWHERE.open(path, ImageError) as file:  # sha256 would wait for a pipe's writer
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
            return digest.hexdigest()
    except (OSError, ImageError):  # skipped where it is read
        return "unreadable"


def _open(
    data: Sequence[Path | str],
    model: System,
    *,
    batch: int,
    workers: int,
    frame: int | None,
    modality: Sequence[str],
) -> _Images:
    """Open shards or image files. Raises ConfigError for both at once, or none."""
    if not data:
        message = "expected shards or images, got none; give --data"
        raise ConfigError(message, "missing", field="data")
    shards = {path: _shard_folders(path) for path in data}
    if not any(shards.values()):
        return _FileImages(data, model, batch, frame, modality)
    if not all(shards.values()):
        others = ", ".join(str(path) for path, folders in shards.items() if not folders)
        message = f"expected shards or images, got shards and {others}; write two files"
        raise ConfigError(message, "conflict", field="data")
    folders = [folder for each in shards.values() for folder in each]
    return _ShardImages(folders, model.transform, batch, workers)


def _shard_folders(data: Path | str) -> list[Path | str]:
    """Return the folders of shards that a path names: itself, or one for each split; none for
    images.
    """
    if "://" in str(data) or is_tar_pattern(str(data)):
        return [data]
    folder = Path(data)
    if (folder / MANIFEST).is_file():
        return [folder]
    return [path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))]


# Vectors and parts.


class _Encoder:
    """Vectors of batches of images.

    Attributes:
        patches: shape and grid of the patches, once known; None without patches.
    """

    def __init__(self, model: System, pooled: bool, with_patches: bool) -> None:
        self._model = model
        self._pooled = pooled
        self._with_patches = with_patches
        self.patches: dict[str, Any] | None = None

    def __call__(self, images: tuple[Tensor, ...]) -> dict[str, np.ndarray]:
        """Return float32 rows by the name of their column."""
        images = tuple(each.to(self._model.device) for each in images)
        vectors: dict[str, Tensor] = {}
        with evaluating(self._model):
            if self._pooled or self._with_patches:
                features = pooled_encoder_of(self._model)(images[0])
                vectors["embedding"] = features.pooled_BD
            if not self._pooled:
                assert isinstance(self._model, DualEncoder)
                vectors["embedding"] = self._model.encode_image(*images)
        if self._with_patches:
            grid = None if features.grid is None else list(features.grid)
            self.patches = {"shape": list(features.patches_BPD.shape[1:]), "grid": grid}
            vectors["patches"] = features.patches_BPD.flatten(1)
        for name, vector_BE in vectors.items():
            if not vector_BE.isfinite().all():
                message = f"{name} of an image is not finite: check the model's weights"
                raise EvaluationError(message, "nonfinite")
        return {name: vector.float().cpu().numpy() for name, vector in vectors.items()}


def _write_parts(parts: Path, images: _Images, encode: _Encoder, *, progress: bool | None) -> None:
    """Write the parts that are missing. Parts are complete from the first to the last."""
    written = _parts(parts)
    start = _facts(written[-1])["stop"] if written else 0
    number = len(written)
    tables: list[pyarrow.Table] = []
    skipped = Counter[str]()
    first = start
    size = 0
    hidden = None if progress is None else not progress
    with tqdm(total=len(images), initial=start, unit="img", disable=hidden) as bar:
        for batch in images.batches(start):
            skipped.update(batch.skipped)
            if batch.images is not None:
                vectors = encode(batch.images)
                tables.append(_table(batch.rows, images.label_names, vectors))
                size += sum(vector.nbytes for vector in vectors.values())
            full = batch.stop - first >= _PART_ROWS or size >= _PART_BYTES
            if full or batch.stop == len(images):
                facts = {"stop": batch.stop, "skipped": skipped, "patches": encode.patches}
                _write_part(parts / f"part-{number:06d}.parquet", tables, facts)
                number += 1
                tables = []
                skipped = Counter()
                first = batch.stop
                size = 0
            bar.update(batch.stop - bar.n)


def _table(
    rows: Sequence[_Row], label_names: Sequence[str], vectors: Mapping[str, np.ndarray]
) -> pyarrow.Table:
    columns: dict[str, pyarrow.Array] = {
        name: pyarrow.array([getattr(row, name) for row in rows], pyarrow.string())
        for name in ("key", "patient", "study", "split", "view")
    }
    for name in label_names:
        values = [row.labels.get(name) for row in rows]
        columns[f"label/{name}"] = pyarrow.array(values, pyarrow.int8())
    for name, vector_BE in vectors.items():
        flat = pyarrow.array(vector_BE.reshape(-1), pyarrow.float32())
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, vector_BE.shape[1])
    return pyarrow.table(columns)


def _write_part(path: Path, tables: Sequence[pyarrow.Table], facts: Mapping[str, Any]) -> None:
    table = pyarrow.concat_tables(tables) if tables else pyarrow.table({})
    with new_file(path) as file:
        pyarrow.parquet.write_table(
            table.replace_schema_metadata(_metadata(facts)), file, compression="zstd"
        )


def _check_parts(parts: Path, identity: Mapping[str, Any], *, replace: bool) -> None:
    """Write the settings of the parts. Raises ConfigError for parts of another call."""
    path = parts / _SETTINGS
    if path.is_file():
        settings = read_json(path, ConfigError)
        if settings == identity:
            return
        if not replace:
            _refuse(parts, settings, identity)
    for part in _parts(parts):
        part.unlink()
    write_json(path, dict(identity))


def _parts(parts: Path) -> list[Path]:
    return sorted(parts.glob("part-*.parquet"))


def _join(parts: Path, out: Path, identity: Mapping[str, Any], images: int) -> EmbeddingFile:
    """Write the rows of all parts to one file, a group of rows for each part, in their order."""
    facts = [_facts(path) for path in _parts(parts)]
    skipped = sum((Counter(one["skipped"]) for one in facts), Counter[str]())
    paths = [path for path in _parts(parts) if pyarrow.parquet.read_metadata(path).num_rows]
    if not paths:
        message = f"none of {images} images has a row: {dict(skipped)}; give other data"
        raise ConfigError(message, "empty", field="data")
    shapes = next((one["patches"] for one in facts if one["patches"]), None)
    metadata = _metadata({**identity, "patches": shapes, "skipped": skipped})
    schema = pyarrow.parquet.read_schema(paths[0]).with_metadata(metadata)
    with (
        new_file(out) as file,
        pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for path in paths:
            table = pyarrow.parquet.read_table(path).replace_schema_metadata(metadata)
            writer.write_table(table, row_group_size=len(table))
    return _described(out)


# Metadata, and what must not be mixed.


def _metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a schema: texts as they are, other values as JSON."""
    return {
        f"{_PREFIX}{name}": value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in values.items()
    }


def _facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a file of medvl; empty for another Parquet file.

    Raises ConfigError for a file that is no Parquet file.
    """
    try:
        raw = pyarrow.parquet.read_schema(path).metadata or {}
    except (pyarrow.ArrowException, OSError) as error:
        message = f"{path} is no Parquet file; remove it, or name another"
        raise ConfigError(message, "exists", field="out") from error
    values = {}
    for name, value in raw.items():
        if name.startswith(_PREFIX.encode()):
            text = value.decode()
            values[name.decode().removeprefix(_PREFIX)] = (
                text if name.decode().removeprefix(_PREFIX) in _TEXTS else parse_json(text)
            )
    return values


_TEXTS = ("checkpoint", "data", "vector", "device")
"""Metadata that is no JSON."""
_NAMES = {
    "checkpoint": "another checkpoint",
    "data": "other data",
    "vector": "another kind of vector (--pooled)",
    "with_patches": "another choice of --patches",
    "batch": "another --batch",
    "device": "another --device",
    "frame": "another --frame",
    "modality": "another --modality",
    "format": "another version of the format",
}
"""Difference of two files -> words of the error."""


def _check_out(out: Path) -> None:
    if out.suffix != ".parquet" or out.is_dir():
        message = f"expected a file that ends in .parquet, got {out}; name one"
        raise ConfigError(message, "malformed", field="out")


def _refuse(path: Path, facts: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ConfigError where the metadata of a file is not that of this call."""
    if not facts:
        message = f"{path} was not written by medvl embed; name another file"
        raise ConfigError(message, "exists", field="out")
    names = [name for name in _NAMES if facts.get(name) != identity.get(name)]
    if names:
        got = " and ".join(_NAMES[name] for name in names)
        advice = "name another file, or give --replace to write it anew"
        raise ConfigError(f"{path} has embeddings of {got}; {advice}", "exists", field=names[0])


def _finished(out: Path, identity: Mapping[str, Any], *, replace: bool) -> EmbeddingFile | None:
    """Return the file if it has all rows of this call, None if it is to be written."""
    if not out.exists() or replace:
        return None
    _refuse(out, _facts(out), identity)
    return _described(out)


def _described(out: Path) -> EmbeddingFile:
    facts = _facts(out)
    file = pyarrow.parquet.read_metadata(out)
    dim = pyarrow.parquet.read_schema(out).field("embedding").type.list_size
    return EmbeddingFile(
        path=out, rows=file.num_rows, dim=dim, vector=facts["vector"], skipped=facts["skipped"]
    )
