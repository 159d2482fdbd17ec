"""Small folders of generated images, and real shards of the same kind of images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.images.codecs import encode_png
from medvl.data.images.generated import GeneratedImages, GeneratedImagesWriter, Generation
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.schema import ImageFeatures, Sample

PROMPTS = (
    "Left pleural effusion.",
    "Right pleural effusion.",
    "No pleural effusion.",
    "Pulmonary edema.",
)
SIZE = 16
DEID = Deidentifier(b"0" * 32)


class MeanEncoder(nn.Module):
    """Encoder whose features are the mean brightness of blocks of rows: the lower half, the
    upper half, quarters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.config = {"name": "mean"}

    def forward(self, image_BCHW: Tensor) -> ImageFeatures:
        rows_BH = image_BCHW[:, 0].float().mean(dim=2)
        parts_B4 = rows_BH.unflatten(1, (4, -1)).mean(dim=2)
        halves_B2 = torch.stack([parts_B4[:, 2:].mean(dim=1), parts_B4[:, :2].mean(dim=1)], dim=1)
        return ImageFeatures(
            torch.cat([halves_B2, parts_B4[:, ::2] - halves_B2], dim=1), None, None
        )


def draw(prompt: str, rng: np.random.Generator, width: int = SIZE) -> np.ndarray:
    """Draw a bright lower corner for an effusion on that side of the patient, and a bright top for
    edema.

    Wider images have dark bands at both sides.
    """
    image_HW = np.full((SIZE, SIZE), 60.0) + 8 * rng.normal(size=(SIZE, SIZE))
    half = SIZE // 2
    if "Left" in prompt:
        image_HW[half:, half:] += 60
    if "Right" in prompt:
        image_HW[half:, :half] += 60
    if "edema" in prompt:
        image_HW[:half] += 60
    bands = (width - SIZE) // 2
    return np.pad(image_HW.clip(0, 255).astype(np.uint8), ((0, 0), (bands, bands)))


def write_real(folder: Path, counts: Mapping[str, int], width: int = SIZE + 8) -> dict[str, Path]:
    """Write shards of images with the prompts as impressions, one patient each; return the
    folder of each split.
    """
    rng, records = np.random.default_rng(0), []
    folder.mkdir(parents=True)
    for split, count in counts.items():
        for number in range(count):
            prompt, path = PROMPTS[number % len(PROMPTS)], folder / f"{split}{number}.png"
            path.write_bytes(encode_png(draw(prompt, rng, width)))
            effusion = 1 if "effusion" in prompt and "No" not in prompt else 0
            sample = Sample(
                key=f"{split}-{number:03d}",
                corpus="drawn",
                split=split,
                patient=DEID.patient(f"{split}{number}"),
                study=f"{split}{number}",
                image=path,
                sections={"impression": prompt},
                labels={"Edema": int("edema" in prompt), "Pleural Effusion": effusion},
                view="PA" if number % 3 else "LATERAL",
            )
            records.append(Record(sample))
    plan = Plan("drawn", records, ("Edema", "Pleural Effusion"), RowCounts())
    options = ShardOptions(short_side=SIZE, image_format="png")
    write_shards(plan, DEID, ShardRun(out=folder / "shards", workers=1), options)
    return {split: folder / "shards" / split for split in counts}


def write_generated(
    folder: Path,
    images: Sequence[np.ndarray],
    prompts: Sequence[str],
    *,
    prompt_keys: Sequence[str] | None = None,
    source_keys: Sequence[str] | None = None,
    manifests: Sequence[Manifest] = (),
    guidance: float = 3.0,
    generator: str = "ab" * 32,
    sections: Sequence[str] = ("impression",),
) -> GeneratedImages:
    """Write the images and prompts as `medvl generate` does."""
    stored: list[Any] = [manifest.to_json() for manifest in manifests]
    generation = Generation(
        generator=generator,
        system="latent_diffusion",
        config={},
        train_fingerprints=tuple(manifest.fingerprint for manifest in manifests),
        sampler="ddim",
        steps=5,
        guidance=guidance,
        seed=0,
        prompt_source={"kind": "command"}
        if source_keys is None
        else {"kind": "shards", "sections": list(sections)},
        image_size=images[0].shape[0],
        images=len(images),
    )
    with GeneratedImagesWriter(folder, generation, stored) as writer:
        for number, (image_HW, prompt) in enumerate(zip(images, prompts, strict=True)):
            writer.add(
                number,
                image_HW,
                prompt=prompt,
                prompt_key=str(number) if prompt_keys is None else prompt_keys[number],
                seed=number,
                cut_tokens=0,
                source_key=None if source_keys is None else source_keys[number],
            )
    return GeneratedImages.open(folder)
