"""`medvl generate`: images from texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.inference.generation import GenerateOptions, Prompt


def generate(
    *,
    checkpoint: str,
    out: Path,
    prompt: tuple[str, ...] = (),
    prompts: Path | None = None,
    data: Path | None = None,
    sections: tuple[str, ...] = ("impression",),
    views: tuple[str, ...] = (),
    limit: int | None = None,
    guidance: tuple[float, ...] = (4.0,),
    steps: int = 25,
    sampler: Literal["dpm", "ddim", "pndm"] = "dpm",
    seed: int = 0,
    images_per_prompt: int = 1,
    reconstruct: bool = False,
    mark: bool = False,
    batch: int = 16,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> str:
    """Generate synthetic images of texts; the same command again continues an interrupted folder.

    Args:
        checkpoint: a latent diffusion model (roentgen): a run, a checkpoint, or hf-hub:OWNER/NAME.
        out: folder for images/, images.jsonl, generation.json and a contact sheet; with several values of guidance, one
            folder for each in it, such as guidance-4.
        prompt: texts.
        prompts: file with one text per line, in place of --prompt.
        data: folder of shards (one split) whose texts are the prompts, in place of --prompt.
        sections: sections that form the text of a sample of --data.
        views: views of --data, such as PA AP; all without it.
        limit: number of samples of --data, evenly spaced.
        guidance: scales of the classifier-free guidance; 1 is without.
        steps: evaluations of the U-Net for each image.
        sampler: dpm (DPM-Solver++), ddim, or pndm, which RoentGen used with 75 steps.
        seed: seed of the run; each image has its own, derived from it.
        images_per_prompt: images of each text.
        reconstruct: encode and decode the images of --data instead, the ceiling of a generator on this autoencoder.
        mark: write "synthetic" into a corner of each image.
        batch: images at a time.
        precision: fp32, or bf16 for the networks.
        device: auto, cpu or cuda.
    """
    from medvl.inference.generation import GenerateOptions

    texts, source = _prompts(prompt, prompts, data, sections, views, limit)
    scales = (1.0,) if reconstruct else guidance
    if not scales:
        raise ConfigError("give at least one value of --guidance", "missing", field="guidance")
    options = [
        GenerateOptions(guidance=scale, steps=steps, sampler=sampler, seed=seed, images_per_prompt=images_per_prompt,
                        batch=batch, device=device, precision=precision, mark=mark)
        for scale in scales
    ]  # fmt: skip
    folders = [out / f"guidance-{scale:g}" if len(scales) > 1 else out for scale in scales]
    shards = data if reconstruct else None
    if reconstruct and data is None:
        raise ConfigError("--reconstruct needs the images of --data", "missing", field="data")
    return _write(checkpoint, texts, source, dict(zip(folders, options, strict=True)), shards)


def _prompts(
    prompt: Sequence[str],
    prompts: Path | None,
    data: Path | None,
    sections: Sequence[str],
    views: Sequence[str],
    limit: int | None,
) -> "tuple[list[Prompt], dict[str, Any]]":
    """Return the prompts and their source."""
    from medvl.inference.generation import Prompt, prompts_of_file, prompts_of_shards

    if sum((bool(prompt), prompts is not None, data is not None)) != 1:
        raise ConfigError("give exactly one of --prompt, --prompts and --data", "conflict", field="prompts")
    if data is not None:
        return prompts_of_shards(data, sections=sections, views=views, limit=limit)
    if prompts is not None:
        return prompts_of_file(prompts)
    return [Prompt(text=text, key=str(number)) for number, text in enumerate(prompt, 1)], {"kind": "command"}


def _write(
    checkpoint: str,
    prompts: "Sequence[Prompt]",
    source: Mapping[str, Any],
    folders: "Mapping[Path, GenerateOptions]",
    shards: Path | None,
) -> str:
    """Write the folders of generated images, or with `shards` of reconstructions, and return a summary."""
    from medvl.inference.generation import CONTACT_SHEET, generate_images, reconstruct_images

    lines, cut = [], []
    for folder, options in folders.items():
        settings: dict[str, Any] = {"options": options, "source": source, "progress": True}
        if shards is None:
            images = generate_images(checkpoint, prompts, folder, **settings)
        else:
            images = reconstruct_images(checkpoint, shards, prompts, folder, **settings)
        cut = [row.cut_tokens for row in images.rows if row.cut_tokens]
        lines.append(f"Wrote {folder}: {len(images)} synthetic images, {folder / CONTACT_SHEET}")
    if cut:
        lines.append(f"{len(cut)} images have prompts longer than the text encoder reads: up to {max(cut)} tokens cut")
    return "\n".join(lines)
