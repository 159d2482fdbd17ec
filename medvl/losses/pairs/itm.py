"""Image-text matching loss, and two ways to choose pairs that do not match.

    same_BB = same_pairs(text_ids(batch.ids_BT, batch.mask_BT), name_ids(studies)) pairs =
    random_pairs(same_BB, generator)  # half of the rows keep their image pairs =
    hard_pairs(similarity_BB / temperature, same_BB, generator)  # B positives, 2 B hard negatives
    logits_N2 = head(fuse(image_states_BPD[pairs.image_N], text_states_BTD[pairs.text_N])) loss =
    itm(logits_N2, pairs.matched_N)

Negatives come from the batch, so nothing is decoded or encoded for them. Rows that `same_BB` marks
are never drawn.

B rows of a batch, N pairs.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.losses.precision import full_precision, shapes

_IGNORED = -100


@dataclasses.dataclass(frozen=True, slots=True)
class MatchingPairs:
    """Image and text of each pair, and whether they match."""

    image_N: Tensor
    """int64, rows of the batch."""
    text_N: Tensor
    """int64, rows of the batch."""
    matched_N: Tensor
    """bool."""

    def __len__(self) -> int:
        return len(self.matched_N)


def itm(logits_B2: Tensor, matched_B: Tensor, counted_B: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of "no match" (column 0) against "match" (column 1) (UNITER, arXiv
    1909.11740, section 3.2).

    Args:
        logits_B2: one row per pair.
        matched_B: bool or 0 and 1.
        counted_B: bool, False for pairs that are left out; None: all count.

    Returns a scalar, near ln 2 for an untrained head; 0 with a zero gradient for no pair. Raises
    ValueError on inconsistent shapes.
    """
    if logits_B2.ndim != 2 or logits_B2.shape[1] != 2 or matched_B.shape != logits_B2.shape[:1]:
        raise ValueError(
            f"expected logits (B, 2) and targets (B,), got {shapes(logits_B2, matched_B)}"
        )
    if counted_B is not None:
        if counted_B.shape != matched_B.shape:
            raise ValueError(f"counted_B must be ({len(matched_B)},), got {shapes(counted_B)}")
        counted_B = counted_B.bool()
    with full_precision(logits_B2):
        target_B = (
            matched_B.long()
            if counted_B is None
            else matched_B.long().masked_fill(~counted_B, _IGNORED)
        )
        pairs = max(len(logits_B2), 1) if counted_B is None else counted_B.sum().clamp(min=1)
        return (
            F.cross_entropy(logits_B2.float(), target_B, ignore_index=_IGNORED, reduction="sum")
            / pairs
        )


def random_pairs(same_BB: Tensor, generator: torch.Generator) -> MatchingPairs:
    """Pair every text once: floor(B / 2) of them, at random rows, with their own image, the others
    with a wrong one.

    This is the scheme of METER and M3AE, where a negative may be the positive; here negatives are
    drawn uniformly from the rows that `same_BB` allows. A row that is the same as all others keeps
    its image; where these are more than half of the rows, fewer than half are negatives.

    Args:
        same_BB: bool, True where two rows belong together
            (`medvl.losses.pairs.blockwise.same_pairs`).
        generator: generator on the CPU or on the device. A CPU generator gives the same pairs on
            every device.

    Raises ValueError unless `same_BB` is square.
    """
    allowed_BB = _allowed(same_BB)
    device = allowed_BB.device
    batch = len(allowed_BB)
    possible_B = allowed_BB.any(dim=1)
    order_B = torch.rand(batch, generator=generator, device=generator.device).to(device)
    rank_B = (
        order_B.masked_fill(~possible_B, 2.0).argsort(stable=True).argsort()
    )  # rows with no negative come last
    matched_B = (rank_B >= batch - batch // 2) | ~possible_B
    text_B = torch.arange(batch, device=device)
    wrong_B = _draw(torch.zeros(batch, batch, device=device), allowed_BB, generator)
    return MatchingPairs(torch.where(matched_B, text_B, wrong_B), text_B, matched_B)


def hard_pairs(
    similarity_BB: Tensor, same_BB: Tensor, generator: torch.Generator, floor: float = 0.0
) -> MatchingPairs:
    """Return B positives, then each text with a hard negative image, then each image with a hard
    negative text.

    A negative is drawn with the probability that the contrastive softmax gives it among the rows
    that are allowed (ALBEF, arXiv 2107.07651, section 3.2). ALBEF zeroes the diagonal of the
    softmax and draws from the rest, which fails where the diagonal has all of the mass; here the
    draw is made in log space. A row that allows no negative has none: N is 3 B less those.

    Args:
        similarity_BB: logits, temperature applied, images in rows and texts in columns; no gradient
            is taken.
        same_BB: bool, True where two rows belong together
            (`medvl.losses.pairs.blockwise.same_pairs`).
        generator: generator on the CPU or on the device.
        floor: added to every probability of the softmax over a whole row, before the rows that are
            not allowed are left out; MUMC and BLIP add 1e-4.

    Raises ValueError unless both are square and of equal size.
    """
    allowed_BB = _allowed(same_BB)
    if similarity_BB.shape != same_BB.shape:
        raise ValueError(
            f"similarity is {tuple(similarity_BB.shape)}, same_BB is {tuple(same_BB.shape)}"
        )
    row_B = torch.arange(len(same_BB), device=same_BB.device)
    image_B = _draw(
        _floored(similarity_BB.T, floor), allowed_BB.T, generator
    )  # false image of text j, from column j
    text_B = _draw(_floored(similarity_BB, floor), allowed_BB, generator)
    to_images_B = allowed_BB.any(dim=0)
    to_texts_B = allowed_BB.any(dim=1)
    image_N = torch.cat([row_B, image_B[to_images_B], row_B[to_texts_B]])
    text_N = torch.cat([row_B, row_B[to_images_B], text_B[to_texts_B]])
    return MatchingPairs(
        image_N, text_N, torch.arange(len(image_N), device=image_N.device) < len(row_B)
    )


def _allowed(same_BB: Tensor) -> Tensor:
    if same_BB.ndim != 2 or same_BB.shape[0] != same_BB.shape[1] or same_BB.dtype != torch.bool:
        raise ValueError(
            f"same_BB must be a bool square, got {tuple(same_BB.shape)} of {same_BB.dtype}"
        )
    return ~same_BB & ~torch.eye(len(same_BB), dtype=torch.bool, device=same_BB.device)


def _floored(logits_BB: Tensor, floor: float) -> Tensor:
    """Return logits of the probabilities of each row plus a constant."""
    return (logits_BB.float().softmax(dim=1) + floor).log() if floor else logits_BB


@torch.no_grad()
def _draw(logits_BB: Tensor, allowed_BB: Tensor, generator: torch.Generator) -> Tensor:
    """Return (B,) int64: one multinomial draw per row from the softmax over allowed columns; any
    where none is.

    Gumbel trick: the argmax of logit - log(exponential noise). Unlike in `torch.multinomial`,
    non-finite logits of a step that will be skipped do not raise an error on the device.
    """
    if len(logits_BB) == 0:
        return torch.zeros(0, dtype=torch.int64, device=logits_BB.device)
    noise_BB = torch.empty(logits_BB.shape, device=generator.device).exponential_(
        generator=generator
    )
    perturbed_BB = logits_BB.float().nan_to_num() - noise_BB.to(logits_BB.device).log()
    return perturbed_BB.masked_fill(~allowed_BB, -torch.inf).argmax(dim=1)
