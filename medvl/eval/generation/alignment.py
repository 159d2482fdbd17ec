"""Alignment of images with their prompts, by a dual-encoder that was trained apart from the generator.

Shape letters: N images, M distinct prompts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from medvl.errors import ConfigError
from medvl.eval.core.embeddings import concatenate, embed_texts, encode_batch
from medvl.eval.core.metric_rows import MetricRow, mean_metrics, median_metric
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.generation.findings import Resampling, renamed
from medvl.eval.generation.inputs import ImageSet, LoaderOptions
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.eval_mode import evaluating
from medvl.models.locate import WEIGHTS, find_checkpoint

RANKS = (1, 5, 10)
_TEXT_TOWER = "text_encoder."
_SMALLEST = 256  # elements; smaller tensors may be equal by chance, such as zeros


def check_separate(aligner: Path, generator: Path) -> float:
    """Return the share of the aligner's text weights that the generator has too.

    Matrices are compared by value, not by name. Some may be equal because both started from the same published
    encoder and left a part of it frozen. Raises ConfigError where all are: the generator reads its prompts with the
    aligner's own text encoder, which would favour it.
    """
    own = _matrices(aligner, _TEXT_TOWER)
    theirs = _matrices(generator, "")
    shared = {name for name, tensor in own.items() if any(torch.equal(tensor, other) for other in theirs.of(tensor))}
    total = sum(tensor.numel() for tensor in own.values())
    if total and len(shared) == len(own):
        message = f"the generator reads prompts with the text encoder of {aligner}; give a model trained apart from it"
        raise ConfigError(message, "conflict", field="aligner")
    return sum(own[name].numel() for name in shared) / total if total else 0.0


class _Matrices(dict[str, torch.Tensor]):
    """Tensors by name."""

    def of(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return those of the shape of another one."""
        return [tensor for tensor in self.values() if tensor.shape == like.shape]


def _matrices(checkpoint: Path, prefix: str) -> _Matrices:
    found = _Matrices()
    with safetensors.safe_open(find_checkpoint(checkpoint) / WEIGHTS, framework="pt") as file:
        names: list[str] = list(file.keys())
        for name in names:
            if name.startswith(prefix):
                tensor = file.get_tensor(name)
                if tensor.ndim >= 2 and tensor.numel() >= _SMALLEST:
                    found[name] = tensor.float()
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """Similarities of images and prompts."""

    own_N: Array
    """Similarity with the own prompt."""
    other_N: Array
    """Mean similarity with the other distinct prompts; NaN if there are none."""
    rank_N: Array
    """Rank of the own prompt among the distinct prompts, from 1; a tie counts in the middle."""
    prompts: int
    """Number of distinct prompts."""


@torch.no_grad()
def align(images: ImageSet, model: DualEncoder, prompts: Sequence[str], loading: LoaderOptions) -> Aligned:
    """Compare every image with some distinct prompts, its own among them."""
    loader = open_for_evaluation(images.source, model.transform, batch=loading.batch, workers=loading.workers)
    device, keys, parts = next(model.parameters()).device, list[str](), []
    with evaluating(model):
        texts = embed_texts(model, list(prompts))
        for batch in loader:
            keys += batch.keys
            embedded = encode_batch(model, batch, device, None)
            parts.append(model.similarity(concatenate([embedded]), texts).double().cpu())
    row_of = {key: row for row, key in enumerate(keys)}
    similarity_NM = torch.cat(parts).numpy()[[row_of[sample.key] for sample in images.scored.samples]]
    column_of = {prompt: column for column, prompt in enumerate(prompts)}
    own = np.array([column_of[prompt] for prompt in images.prompts])
    own_N = similarity_NM[np.arange(len(own)), own]
    above_N, ties_N = (similarity_NM > own_N[:, None]).sum(axis=1), (similarity_NM == own_N[:, None]).sum(axis=1) - 1
    others = len(prompts) - 1
    other_N = (similarity_NM.sum(axis=1) - own_N) / others if others else np.full(len(own_N), np.nan)
    return Aligned(
        own_N=own_N,
        other_N=other_N,
        rank_N=1 + above_N + ties_N / 2,
        prompts=len(prompts),
    )


def alignment_rows(images: ImageSet, found: Aligned, resampling: Resampling) -> tuple[MetricRow, ...]:
    """Return the mean similarity with own and other prompts, and retrieval of the own prompt."""
    target = f"{found.prompts} prompts"
    columns: Mapping[str, Any] = {
        "alignment": found.own_N,
        "alignment_other": found.other_N,
        **{f"recall@{k}": (found.rank_N <= k).astype(np.float64) for k in RANKS},
    }
    groups = [
        mean_metrics(metric, value_N[:, None], [target], subgroup=images.name) for metric, value_N in columns.items()
    ]
    median = median_metric("median_rank", found.rank_N, target)
    groups.append(renamed(median, "median_rank", images.name))
    return resampling.measure(groups, images.patients)
