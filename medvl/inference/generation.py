"""Images from texts into a folder (`medvl.data.GeneratedImages`), and reconstructions of a
generator's autoencoder.

prompts, source = prompts_of_shards("shards/mimic-cxr/test") generate_images("runs/roentgen-mimic",
prompts, "generated", options=GenerateOptions(guidance=4.0), source=source)
"""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from tqdm import tqdm

from medvl.common.config_io import check_choice, check_within
from medvl.common.files import sha256, write_atomic
from medvl.common.seeding import derive
from medvl.common.text_files import read_text
from medvl.data.images.codecs import encode_png
from medvl.data.images.generated import GeneratedImages, GeneratedImagesWriter, Generation
from medvl.data.loading.sources import color_for, select_samples
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.inference.models import refuse
from medvl.models.checkpoint import load
from medvl.models.checkpoint_folder import (
    WEIGHTS,
    described_model,
    find_checkpoint,
    train_manifests,
)
from medvl.models.image_generation.latent_diffusion import LatentDiffusion
from medvl.models.image_generation.sampling import Sampling, sample_images

CONTACT_SHEET = "contact_sheet.png"
_MAX_PROMPT_BYTES = 64 * 2**20
_SEED_BITS = 63
# pixels, images of a sheet, pixels of a caption
_TILE = 160
_COLUMNS = 6
_SHOWN = 36
_CAPTION = 34


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text to generate images of."""

    text: str
    key: str
    """Key of its sample, or number of its line."""
    position: int | None = None
    """Position of the sample in its shards; None for other prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Settings of `generate_images`."""

    guidance: float = 4.0
    """Scale of the classifier-free guidance; 1 is without."""
    steps: int = 25
    sampler: str = "dpm"
    """dpm (DPM-Solver++), ddim or pndm."""
    seed: int = 0
    images_per_prompt: int = 1
    batch: int = 16
    device: str = "auto"
    """auto, cpu or cuda."""
    precision: str = "fp32"
    """fp32 or bf16; guidance and sampler compute in fp32 in either case."""
    mark: bool = False
    """Write "synthetic" into a corner of each image."""

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "images_per_prompt", "batch")
        check_within(self, "[0, inf)", "seed")
        check_choice(self.precision, ("fp32", "bf16"), "precision")
        check_choice(self.device, ("auto", "cpu", "cuda"), "device")


def prompts_of_file(path: Path | str) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the lines of a text file in UTF-8 that are not blank, and the entry `prompt_source`.

    Raises ConfigError when the file cannot be read or has no prompt.
    """
    path = Path(path)
    text = read_text(
        path,
        ConfigError,
        field="prompts",
        limit=_MAX_PROMPT_BYTES,
        what="a file with a prompt per line",
    )
    lines = text.split("\n")
    prompts = [
        Prompt(text=line.strip(), key=str(number))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} has no prompt: expected one per line", "empty", field="prompts")
    return prompts, {"kind": "file", "sha256": sha256(path)}


