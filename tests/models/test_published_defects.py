"""Defects that were measured in public code of systems of 2023 to 2025, and do not exist here.

Those of one system are beside its tests: RadZero's exponentials (`test_radzero.py`), CARZero's padded words
(`test_carzero.py`), MAVL's targets (`test_mavl.py`), MRM's padding (`test_mrm.py`), sides of mirrored images
(`test_medklip.py`, `test_statements.py`).
"""

import pytest
import torch
from helpers.contrastive_systems import clip
from torch import Tensor

from medvl import losses
from medvl.models import CLIPConfig


def aligned(count: int) -> Tensor:
    """Return embeddings of pairs that match and are orthogonal to all others."""
    return torch.eye(count, 64)


@pytest.mark.parametrize("count", [8, 64])
def test_aligned_pairs_have_hardly_a_loss_at_the_initial_scale(count: int) -> None:
    """CT-CLIP starts at a scale of e, where they have 0.38 with 8 pairs and 1.64 with 64."""
    assert losses.clip(aligned(count), aligned(count), torch.e) > 0.3
    scale = clip().logit_scale.exp()
    torch.testing.assert_close(scale, torch.tensor(1 / CLIPConfig().temperature))
    assert losses.clip(aligned(count), aligned(count), scale) < 1e-3


def test_soft_targets_of_correlated_samples_sum_to_one() -> None:
    """IMITATE's targets, 1 on the diagonal and more elsewhere, sum to 2.55 at 128 samples with correlations of 0.95."""
    similarity_NN = torch.full((128, 128), 0.95).fill_diagonal_(1.0)
    nothing_NE = torch.zeros(128, 4)
    loss = losses.soft_targets(nothing_NE, nothing_NE, similarity_NN, 1.0)
    torch.testing.assert_close(loss, torch.tensor(128.0).log())


def test_equal_captions_are_no_negatives() -> None:
    """With nine class names as captions, 11 % of the negatives of MedSigLIP's notebook are true pairs."""
    caption_B = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5])
    text_BE, image_BE = aligned(8)[caption_B], aligned(8)[caption_B].requires_grad_()
    with_groups = losses.siglip(image_BE, text_BE, 100.0, -10.0, groups=(caption_B,))
    without = losses.siglip(image_BE, text_BE, 100.0, -10.0)
    assert with_groups < 0.01 < 40 < without
    pushed_BE, kept_BE = (torch.autograd.grad(loss, image_BE)[0] for loss in (without, with_groups))
    assert (pushed_BE[0] @ text_BE[0]) > 10  # away from the caption that is its own as well
    assert kept_BE[0].norm() < 0.01
