"""Contrastive losses in blocks of rows: the same value and gradient without the full matrix of
logits.

    loss = info_nce(scale * image_BE, text_BE, image_weight=0.5)
    loss = pairwise_sigmoid(scale * image_BE, text_BE, bias)

The scale is multiplied into one side beforehand, so that autograd computes its gradient. A matrix
that fits into one block is computed in the plain form, which the blocks must equal. Only a few
matrices of a block's size exist at a time; tensors kept for the backward pass are no larger than
the embeddings.

On a GPU, torch.compile fuses the passes over a block, and the operands of its products may be
rounded to 16 bits; sums, logits and everything else stay in float32.

B pairs, R rows of a block, E shared embedding dim.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.common import full_precision, fused_if_possible

# Groups of rows of a batch that are positives of each other, besides each row's own image and
# text.
#
# Reports repeat ("No acute process."), images of one study share theirs, and figures have several
# texts, so a negative is often a positive. Matching and contrastive losses take these groups.
#
#     same_BB = same_pairs(text_ids(batch.ids_BT, batch.mask_BT), name_ids(studies))

# B rows of a batch, T text tokens.


def name_ids(names: Sequence[str]) -> Tensor:
    """Return (B,) int64: equal for equal names (of studies, articles, label sets), on every rank
    and in every run.

    These are 63 bits of a hash: among a million names two collide with a probability of 1 in 18
    million.
    """
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return torch.tensor(
        [int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64
    )


def in_share(names: Sequence[str], share: float) -> Tensor:
    """Return (B,) bool: whether a name is in this share of all names, in every run.

    Names are ordered by their hash: a larger share includes a smaller one, and a share of a few
    names is not exact.
    """
    return name_ids(names).double() / 2**63 < share


def text_ids(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B,) int64: equal for texts with equal tokens, on every rank.

    Padding is ignored. Give ids before masking. The result is a sum of ids, each times a random
    number of its place, modulo 2^64: two different texts collide with a probability of about 2^-47.
    Does not wait for the device.
    """
    weight_T = name_ids([f"token {place}" for place in range(ids_BT.shape[1])]).to(ids_BT.device)
    # One is added because id 0 need not be padding.
    return ((ids_BT + 1) * weight_T).masked_fill(~mask_BT, 0).sum(dim=1)


def label_ids(labels_BL: Tensor, others_B: Tensor) -> Tensor:
    """Return (B,) int64: equal for rows with equal sets of positive labels, on every rank;
    `others_B` for rows without a positive label.

    As `text_ids`, the result is a sum of random numbers, and does not wait for the device.
    """
    names = [f"label {place}" for place in range(labels_BL.shape[1])]
    weight_L = name_ids(names).to(labels_BL.device)
    positive_BL = labels_BL == 1
    set_B = (positive_BL * weight_L).sum(dim=1)
    return torch.where(positive_BL.any(dim=1), set_B, others_B)