def prompts_of_shards(
    folder: Path | str,
    *,
    sections: Sequence[str] = ("impression",),
    views: Sequence[str] = (),
    limit: int | None = None,
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the texts of samples, and the entry `prompt_source`.

    Args:
        folder: one split of shards.
        sections: sections that form the text; samples without any of them are left out.
        views: views such as PA and AP; empty for all.
        limit: number of samples, evenly spaced over the shards; None for all.

    Raises ShardError when the shards are damaged, ConfigError when no sample is left.
    """
    source = ShardSource(folder)
    policy = WholeText(sections=tuple(sections), missing="no_text")
    subset: Any = select_samples(source, views, policy)
    positions = np.asarray(subset.positions)
    if limit is not None and limit < len(positions):
        positions = positions[np.linspace(0, len(positions) - 1, limit).round().astype(int)]
    rng = np.random.default_rng(0)  # the policy draws nothing
    samples = ((int(position), source.sample(int(position))) for position in positions)
    prompts = [
        Prompt(text=policy(sample.sections, rng), key=sample.key, position=position)
        for position, sample in samples
    ]
    manifest = source.manifest
    entries = {
        "corpus": manifest.corpus,
        "split": manifest.split,
        "fingerprint": manifest.fingerprint,
    }
    return prompts, {
        "kind": "shards",
        **entries,
        "sections": list(sections),
        "views": list(views),
    }


def generate_images(
    checkpoint: Path | str,
    prompts: Sequence[Prompt],
    out: Path | str,
    *,
    options: GenerateOptions | None = None,
    source: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> GeneratedImages:
    """Generate images of prompts with a latent diffusion model; the same call continues an
    interrupted folder.

    Args:
        checkpoint: as `medvl.load` takes it.
        prompts: texts, each with its key.
        out: the folder.
        options: guidance, sampler, seed and the like.
        source: entry `prompt_source` of `generation.json`.
        progress: show a progress bar.

    Raises:
        ConfigError: the model generates no images, or an option is out of range.
        CheckpointError: the checkpoint cannot be loaded.
        CorpusError: the folder belongs to other settings.
    """
    options = options or GenerateOptions()
    sampler: Any = options.sampler
    sampling = Sampling(sampler=sampler, steps=options.steps, guidance=options.guidance)
    model = _open(checkpoint, options)
    if not isinstance(model, LatentDiffusion):
        raise refuse(
            model, "generate images of texts", "use a latent diffusion model such as roentgen"
        )
    copies = [prompt for prompt in prompts for _ in range(options.images_per_prompt)]
    generation = _generation(
        checkpoint, model, len(copies), source, options, sampler=options.sampler,
        steps=options.steps, guidance=options.guidance,
    )  # fmt: skip

    def make(numbers: Sequence[int]) -> np.ndarray:
        seeds = [_seed(options.seed, number) for number in numbers]
        texts = [copies[number].text for number in numbers]
        images: np.ndarray = sample_images(model, texts, seeds, sampling).cpu().numpy()
        return images

    return _write(checkpoint, model, copies, out, generation, options, make, progress)


def reconstruct_images(
    checkpoint: Path | str,
    shards: Path | str,
    prompts: Sequence[Prompt],
    out: Path | str,
    *,
    options: GenerateOptions | None = None,
    source: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> GeneratedImages:
    """Write images of samples after encoding and decoding by an autoencoder, the upper limit of its
    generators.

    Args:
        checkpoint: checkpoint of the system `autoencoder`, or of a latent diffusion model.
        shards: folder that `prompts` come from (`prompts_of_shards`).
        prompts, out, options, source, progress: as for `generate_images`.

    Raises ConfigError, CheckpointError and CorpusError as `generate_images`, ImageError where an
    image is damaged.
    """
    options = options or GenerateOptions()
    model = _open(checkpoint, options)
    if not hasattr(model, "reconstruct"):
        raise refuse(model, "reconstruct images", "use an autoencoder or a latent diffusion model")
    images = ShardSource(shards)
    transform = model.transform.build()
    generation = _generation(
        checkpoint,
        model,
        len(prompts),
        source,
        options,
        sampler="reconstruction",
        steps=0,
        guidance=1.0,
    )

    def make(numbers: Sequence[int]) -> np.ndarray:
        rows = []
        for number in numbers:
            position = prompts[number].position
            assert position is not None
            pixels = images.pixels(position, color_for(images, model.transform))
            rows.append(transform(pixels, np.random.default_rng(0)).image_HWC.transpose(2, 0, 1))
        image_BCHW = torch.from_numpy(np.stack(rows)).to(model.device)
        made: np.ndarray = model.reconstruct(image_BCHW).cpu().numpy()
        return made

    return _write(checkpoint, model, prompts, out, generation, options, make, progress)


def _open(checkpoint: Path | str, options: GenerateOptions) -> Any:
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device is available; use --device cpu", "unsupported", field="device"
        )
    return load(checkpoint).to(device)


def _seed(seed: int, number: int) -> int:
    """Return the seed of an image."""
    return derive(seed, "generate", number) >> (64 - _SEED_BITS)


def _generation(
    checkpoint: Path | str,
    model: Any,
    images: int,
    source: Mapping[str, Any] | None,
    options: GenerateOptions,
    **settings: Any,
) -> Generation:
    folder = find_checkpoint(checkpoint)
    return Generation(
        generator=sha256(folder / WEIGHTS),
        system=model.name,
        # as stored, so that a folder continues after a setting was added to the system
        config=described_model(folder)["settings"],
        train_fingerprints=tuple(manifest.fingerprint for manifest in train_manifests(checkpoint)),
        seed=options.seed,
        prompt_source=dict(source or {"kind": "command"}),
        image_size=model.config.image_size,
        marked=options.mark,
        images=images,
        **settings,
    )


def _write(
    checkpoint: Path | str,
    model: Any,
    prompts: Sequence[Prompt],
    out: Path | str,
    generation: Generation,
    options: GenerateOptions,
    make: Any,
    progress: bool,
) -> GeneratedImages:
    """Write the images that are missing in a folder, then its contact sheet."""
    manifests = [dataclasses.asdict(manifest) for manifest in train_manifests(checkpoint)]
    autocast = torch.autocast(
        model.device.type, torch.bfloat16, enabled=options.precision == "bf16"
    )
    cut_tokens_of = {
        prompt.text: 0 if model.tokenizer is None else model.tokenizer.cut_tokens(prompt.text)
        for prompt in prompts
    }
    with GeneratedImagesWriter(out, generation, manifests) as writer, autocast:
        missing = writer.missing()
        for numbers in tqdm(
            list(_batches(missing, options.batch)), "generate", unit="batch", disable=not progress
        ):
            for number, image_HW in zip(numbers, make(numbers), strict=True):
                prompt = prompts[number]
                writer.add(
                    number,
                    marked(image_HW) if options.mark else image_HW,
                    prompt=prompt.text,
                    prompt_key=prompt.key,
                    seed=_seed(options.seed, number),
                    cut_tokens=cut_tokens_of[prompt.text],
                    source_key=None if prompt.position is None else prompt.key,
                )
    images = GeneratedImages.open(out)
    write_atomic(Path(out) / CONTACT_SHEET, encode_png(contact_sheet(images)))
    return images


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


def marked(image_HW: np.ndarray) -> np.ndarray:
    """Return an image with "synthetic" in white on black in its lower left corner."""
    height = image_HW.shape[0]
    scale = height / 512
    (width, tall), rest = cv2.getTextSize("synthetic", cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    image_HW = np.ascontiguousarray(image_HW).copy()
    image_HW[height - tall - rest :, : width + 2] = 0
    cv2.putText(
        image_HW,
        "synthetic",
        (1, height - rest),
        cv2.FONT_HERSHEY_SIMPLEX,
        scale,
        (255.0,),
        1,
        cv2.LINE_AA,
    )
    return image_HW


def contact_sheet(images: GeneratedImages) -> np.ndarray:
    """Return a sheet, uint8 (H, W), of the first 36 images with their prompts."""
    numbers = range(min(len(images), _SHOWN))
    columns = min(_COLUMNS, len(numbers))
    cells = [_cell(images.pixels(number), images.rows[number].prompt) for number in numbers]
    cells += [np.zeros_like(cells[0])] * (-len(cells) % columns)
    rows = [np.hstack(cells[start : start + columns]) for start in range(0, len(cells), columns)]
    head = np.zeros((24, rows[0].shape[1]), np.uint8)
    title = (
        f"SYNTHETIC  {images.generation.system}  {images.generation.sampler}  guidance "
        f"{images.generation.guidance:g}"
    )
    _put(head, title, 16, 0.42)
    return np.vstack([head, *rows])


def _cell(image_HW: np.ndarray, prompt: str) -> np.ndarray:
    cell = np.zeros((_TILE + _CAPTION, _TILE), np.uint8)
    cell[:_TILE, : _TILE - 2] = cv2.resize(
        image_HW, (_TILE - 2, _TILE), interpolation=cv2.INTER_LINEAR
    )
    text = prompt.encode("ascii", "replace").decode()
    for line, words in enumerate(textwrap.wrap(text, width=27, max_lines=3, placeholder="...")):
        _put(cell, words, _TILE + 10 + 10 * line, 0.3)
    return cell


def _put(image_HW: np.ndarray, text: str, bottom: int, scale: float) -> None:
    cv2.putText(
        image_HW, text, (2, bottom), cv2.FONT_HERSHEY_SIMPLEX, scale, (235.0,), 1, cv2.LINE_AA
    )
