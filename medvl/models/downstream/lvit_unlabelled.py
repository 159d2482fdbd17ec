"""Unlabelled images of LViT (arXiv 2206.14718): moving averages of pseudo labels (EPI) and reference masks (LV).

The released code has neither, so both follow the paper. Buffers are equal on all ranks: each rank stores the rows of
all. Shape letters: B images of this rank, N of all ranks; R references; L labels; D width of a text vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.losses.gather import gather, mean_over_ranks
from medvl.losses.precision import full_precision


class PseudoLabels(nn.Module):
    """A probability map for each unlabelled image, in the frame of the image before it is turned.

    P_t = beta P_(t-1) + (1 - beta) P, where P is the model's prediction; the first prediction is taken as it is. A map
    takes two bytes a pixel and label, in a checkpoint too.

    Args:
        images: number of unlabelled images.
        labels, size: planes, height and width of a map.
        beta: weight of the past.
    """

    same_on_all_ranks = True

    def __init__(self, images: int, labels: int, size: int, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.map_MLHW: Tensor
        self.known_M: Tensor
        self.register_buffer("map_MLHW", torch.zeros(images + 1, labels, size, size, dtype=torch.float16))
        self.register_buffer(
            "known_M", torch.zeros(images + 1, dtype=torch.bool)
        )  # the last row is for labelled images

    @torch.no_grad()
    def update(self, prob_BLHW: Tensor, number_B: Tensor, turn_B22: Tensor | None) -> Tensor:
        """Add predictions and return the updated pseudo labels (B, L, H, W) in the frame of the predictions.

        Args:
            prob_BLHW: predictions for the augmented images of this rank.
            number_B: number of the unlabelled image in each row; -1 for labelled images, whose result is meaningless.
            turn_B22: how each image was turned (`DenseBatch.turn_B22`); None: not at all.
        """
        if turn_B22 is None:
            turn_B22 = torch.eye(2, device=prob_BLHW.device).expand(len(prob_BLHW), 2, 2)
        number_B = torch.where(number_B < 0, len(self.known_M) - 1, number_B)
        upright_BLHW, seen_BLHW = (
            turned(each, turn_B22.mT)
            for each in (prob_BLHW.float(), torch.ones_like(prob_BLHW[:, :1], dtype=torch.float32))
        )
        number_N, upright_NLHW, seen_NLHW = gather(number_B), gather(upright_BLHW), gather(seen_BLHW)
        old_NLHW, known_N = self.map_MLHW[number_N].float(), self.known_M[number_N]
        beta_N = torch.where(known_N, self.beta, 0.0)[:, None, None, None]
        new_NLHW = beta_N * old_NLHW + (1 - beta_N) * upright_NLHW
        new_NLHW = torch.where(seen_NLHW > 0.999, new_NLHW, old_NLHW)
        self.map_MLHW[number_N] = new_NLHW.half()
        self.known_M[number_N] = True
        return turned(self.map_MLHW[number_B].float(), turn_B22)

    def fill(self, mask_BLHW: Tensor, prob_BLHW: Tensor, number_B: Tensor, turn_B22: Tensor | None) -> Tensor:
        """Update the pseudo labels; return masks in which they are those of unlabelled images, 1 from 0.5 on."""
        pseudo_BLHW = self.update(prob_BLHW, number_B, turn_B22)
        return torch.where(number_B[:, None, None, None] < 0, mask_BLHW, (pseudo_BLHW >= 0.5).float())


class References(nn.Module):
    """The last labelled images that had a text: a vector of the text, and the mask.

    The paper compares with 14 fixed pairs; the newest R labelled pairs need no selection by hand. The LV loss uses the
    prediction itself, because a pseudo label passes on only a hundredth of its gradient.
    """

    same_on_all_ranks = True

    def __init__(self, references: int, dim: int, labels: int, size: int) -> None:
        super().__init__()
        self.text_RD: Tensor
        self.mask_RLHW: Tensor
        self.filled_R: Tensor
        self.register_buffer("text_RD", torch.zeros(references, dim))
        self.register_buffer("mask_RLHW", torch.zeros(references, labels, size, size, dtype=torch.uint8))
        self.register_buffer("filled_R", torch.zeros(references, dtype=torch.bool))

    @torch.no_grad()
    def enter(self, text_BD: Tensor, mask_BLHW: Tensor, chosen_B: Tensor) -> None:
        """Replace the oldest entries by the chosen rows of all ranks."""
        filled = torch.cat([gather(chosen_B), self.filled_R])
        newest_R = (~filled).int().argsort(stable=True)[: len(self.filled_R)]
        self.text_RD = torch.cat([gather(text_BD.float()), self.text_RD])[newest_R]
        self.mask_RLHW = torch.cat([gather(mask_BLHW.to(torch.uint8)), self.mask_RLHW])[newest_R]
        self.filled_R = filled[newest_R]

    def loss(self, prob_BLHW: Tensor, text_BD: Tensor, compared_B: Tensor) -> Tensor:
        """Return the LV loss, a mean over the chosen rows of all ranks; 0 while there is no reference."""
        apart_B = losses.contrastive_mask(prob_BLHW, self.nearest(text_BD))
        return mean_over_ranks(apart_B, compared_B & self.filled_R.any())

    @torch.no_grad()
    def nearest(self, text_BD: Tensor) -> Tensor:
        """Return (B, L, H, W): the mask of the reference with the most similar text; zeros while there is none."""
        with full_precision(text_BD):  # in 16 bits, most cosines of similar texts are equal
            cosine_BR = F.normalize(text_BD.float(), dim=1) @ F.normalize(self.text_RD, dim=1).T
        best_B = cosine_BR.masked_fill(~self.filled_R, -2.0).argmax(dim=1)
        return self.mask_RLHW[best_B].float()


def turned(map_BLHW: Tensor, turn_B22: Tensor) -> Tensor:
    """Return square maps turned about their centres as `medvl.data.transforms.turning.turn` turns images."""
    theta_B23 = F.pad(turn_B22.to(map_BLHW.dtype), (0, 1))
    with full_precision(map_BLHW):  # in 16 bits, places are wrong by a part of a pixel
        grid_BHW2 = F.affine_grid(theta_B23, list(map_BLHW.shape), align_corners=False)
        return F.grid_sample(map_BLHW, grid_BHW2, align_corners=False)
