"""Folders of generated images, as `medvl generate` writes them.

    OUT/generation.json        the generator, its settings, its training data's fingerprints, and
                               the number of images
    OUT/train_manifests.json   manifests of all data that the generator was trained on, its
                               ancestors' included
    OUT/images.jsonl           one line for each image: file, prompt, seed, guidance, hash of its
                               pixels, ...
    OUT/images/000000.png      8-bit grey, with "synthetic", the prompt, the seed and the
                               generator's hash as PNG text

An image is written before its line, and lines are only appended, so an interrupted folder can be
continued.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image, PngImagePlugin

from medvl.common.config_io import from_dict
from medvl.common.files import RunLock, open_own, subfolder, write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.images.codecs import decode_image
from medvl.errors import ConfigError, CorpusError, ImageError

GENERATION = "generation.json"
IMAGES = "images.jsonl"
TRAIN_MANIFESTS = "train_manifests.json"
GENERATED_VERSION = 1
"""Version of these folders; folders of another version are refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """How the images of a folder were generated; equal settings and weights give the same
    images.
    """

    generator: str
    """sha256 of the generator's `model.safetensors`."""
    system: str
    """Name of the system."""
    config: Mapping[str, Any]
    """Settings of the system."""
    train_fingerprints: tuple[str, ...]
    """`Manifest.fingerprint` of all data that the generator was trained on, in the order of
    `train_manifests.json`.
    """
    sampler: str
    """"reconstruction": the real images of the prompts' samples, encoded and decoded by an
    autoencoder.
    """
    steps: int
    guidance: float
    """Scale of the classifier-free guidance; 1 is none."""
    seed: int
    """Seed of the run, from which the seed of each image is derived."""
    prompt_source: Mapping[str, Any]
    """`kind`: "shards" (with corpus, split, fingerprint, sections and views), "file" (with
    sha256) or "command".
    """
    image_size: int
    marked: bool = False
    """Whether "synthetic" is written into a corner of each image."""
    images: int
    """Number of images of the complete folder."""
    schema_version: int = GENERATED_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """One line of `images.jsonl`."""

    file: str
    """Path in the folder: `images/000000.png`, ..."""
    prompt: str
    prompt_key: str
    """Key of the sample, or number of the line, that the prompt comes from; equal for all images
    of one prompt.
    """
    seed: int
    """Seed of this image's noise."""
    guidance: float
    pixel_hash: str
    """`pixel_hash` of the image."""
    cut_tokens: int
    """Tokens of the prompt beyond the text encoder's limit, which the generator did not read."""
    source_key: str | None = None
    """Key of the corpus's sample whose text is the prompt; None for other prompts."""
    synthetic: bool = True


def pixel_hash(image_HW: np.ndarray) -> str:
    """Return the sha256 of an image's shape and uint8 pixels."""
    height, width = image_HW.shape
    return hashlib.sha256(
        f"{height}x{width}:".encode() + np.ascontiguousarray(image_HW).tobytes()
    ).hexdigest()


