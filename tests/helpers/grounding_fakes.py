"""A model that knows the phrase of every grey value, and a loader that applies its transform."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.eval_fakes import WIDTH, FakeLoader, text_vector
from medvl.data.transforms.image import EvalTransform
from medvl.schema import Batch, Embeddings


class OracleModel(nn.Module):
    """A model whose 4 x 4 regions are the vectors of the phrases that their gray values stand
    for.
    """

    name = "oracle"
    device = torch.device("cpu")

    def __init__(self, phrases: dict[int, str], fit: str = "squash") -> None:
        super().__init__()
        self.transform = EvalTransform(size=16, fit=cast(Any, fit))
        self.vectors = {
            value: torch.from_numpy(text_vector(text)) for value, text in phrases.items()
        }
        self.scale = nn.Parameter(torch.ones(()))

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        assert not self.training
        cell_BP = F.avg_pool2d(image_BCHW.float(), 4).flatten(1).round().int()
        zero = torch.zeros(WIDTH)
        regions = [
            torch.stack([self.vectors.get(int(value), zero) for value in row]) for row in cell_BP
        ]
        return Embeddings(torch.zeros(len(image_BCHW), WIDTH), torch.stack(regions))

    def embed_texts(self, texts: list[str]) -> Embeddings:
        return Embeddings(torch.from_numpy(np.stack([text_vector(text) for text in texts])))


class TransformingLoader(FakeLoader):
    """A loader that applies the model's transform."""

    def _collate(self, positions: Sequence[int]) -> Batch:
        batch = super()._collate(positions)
        apply = EvalTransform(size=16, fit="squash").build()
        rng = np.random.default_rng(0)
        images = [apply(self.source.images[position], rng).image_HWC for position in positions]
        batch.image_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return batch
