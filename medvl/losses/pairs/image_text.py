"""Contrast of images and texts against a moving average of the model (ITC), and image-text
matching (ITM).

    # computed without gradient
    keys = queue.keys(image_momentum_BE, text_momentum_BE, names_B)
    loss = itc(image_BE, text_BE, keys.image_NE, keys.text_NE, temperature, alpha, keys.positive_BN)
    # in training only
    queue.enqueue(gather(image_momentum_BE), gather(text_momentum_BE), gather(names_B))

    same_BB = same_pairs(text_ids(batch.ids_BT, batch.mask_BT), name_ids(studies))
    pairs = random_pairs(same_BB, generator)  # half of the rows keep their image
    # B positives and 2 B hard negatives
    pairs = hard_pairs(similarity_BB / temperature, same_BB, generator)
    logits_N2 = head(fuse(image_states_BPD[pairs.image_N], text_states_BTD[pairs.text_N]))
    loss = itm(logits_N2, pairs.matched_N)

The moving average itself is `torch.optim.swa_utils.AveragedModel`. ALBEF (Li et al., arXiv
2107.07651), section 3.2 and 3.3; M2I2 and MUMC train with the same losses. Negatives of ITM come
from the batch, so nothing is decoded or encoded for them; rows that `same_BB` marks are never
drawn.

B pairs of this rank, Q rows of the queue, E shared embedding dim. In ITC, N = B + (rows in the
queue) keys; in ITM, N pairs.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.losses.common import check_share, full_precision, one_number, shapes


def itc(
    image_BE: Tensor,
    text_BE: Tensor,
    image_keys_NE: Tensor,
    text_keys_NE: Tensor,
    temperature: Tensor | float,
    alpha: float | Tensor = 0.4,
    positive_BN: Tensor | None = None,
) -> Tensor:
    """Mean of both directions' cross-entropy with (1 - alpha) one-hot + alpha teacher targets
    (ALBEF, equation 6).

    Embeddings are L2-normalised by the caller. With alpha 0 and the batch's own embeddings as keys,
    it is `clip`.

    Args:
        image_BE, text_BE: embeddings of the model.
        image_keys_NE, text_keys_NE: embeddings of the moving average: first this batch, row for
            row, then the queue. The teacher's targets are computed from them without gradient; as
            keys they keep their gradient.
        temperature: divides all similarities, also the teacher's; one number. See
            `clamp_temperature_`.
        alpha: weight of the teacher, 0 at the start of training: see `ramped_alpha`.
        positive_BN: bool, keys that are positives of a row besides its own; the one-hot target is
            divided evenly among them. None: key i for row i alone; a pair's own past embeddings in
            the queue are then negatives.

    Returns a scalar, near ln N for unrelated embeddings; 0 with a zero gradient for no pair. Raises
    ValueError on inconsistent shapes, a temperature of zero or below, or an alpha outside [0, 1].
    """
    check_share("alpha", alpha)
    temperature = one_number("temperature", temperature)
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    batch = len(image_BE)
    count = len(image_keys_NE)
    _check_shapes(image_BE, text_BE, image_keys_NE, text_keys_NE)
    if positive_BN is not None and positive_BN.shape != (batch, count):
        raise ValueError(f"positive_BN must be ({batch}, {count}), got {tuple(positive_BN.shape)}")
    with full_precision(image_BE):
        hard_BN = torch.eye(batch, count, device=image_BE.device)
        if positive_BN is not None:
            hard_BN = F.normalize(torch.maximum(hard_BN, positive_BN.float()), p=1.0, dim=1)
        image_to_text = _direction(
            image_BE, image_keys_NE[:batch], text_keys_NE, temperature, alpha, hard_BN
        )
        text_to_image = _direction(
            text_BE, text_keys_NE[:batch], image_keys_NE, temperature, alpha, hard_BN
        )
        return (image_to_text + text_to_image) / (2 * max(batch, 1))


def unimodal_itc(
    image_BE: Tensor,
    text_BE: Tensor,
    image_keys_NE: Tensor,
    text_keys_NE: Tensor,
    temperature: Tensor | float,
    positive_BN: Tensor | None = None,
) -> Tensor:
    """Mean of the images' cross-entropy against images and of the texts' against texts, with
    one-hot targets (MUMC).

    A row's target is its own key: the same image or text, encoded by the moving average. Arguments,
    result and errors are as for `itc`.
    """
    return itc(image_BE, text_BE, text_keys_NE, image_keys_NE, temperature, 0.0, positive_BN)


def ramped_alpha(step: int | Tensor, ramp_steps: int, alpha: float = 0.4) -> float | Tensor:
    """Return the teacher's weight: linear from 0 to `alpha` at `ramp_steps` (ALBEF, M2I2: one
    epoch; MUMC: two).

    Of a tensor it is a tensor, without waiting for its device.
    """
    if ramp_steps <= 0:
        return alpha
    share = step / ramp_steps
    return alpha * (share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share))


def clamp_temperature_(temperature: Tensor, low: float = 0.001, high: float = 0.5) -> None:
    """Clamp a learned temperature to ALBEF's range, in place, before it is used.

    A clamp inside the loss has no gradient outside the range, so the parameter could not return.
    """
    with torch.no_grad():
        temperature.clamp_(low, high)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Keys that the rows of a batch are compared with."""

    image_NE: Tensor
    text_NE: Tensor
    positive_BN: Tensor
    """bool, True where row i and key j have the same name."""


