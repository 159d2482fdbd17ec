"""Batches for metrics, and their values on one of two ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from medvl.eval import LabelMetrics, RetrievalMetrics

NAMES = ("Edema", "Fracture", "Pneumonia")
TEXTS = [f"text {number % 11}" for number in range(20)]


def batches(
    rank: int = 0, world: int = 1
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, list[str]]]:
    """Return scores, labels, image and text embeddings, and texts, of a rank; unequal numbers on
    two ranks.
    """
    generator = torch.Generator().manual_seed(0)
    scores, labels = (
        torch.rand(20, 3, generator=generator),
        torch.randint(-1, 3, (20, 3), generator=generator).float(),
    )
    labels = labels.masked_fill(labels == 2, torch.nan)
    of_text = F.normalize(torch.randn(11, 6, generator=generator), dim=1)[torch.arange(20) % 11]
    images = F.normalize(of_text + 0.7 * torch.randn(20, 6, generator=generator), dim=1)
    parts = [slice(0, 4), slice(4, 12), slice(12, 20)]
    mine = [part for number, part in enumerate(parts) if number % world == rank]
    return [(scores[part], labels[part], images[part], of_text[part], TEXTS[part]) for part in mine]


def compute(rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Return all values of both metrics after the batches of a rank."""
    label_metrics = LabelMetrics(NAMES, probabilities=True, thresholds=dict.fromkeys(NAMES, 0.5))
    retrieval_metrics = RetrievalMetrics(ks=(1, 5))
    for scores, labels, images, of_text, texts in batches(rank, world):
        label_metrics.update(scores, labels)
        retrieval_metrics.update(images, of_text, texts)
    return {**label_metrics.compute(), **retrieval_metrics.compute()}


def compute_on_this_rank() -> dict[str, Tensor]:
    """Return the values of both metrics after the batches of this rank."""
    return compute(dist.get_rank(), dist.get_world_size())
