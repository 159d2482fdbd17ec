"""Images for retrieval tests, whose `FakeModel` embeddings are text vectors plus noise."""

from collections.abc import Sequence

import numpy as np

from helpers.eval_fakes import WIDTH, FakeLoader, text_vector


def noisy_images(texts: Sequence[str], noise: float, seed: int = 0) -> list[np.ndarray]:
    """Return one image of one row of pixels per text."""
    rng = np.random.default_rng(seed)
    return [
        np.clip(128 + 100 * text_vector(text) + noise * rng.normal(size=WIDTH), 0, 255).astype(
            np.uint8
        )[None]
        for text in texts
    ]


def unit_images(loader: FakeLoader) -> np.ndarray:
    """Return the normalized embeddings (N, E) of a loader's images."""
    images = np.stack([image[0].astype(np.float64) - 128 for image in loader.source.images])
    return images / np.linalg.norm(images, axis=1, keepdims=True)
