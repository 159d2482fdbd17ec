"""Protocols of the models, loaders and sources that evaluators accept."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.schema import Batch, Embeddings, Sample


class SupportsSimilarity(Protocol):
    """A model with a similarity of images and texts."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return similarity_NM without temperature: the cosine, or a similarity with a local term."""


class Model(SupportsSimilarity, Protocol):
    """A dual-encoder."""

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return embeddings of pixels for `similarity`."""

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return embeddings of texts for `similarity`."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Same as `torch.nn.Module.parameters`."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """Same as `torch.nn.Module.modules`."""


class Source(Protocol):
    """Random access to the samples behind a loader."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label columns."""

    @property
    def fingerprint(self) -> str | None:
        """Hash of the content of the source; None if unknown."""

    def __len__(self) -> int: ...

    def sample(self, position: int) -> Sample:
        """Return the sample at a position, from 0."""

    def pixels(self, position: int) -> NDArray[np.uint8]:
        """Return the decoded image (H, W) or (H, W, C) at a position."""


class Loader(Protocol):
    """Loader of every readable sample of `source` exactly once."""

    @property
    def source(self) -> Source:
        """Source of the samples."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Counts of unreadable samples by reason since the loader was opened."""

    def __iter__(self) -> Iterator[Batch]: ...
