"""Contrastive losses of dual-encoders.

Row i of `image_BE` and row i of `text_BE` are a pair; all other rows are negatives. In a run of
several ranks the caller gathers first (`medvl.losses.common.gather`); these functions do not
communicate.

A large matrix of logits is computed in blocks (`medvl.losses.pairs.blockwise`): the same value and
gradient, in memory that grows with B and not with its square.

Reports repeat, and the images of a study share one: with `groups` (`medvl.losses.pairs.blockwise`),
rows that agree in any of them are positives of each other. None of the papers does so; it is off by
default.

`organ_contrast` has N pairs of the global batch, O organs and E shared embedding dim.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.common import check_share, full_precision, one_number, product_dtype, shapes
from medvl.losses.pairs.blockwise import info_nce, pairwise_sigmoid

# B pairs, E shared embedding dim.


def convirt(
    image_BE: Tensor,
    text_BE: Tensor,
    temperature: float = 0.1,
    image_weight: float = 0.75,
    *,
    groups: Sequence[Tensor] = (),
) -> Tensor:
    """Weighted bidirectional InfoNCE over cosine similarities (Zhang et al., arXiv 2010.00747,
    equations 2 to 4).

    `image_weight` (the paper's lambda) is the share of the image-to-text direction. Rows need not
    have unit length. Log-softmax keeps the loss finite at any temperature, where a ratio of
    exponentials overflows below about 0.02.

    `groups`, (B,) each: a row's target is then uniform over all rows that agree with it in any of
    them.

    Returns a scalar; with random embeddings it is near ln B. Raises ValueError on unequal shapes, a
    temperature of zero or below, or a weight outside [0, 1].
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    check_share("image_weight", image_weight)
    _check_pairs(image_BE, text_BE, groups)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        scaled_BE = F.normalize(image_BE.float(), dim=-1) / temperature
        return info_nce(
            scaled_BE, F.normalize(text_BE.float(), dim=-1), image_weight, groups, products=products
        )


def clip(
    image_BE: Tensor, text_BE: Tensor, logit_scale: Tensor | float, *, groups: Sequence[Tensor] = ()
) -> Tensor:
    """Symmetric InfoNCE with a learned scale (Radford et al., arXiv 2103.00020, figure 3).

    The caller normalises the embeddings; `logit_scale` multiplies the similarities: the exponential
    of the parameter that models store, as a number or a tensor with one element. `groups` as for
    `convirt`.

    Returns a scalar. Raises ValueError on unequal shapes, or a scale of several numbers.
    """
    _check_pairs(image_BE, text_BE, groups)
    logit_scale = one_number("logit_scale", logit_scale)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        return info_nce(
            logit_scale * image_BE.float(), text_BE.float(), 0.5, groups, products=products
        )


def siglip(
    image_BE: Tensor,
    text_BE: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    groups: Sequence[Tensor] = (),
) -> Tensor:
    """Pairwise sigmoid loss (Zhai et al., arXiv 2303.15343, section 3.2): summed over all B x B
    pairs, divided by B.

    The caller normalises the embeddings. `logit_scale` multiplies the similarities and `logit_bias`
    is added, each a number or a tensor with one element. `groups`, (B,) each: rows that agree in
    any of them are positives.

    Returns a scalar. Raises ValueError on unequal shapes, or a scale or bias of several numbers.
    """
    _check_pairs(image_BE, text_BE, groups)
    logit_scale = one_number("logit_scale", logit_scale)
    logit_bias = one_number("logit_bias", logit_bias)
    products = product_dtype(image_BE)
    with full_precision(image_BE):
        scaled_BE = logit_scale * image_BE.float()
        return pairwise_sigmoid(scaled_BE, text_BE.float(), logit_bias, groups, products=products)


def _check_pairs(image_BE: Tensor, text_BE: Tensor, groups: Sequence[Tensor]) -> None:
    if image_BE.ndim != 2 or image_BE.shape != text_BE.shape:
        raise ValueError(
            f"image and text embeddings must both be (B, E), got {shapes(image_BE, text_BE)}"
        )
    if len(image_BE) == 0:
        raise ValueError("expected at least one pair, got an empty batch")
    if any(group_B.shape != image_BE.shape[:1] for group_B in groups):
        raise ValueError(
            f"groups must be ({len(image_BE)},) each, as many as pairs: got "
            f"{[tuple(g.shape) for g in groups]}"
        )


# Contrastive loss with soft targets, for images and texts that need not be pairs (MedCLIP).
#
#     similarity_NM = label_similarity(image_labels_NL, text_labels_ML)
#     loss = soft_targets(gather(image_BE), gather(text_BE), similarity_NM, logit_scale)
#
# In a run of several ranks the caller gathers embeddings and labels first
# (`medvl.losses.common.gather`); these functions do not communicate.
#
# N images, M texts, L labels, E shared embedding dim.

LabelSimilarity = Literal["dot", "clamp", "cosine"]


def soft_targets(
    image_NE: Tensor, text_ME: Tensor, targets_NM: Tensor, logit_scale: Tensor | float
) -> Tensor:
    """Mean of both directions' cross-entropy with soft targets (Wang et al., MedCLIP, arXiv
    2210.10163, eqs. 3 to 6).

    An image's targets over all texts are the softmax of its row of `targets_NM`, a text's targets
    over all images the softmax of its column; so each direction has targets that sum to 1, also
    where N and M differ.

    Args:
        image_NE, text_ME: L2-normalised by the caller. Image i and text i need not belong together.
        targets_NM: similarities before the softmax, such as those of `label_similarity`; they get
            no gradient. Minus infinity excludes a pair from the targets, but not every pair of a
            row or of a column may be excluded.
        logit_scale: multiplies the cosines: the exponential of the parameter that models store; one
            number.

    Returns a scalar: the mean over images plus the mean over texts, halved. 0 with a zero gradient
    without an image or without a text. Raises ValueError on inconsistent shapes.
    """
    logit_scale = one_number("logit_scale", logit_scale)
    fits = image_NE.ndim == text_ME.ndim == 2 and image_NE.shape[1] == text_ME.shape[1]
    if not fits or targets_NM.shape != (len(image_NE), len(text_ME)):
        got = shapes(image_NE, text_ME, targets_NM)
        raise ValueError(f"expected images (N, E), texts (M, E) and targets (N, M), got {got}")
    with full_precision(image_NE):
        logits_NM = logit_scale * image_NE.float() @ text_ME.float().T
        targets_NM = targets_NM.detach().float()
        image_to_text = F.cross_entropy(logits_NM, targets_NM.softmax(dim=1), reduction="sum")
        text_to_image = F.cross_entropy(logits_NM.T, targets_NM.T.softmax(dim=1), reduction="sum")
        return (image_to_text / max(len(image_NE), 1) + text_to_image / max(len(text_ME), 1)) / 2


def multi_positive(
    logits_NM: Tensor, positive_NM: Tensor, ignored_NM: Tensor | None = None
) -> Tensor:
    """Mean of both directions' cross-entropy, whose targets are equal shares among the positives of
    a row or a column.

    Args:
        logits_NM: any dimensions before N and M, over which the mean is taken.
        positive_NM: bool. Rows, and columns, without any positive do not count.
        ignored_NM: bool: pairs that are left out of the comparison unless they are positive; None:
            none.

    Returns a scalar: 0 with a zero gradient without a positive pair. Raises ValueError on
    inconsistent shapes.
    """
    logits_NM, positive_NM = _checked(logits_NM, positive_NM)
    if ignored_NM is not None:
        logits_NM = logits_NM.masked_fill(
            ignored_NM.bool() & ~positive_NM, torch.finfo(torch.float32).min
        )

    def direction(dim: int) -> Tensor:
        count_N1 = positive_NM.sum(dim=dim, keepdim=True)
        share_NM = positive_NM / count_N1.clamp(min=1)
        entropy_N1 = (share_NM * logits_NM.log_softmax(dim).masked_fill(~positive_NM, 0.0)).sum(
            dim, keepdim=True
        )
        return -entropy_N1.flatten(-2).sum(dim=-1).mean() / (count_N1 > 0).sum().clamp(min=1)

    return (direction(-1) + direction(-2)) / 2


def multi_hot(logits_NM: Tensor, positive_NM: Tensor, ignored_NM: Tensor | None = None) -> Tensor:
    """Sum of both directions' cross-entropy with targets of 1 for every positive, over N x M
    (MAVL's released code).

    A row with ten positives weighs more than ten with one, because its targets sum to ten.

    Args:
        logits_NM, positive_NM: as in `multi_positive`.
        ignored_NM: bool: pairs that are left out; rows without any other do not count in N. None:
            none.

    Returns a scalar: 0 with a zero gradient without a positive pair. Raises ValueError on
    inconsistent shapes.
    """
    logits_NM, positive_NM = _checked(logits_NM, positive_NM)
    rows = torch.tensor(len(positive_NM), device=logits_NM.device)
    if ignored_NM is not None:
        ignored_NM = ignored_NM.bool() & ~positive_NM
        rows = (~ignored_NM).any(dim=1).sum()
        logits_NM = logits_NM.masked_fill(ignored_NM, torch.finfo(torch.float32).min)
    both_NM = logits_NM.log_softmax(-1) + logits_NM.log_softmax(-2)
    total = both_NM.masked_fill(~positive_NM, 0.0).sum(dim=(-2, -1)).mean()
    return -total / (rows.clamp(min=1) * positive_NM.shape[1])


def _checked(logits_NM: Tensor, positive_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 logits and bool positives. Raises ValueError on inconsistent shapes."""
    if positive_NM.ndim != 2 or logits_NM.shape[-2:] != positive_NM.shape:
        raise ValueError(
            f"expected logits (..., N, M) and positives (N, M), got "
            f"{shapes(logits_NM, positive_NM)}"
        )
    return logits_NM.float(), positive_NM.bool()


def altered_texts(
    image_NE: Tensor,
    text_KE: Tensor,
    altered_KE: Tensor,
    own_K: Tensor,
    other_KN: Tensor,
    scale: Tensor | float,
) -> Tensor:
    """Return the cross-entropy of each text against the same text altered, (K,), such as with its
    findings denied: its own image prefers the text, and other images the altered one.

    With d the scaled cosine of an image with the text minus that with the altered one, it is the
    mean of log(1 + exp(-d)) of the own image, and of the mean of log(1 + exp(d)) over the others.
    Without the other images, a model could learn denials from the texts alone, because released
    texts affirm findings and altered ones deny them.

    Args:
        image_NE: all images.
        text_KE, altered_KE: texts, and what each is compared with. Rows need not have unit length.
        own_K: row of each text's image.
        other_KN: bool, images that are compared; a text without any counts by its own image.
        scale: factor of cosines.

    ln 2 for equal texts. Raises ValueError on inconsistent shapes.
    """
    if text_KE.shape != altered_KE.shape or other_KN.shape != (len(text_KE), len(image_NE)):
        raise ValueError(f"expected (K, E) twice and (K, N), got {shapes(text_KE, other_KN)}")
    with full_precision(image_NE):
        image_NE, text_KE, altered_KE = (
            F.normalize(each.float(), dim=1) for each in (image_NE, text_KE, altered_KE)
        )
        margin_KN = scale * ((text_KE - altered_KE) @ image_NE.T)
        own_loss_K = F.softplus(-margin_KN.gather(1, own_K[:, None])[:, 0])
        count_K = other_KN.sum(dim=1)
        total_K = F.softplus(margin_KN).masked_fill(~other_KN, 0.0).sum(dim=1)
        both_K = (own_loss_K + total_K / count_K.clamp(min=1)) / 2
        return torch.where(count_K > 0, both_K, own_loss_K)


def denial_holds(turned_KL: Tensor, found_NL: Tensor) -> Tensor:
    """Return (K, N) bool: whether an image contradicts a text, and agrees with its denial.

    An image contradicts a text that affirms findings where its report has none of them, not even
    with doubt, and a text that only denies findings where its report has one of them.

    Args:
        turned_KL: 1 for findings that a text affirms and its denial denies, -1 for those that it
            denies and its denial affirms, else 0.
        found_NL: values of the findings of each image: 1, 0 or -1 (uncertain).
    """
    affirmed_KL, denied_KL = (turned_KL > 0).float(), (turned_KL < 0).float()
    none_KN = affirmed_KL @ (found_NL != 0).float().T == 0
    any_KN = denied_KL @ (found_NL > 0).float().T > 0
    return torch.where(affirmed_KL.any(dim=1)[:, None], none_KN, any_KN)


def label_similarity(
    image_labels_NL: Tensor, text_labels_ML: Tensor, kind: LabelSimilarity = "cosine"
) -> Tensor:
    """Return (N, M) float32: the similarity of the labels of every image and every text, without
    gradient.

    Args:
        image_labels_NL, text_labels_ML: values of the labels as they are multiplied, such as 1 for
            a positive one and 0 for all others; NaN counts as 0.
        kind: "cosine", as in MedCLIP's paper (equation 3); "dot", the product that its released
            code takes, under which the softmax is nearly one-hot for samples with many labels;
            "clamp", the product limited to [-1, 1], as that code's documentation says. A sample
            without any label has a similarity of 0 to all.

    Raises ValueError on different numbers of labels, or on an unknown kind.
    """
    if kind not in get_args(LabelSimilarity):
        raise ValueError(
            f"kind must be one of {', '.join(get_args(LabelSimilarity))}, got {kind!r}"
        )
    if (
        image_labels_NL.ndim != 2
        or text_labels_ML.ndim != 2
        or image_labels_NL.shape[1] != text_labels_ML.shape[1]
    ):
        raise ValueError(
            f"expected labels (N, L) and (M, L), got {shapes(image_labels_NL, text_labels_ML)}"
        )
    with full_precision(image_labels_NL):
        image_NL, text_ML = (
            labels.detach().float().nan_to_num(0.0) for labels in (image_labels_NL, text_labels_ML)
        )
        if kind == "cosine":
            image_NL = F.normalize(image_NL, dim=1)
            text_ML = F.normalize(text_ML, dim=1)
        similarity_NM = image_NL @ text_ML.T
        return similarity_NM.clamp(-1.0, 1.0) if kind == "clamp" else similarity_NM


def organ_contrast(
    image_NOE: Tensor,
    text_NOE: Tensor,
    logit_scale: Tensor | float,
    *,
    present_NO: Tensor,
    normal_NO: Tensor,
    text_id_NO: Tensor,
) -> Tensor:
    """Return the cross-entropy of each organ between its vectors in images and in texts, (O,); the
    system sums them.

    The targets of a row are equal shares among its own text, the texts of all rows in which the
    organ is normal where it is normal in this one, and equal texts. The loss of an organ is the
    mean over rows and over both directions, 0 with a zero gradient where no row has it abnormal.

    Args:
        image_NOE, text_NOE: L2-normalised by the caller.
        logit_scale: multiplies the cosines: the inverse of the temperature; one number.
        present_NO: bool: rows that have the organ, in the image and in a text; others neither count
            nor are compared.
        normal_NO: bool.
        text_id_NO: int64: equal for equal texts (`medvl.losses.pairs.blockwise.text_ids`).

    Raises ValueError on inconsistent shapes.
    """
    logit_scale = one_number("logit_scale", logit_scale)
    flags = (present_NO, normal_NO, text_id_NO)
    if (
        image_NOE.ndim != 3
        or image_NOE.shape != text_NOE.shape
        or any(flag_NO.shape != image_NOE.shape[:2] for flag_NO in flags)
    ):
        raise ValueError(
            f"expected images and texts (N, O, E) and flags (N, O), got "
            f"{shapes(image_NOE, text_NOE, *flags)}"
        )
    present_ON, normal_ON = present_NO.bool().T, normal_NO.bool().T
    id_ON = text_id_NO.T
    own_NN = torch.eye(len(image_NOE), dtype=torch.bool, device=image_NOE.device)
    same_ONN = id_ON[:, :, None] == id_ON[:, None]
    both_normal_ONN = normal_ON[:, :, None] & normal_ON[:, None]
    compared_ONN = present_ON[:, :, None] & present_ON[:, None]
    positive_ONN = (own_NN | same_ONN | both_normal_ONN) & compared_ONN
    target_ONN = positive_ONN / positive_ONN.sum(dim=2, keepdim=True).clamp(min=1)
    with full_precision(image_NOE):
        logits_ONN = logit_scale * torch.einsum("noe,moe->onm", image_NOE.float(), text_NOE.float())
        # finite, so that a row without the organ has a finite gradient, which its target removes
        logits_ONN = logits_ONN.masked_fill(~compared_ONN, torch.finfo(torch.float32).min)
        both_ONN = logits_ONN.log_softmax(dim=2) + logits_ONN.transpose(1, 2).log_softmax(dim=2)
        entropy_O = -(target_ONN * both_ONN.masked_fill(~positive_ONN, 0.0)).sum(dim=(1, 2)) / 2
    count_O = present_ON.sum(dim=1)
    is_trained_O = (present_ON & ~normal_ON).any(dim=1)
    return torch.where(is_trained_O, entropy_O / count_O.clamp(min=1), 0.0 * entropy_O)
