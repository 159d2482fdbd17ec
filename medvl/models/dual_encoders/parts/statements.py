"""Statements of a batch as rows of a side of `Pairs`, each encoded once, and their comparison over all ranks."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.pairs.positives import text_ids
from medvl.schema import Batch, Embeddings


def embed_statements(batch: Batch, embed: Callable[[Tensor, Tensor], Embeddings]) -> Embeddings:
    """Return one row a statement, in order, with the number of its sample in `pair_N` and its text in `group_N`.

    Equal statements of the batch are encoded once. Without any statement there is no row, but the encoder has run, so
    that DDP gets its gradients. Waits for the device. Raises ConfigError for a batch without `statement_ids_BST`.
    """
    ids_BST, mask_BST = batch.statement_ids_BST, batch.statement_mask_BST
    if ids_BST is None or mask_BST is None:
        message = "expected Batch.statement_ids_BST: open the loader with inputs=model.inputs"
        raise ConfigError(message, "missing", field="statement_ids_BST")
    real_BS = mask_BST.any(dim=2)
    pair_N, ids_NT, mask_NT = real_BS.nonzero()[:, 0], ids_BST[real_BS], mask_BST[real_BS]
    if not len(pair_N):
        embedded = embed(ids_BST[:1, 0], mask_BST[:1, 0])
        return dataclasses.replace(_rows(embedded, pair_N), pair_N=pair_N, group_N=pair_N)
    group_N = text_ids(ids_NT, mask_NT)
    first_U, column_N = first_of_equal(group_N)
    embedded = embed(ids_NT[first_U], mask_NT[first_U])
    return dataclasses.replace(_rows(embedded, column_N), pair_N=pair_N, group_N=group_N)


def distinct_statements(statements: Embeddings, images: int, *, merge: bool = True) -> tuple[Tensor, Tensor]:
    """Return (U, E), the vectors of statements, and (images, U) bool: whether an image has a statement.

    Args:
        statements: rows of `embed_statements`, of all ranks.
        images: number of images of all ranks.
        merge: make equal statements one column, which is a positive of all their images.
    """
    pair_N, group_N = statements.pair_N, statements.group_N
    assert pair_N is not None, "embed_statements numbers samples"
    assert group_N is not None, "embed_statements numbers texts"
    first_U, column_N = first_of_equal(group_N if merge else torch.arange(len(group_N), device=group_N.device))
    positive_NU = torch.zeros(images, len(first_U), dtype=torch.bool, device=pair_N.device)
    positive_NU[pair_N, column_N] = True
    return statements.global_NE[first_U], positive_NU


def first_of_equal(group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U,), the first row of each group in the order of their numbers, and (N,), the group of each row."""
    known_U, column_N = torch.unique(group_N, return_inverse=True)
    row_N = torch.arange(len(group_N), device=group_N.device)
    first_U = row_N.new_full((len(known_U),), len(group_N)).scatter_reduce(0, column_N, row_N, "amin")
    return first_U, column_N


def _rows(side: Embeddings, index_N: Tensor) -> Embeddings:
    tensors = (side.local_NPE, side.mask_NP, side.weight_NP)
    return Embeddings(side.global_NE[index_N], *(None if x is None else x[index_N] for x in tensors))