class MomentumQueue(nn.Module):
    """The latest `size` pairs of embeddings of the moving average, over all ranks, oldest
    overwritten first.

    It starts empty, without random vectors. Its buffers are part of the checkpoint. The batch size
    need not divide the size of the queue.

    Args:
        size: capacity in pairs; 65,536 in ALBEF, 57,600 in BLIP.
        dim: E.

    Raises ValueError on a negative size or a dim below 1.
    """

    same_on_all_ranks: ClassVar[bool] = True
    """Buffers are equal on all ranks: DDP need not broadcast them
    (`medvl.train.parallel.distributed.unshared_buffers`).
    """

    image_QE: Tensor
    text_QE: Tensor
    names_Q: Tensor
    seen: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 0 or dim < 1:
            raise ValueError(
                f"expected a size of 0 or above and a dim of 1 or above, got {size} and {dim}"
            )
        self.size = size
        self.register_buffer("image_QE", torch.zeros(size, dim))
        self.register_buffer("text_QE", torch.zeros(size, dim))
        self.register_buffer("names_Q", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return min(int(self.seen), self.size)

    def keys(self, image_BE: Tensor, text_BE: Tensor, names_B: Tensor) -> Keys:
        """Return this batch's momentum embeddings, then the queue's, as a copy that `enqueue` does
        not change.

        `names_B`, int64, identify pairs: `name_ids` of studies, or of sample keys.
        """
        size = len(self)
        names_N = torch.cat([names_B, self.names_Q[:size]])
        return Keys(
            image_NE=torch.cat([image_BE.float(), self.image_QE[:size]]),
            text_NE=torch.cat([text_BE.float(), self.text_QE[:size]]),
            positive_BN=names_B[:, None] == names_N,
        )

    @torch.no_grad()
    def enqueue(self, image_BE: Tensor, text_BE: Tensor, names_B: Tensor) -> None:
        """Add momentum embeddings, of all ranks (`medvl.losses.common.gather`) so that all queues
        stay equal.

        Raises ValueError when there are not as many of each.
        """
        if not len(image_BE) == len(text_BE) == len(names_B):
            raise ValueError(
                f"{len(image_BE)} images, {len(text_BE)} texts and {len(names_B)} names do not "
                f"form pairs"
            )
        skipped = max(len(names_B) - self.size, 0)  # what the same call would overwrite
        place_B = torch.arange(skipped, len(names_B), device=self.seen.device)
        place_B = (self.seen + place_B) % max(self.size, 1)
        self.image_QE[place_B] = image_BE[skipped:].to(self.image_QE.dtype)
        self.text_QE[place_B] = text_BE[skipped:].to(self.text_QE.dtype)
        self.names_Q[place_B] = names_B[skipped:]
        self.seen += len(names_B)


def _direction(
    query_BE: Tensor,
    teacher_BE: Tensor,
    keys_NE: Tensor,
    temperature: Tensor | float,
    alpha: float | Tensor,
    hard_BN: Tensor,
) -> Tensor:
    """Cross-entropy over the keys, summed over queries; `teacher_BE` are the queries of the
    moving average.
    """
    logits_BN = query_BE.float() @ keys_NE.float().T / temperature
    target_BN = hard_BN
    if isinstance(alpha, Tensor) or alpha:
        with torch.no_grad():
            soft_BN = (teacher_BE.float() @ keys_NE.float().T / temperature).softmax(dim=1)
        target_BN = alpha * soft_BN + (1 - alpha) * hard_BN
    return F.cross_entropy(logits_BN, target_BN, reduction="sum")


def _check_shapes(
    image_BE: Tensor, text_BE: Tensor, image_keys_NE: Tensor, text_keys_NE: Tensor
) -> None:
    shapes = [tuple(tensor.shape) for tensor in (image_BE, text_BE, image_keys_NE, text_keys_NE)]
    pairs = shapes[0]
    keys = shapes[2]
    if (
        len(pairs) != 2
        or shapes[1] != pairs
        or shapes[3] != keys
        or keys[1:] != pairs[1:]
        or keys[0] < pairs[0]
    ):
        raise ValueError(
            f"itc needs pairs (B, E) twice and keys (N, E) twice with N of at least B, got {shapes}"
        )


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
    allowed_BB = _other_pairs(same_BB)
    device = allowed_BB.device
    batch = len(allowed_BB)
    possible_B = allowed_BB.any(dim=1)
    order_B = torch.rand(batch, generator=generator, device=generator.device).to(device)
    # rows with no negative come last
    rank_B = order_B.masked_fill(~possible_B, 2.0).argsort(stable=True).argsort()
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
    allowed_BB = _other_pairs(same_BB)
    if similarity_BB.shape != same_BB.shape:
        raise ValueError(
            f"similarity is {tuple(similarity_BB.shape)}, same_BB is {tuple(same_BB.shape)}"
        )
    row_B = torch.arange(len(same_BB), device=same_BB.device)
    # false image of text j, from column j
    image_B = _draw(_add_floor(similarity_BB.T, floor), allowed_BB.T, generator)
    text_B = _draw(_add_floor(similarity_BB, floor), allowed_BB, generator)
    to_images_B = allowed_BB.any(dim=0)
    to_texts_B = allowed_BB.any(dim=1)
    image_N = torch.cat([row_B, image_B[to_images_B], row_B[to_texts_B]])
    text_N = torch.cat([row_B, row_B[to_images_B], text_B[to_texts_B]])
    return MatchingPairs(
        image_N, text_N, torch.arange(len(image_N), device=image_N.device) < len(row_B)
    )


def _other_pairs(same_BB: Tensor) -> Tensor:
    if same_BB.ndim != 2 or same_BB.shape[0] != same_BB.shape[1] or same_BB.dtype != torch.bool:
        raise ValueError(
            f"same_BB must be a bool square, got {tuple(same_BB.shape)} of {same_BB.dtype}"
        )
    return ~same_BB & ~torch.eye(len(same_BB), dtype=torch.bool, device=same_BB.device)


def _add_floor(logits_BB: Tensor, floor: float) -> Tensor:
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