@dataclasses.dataclass(frozen=True)
class GeneratedImages:
    """A folder of generated images, read with `GeneratedImages.open`."""

    folder: Path
    generation: Generation
    rows: tuple[GeneratedImage, ...]
    """All images, in the order of their numbers."""

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open a complete folder.

        Raises CorpusError when it is missing, damaged, of another version, or not complete yet
        (code "truncated").
        """
        folder = Path(folder)
        generation = _read_generation(folder)
        rows = _read_rows(folder)
        ordered = tuple(rows[number] for number in sorted(rows) if number < generation.images)
        if len(ordered) != generation.images or len(rows) != len(ordered):
            message = (
                f"{folder} has {len(rows)} of {generation.images} images; run the same "
                f"`medvl generate` again"
            )
            raise CorpusError(message, "truncated")
        return cls(folder, generation, ordered)

    def __len__(self) -> int:
        return len(self.rows)

    def pixels(self, number: int) -> np.ndarray:
        """Return the image of a row, uint8 (H, W).

        Raises CorpusError when the file is missing or its pixels differ from the row's hash,
        ImageError when it is damaged.
        """
        row = self.rows[number]
        path = self.folder / row.file
        try:
            image_HW = decode_image(path.read_bytes())
        except FileNotFoundError:
            raise CorpusError(
                f"{path} does not exist; generate the images again", "not_found"
            ) from None
        except ImageError as error:
            raise error.prefixed(f"{path}: ") from error
        if pixel_hash(image_HW) != row.pixel_hash:
            raise CorpusError(
                f"the pixels of {path} differ from {IMAGES}; generate the images again", "mismatch"
            )
        return image_HW

    def train_manifests(self) -> list[dict[str, Any]]:
        """Return the JSON of all manifests that the generator was trained on (for
        `Manifest.parse`).

        Raises CorpusError when the file is missing or damaged, or has other manifests than the
        generator's.
        """
        return _read_manifests(self.folder, self.generation)


class GeneratedImagesWriter:
    """Writer of a folder of generated images; it continues an interrupted folder of the same
    settings.

    Args:
        folder: the folder, locked while it is written.
        generation: the settings. A folder of other settings is refused.
        train_manifests: JSON of the manifests of the generator's training data, in the order of
            `generation.train_fingerprints`.

    Use it as a context manager:

        with GeneratedImagesWriter(folder, generation, manifests) as writer:
            for number in writer.missing():
                writer.add(number, image_HW, prompt=..., prompt_key=..., seed=..., cut_tokens=...)
    """

    def __init__(
        self, folder: Path | str, generation: Generation, train_manifests: Sequence[Any] = ()
    ) -> None:
        self._folder = Path(folder)
        self._generation = generation
        self._manifests = train_manifests
        self._lock = RunLock(self._folder, error=CorpusError, field="out")

    def __enter__(self) -> Self:
        """Lock and prepare the folder.

        Raises CorpusError when it belongs to other settings or to something else (code "exists"),
        or is in use.
        """
        self._lock.__enter__()
        try:
            self._prepare()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lines.close()
        self._lock.__exit__(kind, error, traceback)

    def missing(self) -> list[int]:
        """Return the numbers of the images that are still to be generated, in order."""
        return [number for number in range(self._generation.images) if number not in self._done]

    def add(
        self,
        number: int,
        image_HW: np.ndarray,
        *,
        prompt: str,
        prompt_key: str,
        seed: int,
        cut_tokens: int,
        source_key: str | None = None,
    ) -> GeneratedImage:
        """Write an image, uint8 (H, W), and its line."""
        row = GeneratedImage(
            file=_file(number),
            prompt=prompt,
            prompt_key=prompt_key,
            seed=seed,
            guidance=self._generation.guidance,
            pixel_hash=pixel_hash(image_HW),
            cut_tokens=cut_tokens,
            source_key=source_key,
        )
        write_atomic(self._folder / row.file, _encode(image_HW, row, self._generation.generator))
        self._lines.write(_line(row).encode())
        self._lines.flush()
        self._done.add(number)
        return row

    def _prepare(self) -> None:
        path = self._folder / GENERATION
        if path.is_file():
            if _json(_read_generation(self._folder)) != _json(self._generation):
                message = (
                    f"{self._folder} has images of another generator or other settings; "
                    f"choose another folder"
                )
                raise CorpusError(message, "exists", field="out")
            rows = _read_rows(self._folder)
        elif [entry for entry in self._folder.iterdir() if not entry.name.startswith(".")]:
            message = f"{self._folder} has other files and no {GENERATION}; choose an empty folder"
            raise CorpusError(message, "exists", field="out")
        else:
            rows = {}
            write_atomic(
                self._folder / TRAIN_MANIFESTS,
                json.dumps(list(self._manifests), sort_keys=True) + "\n",
            )
            write_atomic(path, _json(self._generation))
        subfolder(self._folder, "images")
        rows = {number: row for number, row in rows.items() if (self._folder / row.file).is_file()}
        self._done = set(rows)
        # without a last line that was cut, or lines of lost images
        write_atomic(self._folder / IMAGES, "".join(_line(row) for row in rows.values()))
        self._lines = open_own(self._folder / IMAGES)


def _file(number: int) -> str:
    return f"images/{number:06d}.png"


def _line(row: GeneratedImage) -> str:
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n"


def _json(generation: Generation) -> str:
    return json.dumps(dataclasses.asdict(generation), indent=1, sort_keys=True) + "\n"


def _encode(image_HW: np.ndarray, row: GeneratedImage, generator: str) -> bytes:
    """Encode a PNG whose text fields state that it is synthetic, and its origin."""
    notes = PngImagePlugin.PngInfo()
    texts = {
        "synthetic": "true",
        "prompt": row.prompt,
        "seed": str(row.seed),
        "generator": generator,
    }
    for name, text in texts.items():
        notes.add_itxt(name, text) if not text.isascii() else notes.add_text(name, text)
    file = io.BytesIO()
    Image.fromarray(image_HW).save(file, format="PNG", pnginfo=notes)
    return file.getvalue()


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        message = f"{path} does not exist: {path.parent} is not a folder of `medvl generate`"
        raise CorpusError(message, "not_found") from None
    except (ValueError, OSError) as error:
        message = f"{path} cannot be read ({type(error).__name__}); generate the images again"
        raise CorpusError(message, "malformed") from error


def _read_generation(folder: Path) -> Generation:
    path = folder / GENERATION
    content = _read_json(path)
    if not isinstance(content, dict):
        raise CorpusError(f"{path}: expected a JSON object; generate the images again", "malformed")
    if content.get("schema_version") != GENERATED_VERSION:
        version = content.get("schema_version")
        message = (
            f"{path}: expected schema version {GENERATED_VERSION}, got {version}; "
            f"generate the images again"
        )
        raise CorpusError(message, "version")
    try:
        return from_dict(Generation, content)
    except ConfigError as error:
        raise CorpusError(f"{path}: {error}; generate the images again", "malformed") from error


def _read_rows(folder: Path) -> dict[int, GeneratedImage]:
    """Return the complete lines by number. Raises CorpusError for a damaged line other than the
    last.
    """
    path = folder / IMAGES
    try:
        # a killed process may leave half a line
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror})", "unreadable") from error
    return {int(row.file[7:13]): row for row in _parse_rows(path, lines)}


def _parse_rows(path: Path, lines: Sequence[bytes]) -> Iterator[GeneratedImage]:
    for number, line in enumerate(lines, start=1):
        try:
            row = from_dict(GeneratedImage, parse_json(line))
            if row.file != _file(int(row.file[7:13])) or not row.synthetic:
                raise ValueError("file or synthetic")
        except (ConfigError, ValueError) as error:
            message = f"{path}: line {number} is damaged; generate the images again"
            raise CorpusError(message, "malformed") from error
        yield row


def _read_manifests(folder: Path, generation: Generation) -> list[dict[str, Any]]:
    path = folder / TRAIN_MANIFESTS
    manifests = _read_json(path)
    if not isinstance(manifests, list) or len(manifests) != len(generation.train_fingerprints):
        message = (
            f"{path}: expected {len(generation.train_fingerprints)} manifests; generate "
            f"the images again"
        )
        raise CorpusError(message, "mismatch")
    return manifests
