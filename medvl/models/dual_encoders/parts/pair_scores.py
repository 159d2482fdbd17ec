"""Scores of all pairs of two sides by a network that reads both, in exact chunks (CARZero)."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from medvl.losses.local.statements import in_chunks

_CHUNK_BYTES, _CHUNK_TENSORS = 2**29, 4
"""Memory of the network's widest states for one chunk of queries, and how many of them it holds at once."""


def score_head(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Return linear layers with ReLU and dropout down to one number."""
    widths = [width, *hidden]
    layers = [
        nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout))
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def unnormalized(unit_NE: Tensor) -> Tensor:
    """Return unit vectors at a norm of sqrt(E), at which a LayerNorm's epsilon is as small as for published ones, which
    are not L2-normalised."""
    return unit_NE * unit_NE.shape[1] ** 0.5


def with_global(global_NE: Tensor, local_NPE: Tensor, mask_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, K, E) and its mask (N, K), K = 1 + P: the unit vector of each row, unnormalised, then its regions or
    words."""
    memory_NKE = torch.cat([unnormalized(global_NE)[:, None], local_NPE], dim=1)
    return memory_NKE, torch.cat([mask_NP.new_ones(len(mask_NP), 1), mask_NP], dim=1)


def pair_scores(
    read: Callable[[Tensor, Tensor, Tensor], Tensor],
    memory_NKE: Tensor,
    mask_NK: Tensor,
    query_ME: Tensor,
    *,
    width: int,
    chunk: int | None = None,
) -> Tensor:
    """Return (N, M) float32: the score of each query with each row.

    Args:
        read: function from queries (N, C, E), memory and its mask to scores (N, C, 1).
        memory_NKE, mask_NK: vectors of each row, and True on the real ones.
        query_ME: queries of all rows, unit vectors.
        width: width of the network's widest states.
        chunk: number of queries at a time, by default as many as fit in 512 MiB; chunks are recomputed backwards.
    """
    rows = len(memory_NKE)
    if not rows:  # a rank without pairs: attention needs a row, and DDP the gradients of all weights
        memory_NKE = torch.cat([memory_NKE, memory_NKE.new_zeros(1, *memory_NKE.shape[1:])])
        mask_NK = mask_NK.new_ones(1, mask_NK.shape[1])

    def score(memory_NKE: Tensor, query_CE: Tensor, mask_NK: Tensor) -> Tensor:
        return read(query_CE.expand(len(memory_NKE), -1, -1), memory_NKE, mask_NK).squeeze(2).float()

    chunk = chunk or max(1, _CHUNK_BYTES // (4 * _CHUNK_TENSORS * width * max(1, rows)))
    return in_chunks(score, memory_NKE, unnormalized(query_ME), mask_NK, chunk=chunk)[:rows]
