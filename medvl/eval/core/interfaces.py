"""What evaluators ask of a model, a loader and its source; anything of this shape can be evaluated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.schema import Batch, Embeddings, Sample


class Compares(Protocol):
    """Anything with a similarity of images and texts."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """similarity_NM, unscaled: a cosine, or the like with a local term."""


class Model(Compares, Protocol):
    """A dual-encoder."""

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Pixels as `similarity` takes them."""

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Texts as `similarity` takes them."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """As torch has them."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """As torch has them."""


class Source(Protocol):
    """Random access to the samples behind a loader."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Columns of the labels."""

    @property
    def fingerprint(self) -> str | None:
        """Hash of what the source holds, None where nobody knows it."""

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """The sample at a position, from 0."""

    def pixels(self, position: int) -> NDArray[np.uint8]:
        """Its decoded image (H, W) or (H, W, C)."""


class Loader(Protocol):
    """Batches that hold every readable sample of `source` exactly once."""

    @property
    def source(self) -> Source:
        """Where the samples come from."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Samples that could not be read, by reason, since the loader was opened."""

    def __iter__(self) -> Iterator[Batch]: ...


def encode_batch(model: Model, batch: Batch, device: torch.device, autocast: torch.dtype | None) -> Embeddings:
    """The batch's images, embedded on `device`; `autocast` is for the encoder only, comparisons stay in float32."""
    image_BCHW = batch.image_BCHW.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return model.embed_images(image_BCHW)