def same_pairs(*groups_B: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return (B, B) bool: True where rows i and j agree in any of the groups, so always on the
    diagonal.

    With `rows`, return only those rows. Raises ValueError without a group, or on groups of
    different lengths.
    """
    if len({tuple(group_B.shape) for group_B in groups_B}) != 1 or groups_B[0].ndim != 1:
        raise ValueError(
            f"same_pairs needs groups (B,) of one length, got {[tuple(g.shape) for g in groups_B]}"
        )
    device = groups_B[0].device
    same = (group_B.to(device)[rows, None] == group_B.to(device) for group_B in groups_B)
    return functools.reduce(torch.logical_or, same)


_CPU_BLOCK_BYTES = 2**24
_GPU_BLOCK_BYTES = 2**29
"""Memory of one block of logits: a few blocks fit into a CPU's caches; a GPU is faster with
large products.
"""
_ROW_PART = 1024
"""Numbers of a row that a compiled kernel keeps in registers; it would read a longer row twice."""


def info_nce(
    image_BE: Tensor,
    text_BE: Tensor,
    image_weight: float,
    groups: Sequence[Tensor] = (),
    *,
    block_rows: int | None = None,
    products: torch.dtype = torch.float32,
) -> Tensor:
    """Return the cross-entropy of both directions over logits `image_BE @ text_BE.T`, a scalar.

    The log-sum-exp of the complete rows of a block is computed at once, and that of the columns
    adds up. The backward pass recomputes each block, puts the softmax of both directions less the
    targets into one matrix, and multiplies it with either side: four products instead of three,
    without passes over (B, B) in memory.

    Args:
        image_BE, text_BE: float32, one of them times the scale.
        image_weight: weight of the image-to-text direction; the other has 1 - image_weight.
        groups: (B,) each, int64: a row's target is uniform over all rows that agree with it in any
            of them.
        block_rows: R; None: as many as the memory of a block allows.
        products: dtype of the operands of a block's products. In 16 bits gradients have the
            rounding error of single numbers: 4e-3 for bfloat16, 5e-4 for float16.
    """
    rows = block_rows or _rows_of_a_block(image_BE)
    if rows >= len(image_BE):
        return _plain_info_nce(image_BE, text_BE, image_weight, groups)
    loss: Tensor = _InfoNCE.apply(image_BE, text_BE, image_weight, groups, rows, products)
    return loss


def pairwise_sigmoid(
    image_BE: Tensor,
    text_BE: Tensor,
    bias: Tensor | float,
    groups: Sequence[Tensor] = (),
    *,
    block_rows: int | None = None,
    products: torch.dtype = torch.float32,
) -> Tensor:
    """Return -log sigmoid of every pair's logit, negated for negatives, summed and divided by B; a
    scalar.

    Blocks are independent, so the gradient, if needed, is computed in the forward pass.

    Args:
        image_BE, text_BE: float32, one of them times the scale.
        bias: added to all logits.
        groups: (B,) each, int64: rows that agree in any of them are positives, too.
        block_rows, products: as in `info_nce`.
    """
    bias = torch.as_tensor(bias, dtype=image_BE.dtype, device=image_BE.device)
    rows = block_rows or _rows_of_a_block(image_BE)
    if rows >= len(image_BE):
        signed_BB = _negate_positives(image_BE @ text_BE.T + bias, groups, slice(0, len(image_BE)))
        return -F.logsigmoid(-signed_BB).sum() / len(image_BE)
    loss: Tensor = _PairwiseSigmoid.apply(
        image_BE, text_BE, bias, groups, rows, products, torch.is_grad_enabled()
    )
    return loss


def _rows_of_a_block(image_BE: Tensor) -> int:
    budget = _CPU_BLOCK_BYTES if image_BE.device.type == "cpu" else _GPU_BLOCK_BYTES
    return max(1, budget // (4 * len(image_BE)))


def _blocks(batch: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, batch)) for start in range(0, batch, rows))


def _plain_info_nce(
    image_BE: Tensor, text_BE: Tensor, image_weight: float, groups: Sequence[Tensor]
) -> Tensor:
    logits_BB = image_BE @ text_BE.T
    if groups:
        # The groups are symmetric, so the target of a column is that of the row with the same
        # number.
        target = F.normalize(same_pairs(*groups).to(logits_BB.dtype), p=1.0, dim=1)
    else:
        target = torch.arange(len(logits_BB), device=logits_BB.device)
    image_to_text = F.cross_entropy(logits_BB, target)
    text_to_image = F.cross_entropy(logits_BB.T, target)
    return image_weight * image_to_text + (1 - image_weight) * text_to_image


class _PositiveLogits:
    """Mean logits of the positives of each row and of each column."""

    def __init__(self, image_BE: Tensor, groups: Sequence[Tensor]) -> None:
        self._groups = groups
        self._row_B = image_BE.new_zeros(len(image_BE))
        self._column_B = image_BE.new_zeros(len(image_BE))
        self._count_B = image_BE.new_ones(len(image_BE))

    def add(self, logits_RB: Tensor, block: slice) -> None:
        """Add one block."""
        if not self._groups:
            own_R = logits_RB.diagonal(block.start)
            self._row_B[block], self._column_B[block] = own_R, own_R
            return
        same_RB = same_pairs(*self._groups, rows=block)
        own_RB = logits_RB.masked_fill(~same_RB, 0.0)
        self._row_B[block], self._count_B[block] = (
            own_RB.sum(dim=1),
            same_RB.sum(dim=1).to(own_RB.dtype),
        )
        self._column_B += own_RB.sum(dim=0)

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means of rows and of columns, and the number of positives of each."""
        return self._row_B / self._count_B, self._column_B / self._count_B, self._count_B


class _Products:
    """Products of a block of rows, their operands rounded to a dtype, summed in float32."""

    def __init__(self, image_BE: Tensor, text_BE: Tensor, dtype: torch.dtype) -> None:
        self._image_BE = image_BE.to(dtype)
        self._text_BE = text_BE.to(dtype)
        self.dtype = dtype

    def logits(self, block: slice) -> Tensor:
        """(R, B) float32."""
        return _multiply(self._image_BE[block], self._text_BE.T)

    def add_gradients(
        self, slope_RB: Tensor, block: slice, image_BE: Tensor | None, text_BE: Tensor | None
    ) -> None:
        """Add the gradient of a block, from its slopes in the products' dtype, to that of either
        side if needed.
        """
        if image_BE is not None:
            image_BE[block] = _multiply(slope_RB, self._text_BE)
        if text_BE is not None and self.dtype == torch.float32:
            text_BE.addmm_(slope_RB.T, self._image_BE[block])
        elif text_BE is not None and text_BE.is_cuda:
            image_RE = self._image_BE[block]
            torch.addmm(text_BE, slope_RB.T, image_RE, out_dtype=torch.float32, out=text_BE)
        elif text_BE is not None:
            text_BE += _multiply(slope_RB.T, self._image_BE[block])


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in float32; on a CPU, 16-bit operands are converted first."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _gather(logits_RB: Tensor, column_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of a block's rows, and the running one of the columns."""
    part = math.gcd(logits_RB.shape[1], _ROW_PART)
    if part < _ROW_PART:
        row_R = _log_sum_exp(logits_RB, 1)
    else:
        row_R = _log_sum_exp(_log_sum_exp(logits_RB.unflatten(1, (-1, part)), 2), 1)
    return row_R, torch.logaddexp(column_B, _log_sum_exp(logits_RB, 0))


def _log_sum_exp(values: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exp of finite values. Compiled, this form reads them once, torch's own
    function twice.
    """
    highest = values.amax(dim=dim, keepdim=True)
    total = (values - highest).exp_().sum(dim=dim, keepdim=True)
    return (highest + total.log_()).squeeze(dim)


def _softmaxes(logits_RB: Tensor, row_R: Tensor, column_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of both directions' softmax of a block."""
    both_RB = (logits_RB - row_R[:, None]).exp_()
    both_RB += (logits_RB - column_B).exp_()
    return both_RB.to(dtype)


class _InfoNCE(torch.autograd.Function):
    """InfoNCE in both directions. Saves the log-sum-exp of rows and columns, and recomputes the
    logits in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image_BE: Tensor,
        text_BE: Tensor,
        image_weight: float,
        groups: Sequence[Tensor],
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        batch = len(image_BE)
        products = _Products(image_BE, text_BE, dtype)
        gather = fused_if_possible(_gather, image_BE)
        row_lse_B = image_BE.new_empty(batch)
        own = _PositiveLogits(image_BE, groups)
        column_lse_B = image_BE.new_full((batch,), -torch.inf)
        for block in _blocks(batch, rows):
            logits_RB = products.logits(block)
            own.add(logits_RB, block)
            row_lse_B[block], column_lse_B = gather(logits_RB, column_lse_B)
            del logits_RB  # or it would be kept until the next block is there
        row_own_B, column_own_B, count_B = own.means()
        ctx.save_for_backward(image_BE, text_BE, row_lse_B, column_lse_B, count_B, *groups)
        ctx.image_weight = image_weight
        ctx.rows = rows
        ctx.dtype = dtype
        image_to_text = (row_lse_B - row_own_B).mean()
        text_to_image = (column_lse_B - column_own_B).mean()
        return image_weight * image_to_text + (1 - image_weight) * text_to_image

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        image_BE, text_BE, row_lse_B, column_lse_B, count_B, *groups = ctx.saved_tensors
        weight, (wants_image, wants_text) = ctx.image_weight, ctx.needs_input_grad[:2]
        image_grad_BE = torch.empty_like(image_BE) if wants_image else None
        text_grad_BE = torch.zeros_like(text_BE) if wants_text else None
        # The weight of a direction goes into its log-sum-exp: exp(x - lse + ln w) is w times the
        # softmax.
        row_B = row_lse_B - _log(weight)
        column_B = column_lse_B - _log(1 - weight)
        products = _Products(image_BE, text_BE, ctx.dtype)
        softmaxes = fused_if_possible(_softmaxes, image_BE)
        with full_precision(image_BE):
            for block in _blocks(len(image_BE), ctx.rows):
                logits_RB = products.logits(block)
                # Subtract the targets before rounding: for a well aligned pair, two close numbers
                # are subtracted.
                if groups:
                    slope_RB = softmaxes(logits_RB, row_B[block], column_B, torch.float32)
                    target_RB = weight / count_B[block, None] + (1 - weight) / count_B
                    slope_RB -= target_RB.masked_fill_(~same_pairs(*groups, rows=block), 0.0)
                    slope_RB = slope_RB.to(ctx.dtype)
                    del target_RB
                else:
                    slope_RB = softmaxes(logits_RB, row_B[block], column_B, ctx.dtype)
                    own_R = logits_RB.diagonal(block.start)
                    own_R = (own_R - row_B[block]).exp() + (own_R - column_B[block]).exp()
                    slope_RB.diagonal(block.start).copy_(own_R - 1.0)
                products.add_gradients(slope_RB, block, image_grad_BE, text_grad_BE)
                del logits_RB, slope_RB
        share = grads[0] / len(image_BE)
        of_inputs = (
            None if grad is None else grad.mul_(share) for grad in (image_grad_BE, text_grad_BE)
        )
        return *of_inputs, None, None, None, None


class _PairwiseSigmoid(torch.autograd.Function):
    """Pairwise sigmoid loss, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        image_BE: Tensor,
        text_BE: Tensor,
        bias: Tensor,
        groups: Sequence[Tensor],
        rows: int,
        dtype: torch.dtype,
        needs_gradient: bool,
    ) -> Tensor:
        total = image_BE.new_zeros(())
        bias_grad = torch.zeros_like(bias)
        wants_image, wants_text, _ = (
            needs_gradient and wanted for wanted in ctx.needs_input_grad[:3]
        )
        image_grad_BE = torch.empty_like(image_BE) if wants_image else None
        text_grad_BE = torch.zeros_like(text_BE) if wants_text else None
        products = _Products(image_BE, text_BE, dtype)
        for block in _blocks(len(image_BE), rows):
            signed_RB = _negate_positives(products.logits(block).add_(bias), groups, block)
            total -= F.logsigmoid(-signed_RB).sum()
            if not needs_gradient:
                continue
            slope_RB = _negate_positives(signed_RB.sigmoid_(), groups, block)
            bias_grad += slope_RB.sum()
            products.add_gradients(slope_RB.to(dtype), block, image_grad_BE, text_grad_BE)
        ctx.grads = (image_grad_BE, text_grad_BE, bias_grad)
        ctx.batch = len(image_BE)
        return total / ctx.batch

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        share = grads[0] / ctx.batch
        return (
            *(None if grad is None else grad * share for grad in ctx.grads),
            None,
            None,
            None,
            None,
            None,
        )


def _negate_positives(values_RB: Tensor, groups: Sequence[Tensor], block: slice) -> Tensor:
    """Return the logits with the sign of positives changed."""
    if not groups:
        own_R = torch.arange(len(values_RB), device=values_RB.device)
        return values_RB.index_put((own_R, own_R + block.start), -values_RB.diagonal(block.start))
    return torch.where(same_pairs(*groups, rows=block), -values_RB, values_RB)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # the caller wants a gradient of the backward pass
        raise RuntimeError(
            "a contrastive loss in blocks has no second derivative; use a batch that fits in "
            "one block"
        )


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf
