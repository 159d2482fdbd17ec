"""Stacking of the arrays and texts of samples to the tensors of a batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def stack(images: Sequence[np.ndarray]) -> Tensor:
    """Return (B, C, H, W) from images (H, W, C)."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def pad_rows(arrays: Sequence[np.ndarray | None], *, as_stored: bool = False) -> Tensor:
    """Return (B, P, D) from arrays (P, D) of unequal length, zeros for None; P is 0 if all are
    None.

    In float32, or with `as_stored` in the widest type of the arrays.
    """
    present = [array for array in arrays if array is not None]
    rows = max(map(len, present), default=0)
    columns = present[0].shape[1] if present else 0
    dtype = np.result_type(*present) if present and as_stored else np.dtype(np.float32)
    padded = np.zeros((len(arrays), rows, columns), dtype)
    for row, array in enumerate(arrays):
        if array is not None:
            padded[row, : len(array)] = array
    return torch.from_numpy(padded)


def grouped(tokens: tuple[Tensor, Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ids and mask (B, S, T) of texts in rows of the given sizes, one after another; S is
    at least 1.
    """
    ids_NT, mask_NT = tokens
    real_BS = torch.arange(max(1, *sizes)) < torch.tensor(sizes)[:, None]
    ids_BST, mask_BST = (x_NT.new_zeros(*real_BS.shape, x_NT.shape[1]) for x_NT in tokens)
    ids_BST[real_BS], mask_BST[real_BS] = ids_NT[: sum(sizes)], mask_NT[: sum(sizes)]
    return ids_BST, mask_BST


def stack_some(images: Sequence[np.ndarray | None], like_HWC: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return (B, C, H, W) with black images for those that are missing, and (B,) bool: which are
    there.
    """
    blank_HWC = np.zeros_like(like_HWC)
    there_B = torch.tensor([image is not None for image in images])
    return stack([blank_HWC if image is None else image for image in images]), there_B
