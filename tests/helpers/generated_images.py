"""Small folders of generated images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.data.images.generated import GeneratedImages, GeneratedImagesWriter, Generation
from medvl.data.shards.format import Manifest


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
        prompt_source={"kind": "command"} if source_keys is None else {"kind": "shards", "sections": list(sections)},
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
