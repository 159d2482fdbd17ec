"""Losses of masked modelling: words, patches and regions."""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.common import check_share, full_precision, mean_of, shapes

# Masked language modelling: cross-entropy at the masked tokens.
#
# The vocabulary head costs more than a fusion layer, and 85 % of its rows are not needed, so
# models run it on the masked positions only:
#
#     index_N = masked_positions(labels_BT)
#     logits_NV = head(states_BTD.flatten(0, 1)[index_N])
#     loss = mlm(logits_NV, labels_BT.flatten()[index_N])
#
# N masked positions of the whole batch, V vocabulary; the other letters as in `medvl.schema`.

IGNORED = -100
"""Label of a position that is not masked; torch's cross-entropy ignores it by default."""


def mlm(logits_BTV: Tensor, labels_BT: Tensor, count: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the masked positions of the whole batch (Devlin et al., arXiv
    1810.04805, task 1).

    The mean is over positions, not over texts: a text with more masked tokens weighs more.

    Args:
        logits_BTV: scores of all positions, or (N, V) of the masked ones.
        labels_BT: int64, the masked ids, -100 elsewhere; or (N,).
        count: divisor of the sum in place of the number of masked positions. With the mean number
            of the micro-batches of all ranks, the mean of these losses is the mean over all masked
            positions.

    Returns a scalar, near ln V for an untrained head; 0 with a zero gradient where nothing is
    masked. Raises ValueError on inconsistent shapes.
    """
    return _hard(*_masked_only(logits_BTV, labels_BT), count)


def mlm_by_text(logits_NV: Tensor, labels_N: Tensor, text_N: Tensor, texts: int) -> Tensor:
    """Return (texts, 2) float32: each text's summed cross-entropy at its masked positions, and how
    many it has.

    For any texts of any ranks, the sum of the first column divided by the sum of the second is
    `mlm` of these texts. `text_N` is the text of each masked position. Raises ValueError on
    inconsistent shapes.
    """
    if logits_NV.shape[:-1] != labels_N.shape or labels_N.shape != text_N.shape:
        raise ValueError(
            f"expected logits (N, V), labels and texts of N positions, got "
            f"{shapes(logits_NV, labels_N, text_N)}"
        )
    with full_precision(logits_NV):
        each_N = F.cross_entropy(logits_NV.float(), labels_N, reduction="none")
        counted_N = (labels_N != IGNORED).to(each_N.dtype)
        pairs_N2 = torch.stack([each_N, counted_N], dim=1)
        return pairs_N2.new_zeros(texts, 2).index_add(0, text_N, pairs_N2)


def mlm_distilled(
    logits_BTV: Tensor, labels_BT: Tensor, teacher_BTV: Tensor, alpha: float | Tensor = 0.4
) -> Tensor:
    """(1 - alpha) cross-entropy with the masked ids + alpha with the teacher's distribution over
    the vocabulary.

    Momentum distillation of ALBEF (Li et al., arXiv 2107.07651, equation 7). The teacher, a moving
    average of the model, reads the same masked text; no gradient reaches it. Shapes, result and
    errors as for `mlm`; ValueError also on an alpha outside [0, 1].
    """
    check_share("alpha", alpha)
    if teacher_BTV.shape != logits_BTV.shape:
        raise ValueError(
            f"student and teacher logits must have equal shapes, got "
            f"{shapes(logits_BTV, teacher_BTV)}"
        )
    logits_NV, labels_N = _masked_only(logits_BTV, labels_BT)
    teacher_NV, _ = _masked_only(teacher_BTV.detach(), labels_BT)
    with full_precision(logits_NV):
        counted_N = labels_N != IGNORED
        target_NV = teacher_NV.float().softmax(dim=-1) * counted_N[:, None]
        total = F.cross_entropy(logits_NV.float(), target_NV, reduction="sum")
        soft = mean_of(total, counted_N.sum())
        return (1 - alpha) * _hard(logits_NV, labels_N) + alpha * soft


def symmetric_kl(logits_NV: Tensor, other_NV: Tensor, count: Tensor | None = None) -> Tensor:
    """KL(p || q) + KL(q || p) of two predictions at masked positions, the mean over positions
    (`count` as in `mlm`).

    In each term only the second distribution has a gradient (ALUM, Liu et al., arXiv 2004.08994).
    Raises ValueError on different shapes.
    """
    if logits_NV.shape != other_NV.shape:
        raise ValueError(f"expected logits of one shape (N, V), got {shapes(logits_NV, other_NV)}")
    with full_precision(logits_NV):
        log_p_NV = logits_NV.float().log_softmax(dim=-1)
        log_q_NV = other_NV.float().log_softmax(dim=-1)
        total = F.kl_div(log_q_NV, log_p_NV.detach(), log_target=True, reduction="sum")
        total = total + F.kl_div(log_p_NV, log_q_NV.detach(), log_target=True, reduction="sum")
        return total / max(len(logits_NV), 1) if count is None else mean_of(total, count)


def masked_positions(labels_BT: Tensor) -> Tensor:
    """Return (N,) int64: the positions of labels other than -100 in the flattened (B * T) batch,
    in order.
    """
    return (labels_BT.flatten() != IGNORED).nonzero().squeeze(1)


def _hard(logits_NV: Tensor, labels_N: Tensor, count: Tensor | None = None) -> Tensor:
    with full_precision(logits_NV):
        total = F.cross_entropy(logits_NV.float(), labels_N, reduction="sum")
        return mean_of(total, (labels_N != IGNORED).sum() if count is None else count)


def _masked_only(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and labels of the masked positions: only these are copied to float32.

    Logits (N, V) are returned as they are, so that no shape depends on values.
    """
    if labels_BT.ndim == 0 or logits_BTV.shape[:-1] != labels_BT.shape:
        raise ValueError(
            f"logits must have the shape of the labels and a last dimension V, got "
            f"{shapes(logits_BTV, labels_BT)}"
        )
    if labels_BT.ndim == 1:
        return logits_BTV, labels_BT
    index_N = masked_positions(labels_BT)
    return logits_BTV.flatten(0, -2)[index_N], labels_BT.flatten()[index_N]


# Masked image modelling: prediction of the pixels of masked patches.
#
#     mask = mask_patches(len(image_BCHW), patches=324, ratio=0.75, generator=generator,
#     device=image_BCHW.device)
#     visible_BKD = encode(mask.keep(tokens_BPD))                       # only these patches are
#     encoded
#     predicted_BPD = decode(mask.restore(visible_BKD, mask_token_D))
#     loss = mim(predicted_BPD, standardize(patchify(image_BCHW, 16)), mask.masked_BP)
#
# B images, P patches, K kept patches; D values of a patch: patch * patch * C.

_ROUNDING = 1e-6
"""Larger than the error of a product: (1 - 0.9) * 10 is slightly less than one in floating
point.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PatchMask:
    """Kept and masked patches of each image, equally many in each."""

    kept_BK: Tensor
    """int64, positions of the kept patches, ascending."""
    restore_BP: Tensor
    """int64: index of patch p in the kept ones followed by the masked ones."""
    masked_BP: Tensor
    """bool, True on masked patches."""

    def keep(self, x_BPD: Tensor) -> Tensor:
        """Return (B, K, D): the kept patches. Add position embeddings before."""
        return x_BPD.gather(1, self.kept_BK[:, :, None].expand(-1, -1, x_BPD.shape[2]))

    def restore(self, x_BKD: Tensor, filler_D: Tensor) -> Tensor:
        """Return (B, P, D): the kept patches in their places, and the filler (the mask token) in
        all others.
        """
        batch, visible, dim = x_BKD.shape
        missing = self.restore_BP.shape[1] - visible
        full_BPD = torch.cat([x_BKD, filler_D.to(x_BKD.dtype).expand(batch, missing, dim)], dim=1)
        return full_BPD.gather(1, self.restore_BP[:, :, None].expand(-1, -1, dim))


def mask_patches(
    batch: int,
    patches: int,
    ratio: float,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> PatchMask:
    """Keep floor((1 - ratio) * patches) patches of each image, uniformly at random (MAE, arXiv
    2111.06377, section 3).

    The released code of MAE, M3AE and M2I2 rounds down too: of 256 patches, a ratio of 0.15 keeps
    217.

    Args:
        batch, patches: B and P.
        ratio: share to mask; 0.75 in MAE and M3AE.
        generator: generator on the CPU or on the device. A CPU generator gives the same mask on
            every device.
        device: device of the result.

    Raises ValueError when the ratio is outside [0, 1) or would leave no patch.
    """
    visible = math.floor((1 - ratio) * patches + _ROUNDING)
    if not 0 <= ratio < 1 or visible < 1:
        raise ValueError(
            f"expected a ratio within [0, 1) that keeps a patch, got {ratio} of {patches} patches"
        )
    noise_BP = torch.rand(batch, patches, generator=generator, device=generator.device).to(device)
    order_BP = noise_BP.argsort(dim=1, stable=True)
    kept_BK = order_BP[:, :visible].sort(dim=1).values
    taken_BM = order_BP[:, visible:].sort(dim=1).values
    restore_BP = torch.cat([kept_BK, taken_BM], dim=1).argsort(dim=1)
    return PatchMask(kept_BK, restore_BP, restore_BP >= visible)


def mask_blocks(
    batch: int,
    grid: tuple[int, int],
    scales: Sequence[int],
    ratio: float,
    generator: torch.Generator,
) -> Tensor:
    """(B, P) bool: mask square blocks of s x s cells, with one of the scales drawn for each image.

    At each scale `round(ratio * blocks)` blocks are masked, but at least one, and not all if there
    are several.

    Args:
        batch: B.
        grid: (h, w) of the cells, multiples of every scale; P = h * w.
        scales: sides of the blocks in cells.
        ratio: share of the blocks to mask.
        generator: generator on the CPU.
    """
    choices = []
    for scale in scales:
        blocks = (grid[0] // scale, grid[1] // scale)
        count = blocks[0] * blocks[1]
        masked = min(max(round(ratio * count), 1), max(count - 1, 1))
        rank_BQ = torch.rand(batch, count, generator=generator).argsort(dim=1).argsort(dim=1)
        mask_Bhw = (rank_BQ < masked).unflatten(1, blocks)
        choices.append(
            mask_Bhw.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2).flatten(1)
        )
    drawn_B = torch.randint(len(choices), (batch,), generator=generator)
    return torch.stack(choices)[drawn_B, torch.arange(batch)]


def patchify(image_BCHW: Tensor, patch: int) -> Tensor:
    """Return (B, P, D): patches row by row, the pixels of each in the order (row, column, channel).

    Raises ValueError unless height and width are multiples of `patch`, in pixels.
    """
    batch, channels, height, width = image_BCHW.shape
    if height % patch or width % patch:
        raise ValueError(
            f"an image of {height} x {width} pixels does not divide into patches of {patch}"
        )
    rows = height // patch
    columns = width // patch
    split = image_BCHW.reshape(batch, channels, rows, patch, columns, patch)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, patch * patch * channels)


def unpatchify(patches_BPD: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Return (B, C, H, W): the inverse of `patchify`. `grid` is (rows, columns) of patches; C
    follows from D.

    Raises ValueError where grid and patch do not fit P and D.
    """
    (batch, patches, dim), (rows, columns) = patches_BPD.shape, grid
    if rows * columns != patches or dim % patch**2:
        raise ValueError(
            f"{patches} patches of {dim} values are not a {rows} x {columns} grid of {patch} x "
            f"{patch}"
        )
    split = patches_BPD.reshape(batch, rows, columns, patch, patch, dim // patch**2)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, rows * patch, columns * patch)


def blank(image_BCHW: Tensor, masked_BP: Tensor, patch: int) -> Tensor:
    """Return the image with zeros, the mean of normalised pixels, in the masked patches.

    For encoders that cannot drop patches, as in SimMIM (Xie et al., arXiv 2111.09886). Raises
    ValueError unless height and width are multiples of `patch`, in pixels.
    """
    grid = (image_BCHW.shape[2] // patch, image_BCHW.shape[3] // patch)
    return unpatchify(
        patchify(image_BCHW, patch).masked_fill(masked_BP[:, :, None], 0.0), patch, grid
    )


def standardize(patches_BPD: Tensor, eps: float = 1e-6) -> Tensor:
    """Standardise each patch by its mean and unbiased variance + eps (MAE's `norm_pix`); float32,
    no gradient.

    A constant patch, such as the border of a film, becomes zeros. Raises ValueError for patches of
    one number.
    """
    if patches_BPD.shape[-1] < 2:
        raise ValueError("a patch of one value has no variance: use larger patches")
    with full_precision(patches_BPD), torch.no_grad():
        variance_BP1, mean_BP1 = torch.var_mean(
            patches_BPD.float(), dim=-1, correction=1, keepdim=True
        )
        return (patches_BPD.float() - mean_BP1) / (variance_BP1 + eps).sqrt()


def mim(predicted_BPD: Tensor, target_BPD: Tensor, masked_BP: Tensor) -> Tensor:
    """Squared error, averaged over the pixels of a patch, then over all masked patches of the batch
    (MAE, section 3).

    Args:
        predicted_BPD: all patches; visible ones are ignored.
        target_BPD: `standardize(patchify(image))`, or plain `patchify(image)` for methods that
            predict raw pixels.
        masked_BP: bool; all False for samples without an image.

    Returns a scalar: (D - 1) / D for predictions of zero and standardised targets, less the share
    of constant patches; 0 with a zero gradient where nothing is masked. Raises ValueError on
    unequal shapes.
    """
    if predicted_BPD.shape != target_BPD.shape or masked_BP.shape != predicted_BPD.shape[:-1]:
        got = shapes(predicted_BPD, target_BPD, masked_BP)
        raise ValueError(f"predicted and target must be (B, P, D) and the mask (B, P), got {got}")
    with full_precision(predicted_BPD):
        masked_BP = masked_BP.bool()
        error_BPD = predicted_BPD.float() - target_BPD.float()
        error_BP = error_BPD.masked_fill(~masked_BP[:, :, None], 0.0).square().mean(dim=-1)
        return mean_of(error_BP.sum(), masked_BP.sum())


# Losses of masked regions: their features, and the detector's distribution over its classes.
#
# N masked regions, D features, K classes.


def region_regression(predicted_ND: Tensor, true_ND: Tensor, *, smooth: bool = False) -> Tensor:
    """Mean squared error of features (MRFR; UNITER, Chen et al., arXiv 1909.11740, section 3.2).

    With `smooth`, the smooth L1 error of LXMERT (Tan and Bansal, arXiv 1908.07490, section 3.1). No
    gradient is taken for `true_ND`.

    Returns a scalar; 0 with a zero gradient for no region. Raises ValueError on inconsistent
    shapes.
    """
    _check(predicted_ND, true_ND)
    with full_precision(predicted_ND):
        error = F.smooth_l1_loss if smooth else F.mse_loss
        return error(predicted_ND.float(), true_ND.detach().float(), reduction="sum") / max(
            predicted_ND.numel(), 1
        )


def region_kl(logits_NK: Tensor, classes_NK: Tensor) -> Tensor:
    """Mean over regions of KL(classes || softmax(logits)) (MRC-kl; UNITER, section 3.2).

    UNITER's released code divides by the number of classes as well.

    Args:
        logits_NK: predictions.
        classes_NK: the detector's distributions; rows of zeros do not count.

    Returns a scalar; 0 with a zero gradient for no region. Raises ValueError on inconsistent
    shapes.
    """
    _check(logits_NK, classes_NK)
    with full_precision(logits_NK):
        total = F.kl_div(logits_NK.float().log_softmax(dim=1), classes_NK.float(), reduction="sum")
        return total / (classes_NK > 0).any(dim=1).sum().clamp(min=1)


def region_labels(logits_NK: Tensor, classes_NK: Tensor) -> Tensor:
    """Mean over regions of the cross-entropy with the detector's best class, times its confidence
    (LXMERT, 3.1).

    Arguments, result and errors as for `region_kl`.
    """
    _check(logits_NK, classes_NK)
    with full_precision(logits_NK):
        confidence_N, label_N = classes_NK.float().max(dim=1)
        error_N = F.cross_entropy(logits_NK.float(), label_N, reduction="none")
        return (confidence_N * error_N).sum() / (confidence_N > 0).sum().clamp(min=1)


def _check(predicted: Tensor, true: Tensor) -> None:
    if predicted.ndim != 2 or predicted.shape != true.shape or predicted.shape[1] == 0:
        raise ValueError(
            f"expected predictions and targets of one shape (N, values), got "
            f"{shapes(predicted, true)}"
        )
