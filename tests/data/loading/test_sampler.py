"""Batch samplers: pinned order, division among ranks, and grouping by image."""

import numpy as np

from medvl.data.loading.sampler import EvalSampler, MixedSampler, TrainSampler

PINNED = [[1, 11], [0, 2], [1, 10], [0, 9], [0, 11], [2, 10]]
"""First draws of a mixed epoch: pass and position."""


def test_train_order_is_pinned() -> None:
    """Another order would change every run that is resumed."""
    assert TrainSampler(8, 2, seed=3, rank=0, world=1).order(1).tolist() == [2, 1, 4, 0, 5, 7, 6, 3]


def test_train_sampler_starts_at_its_position_and_drops_the_remainder() -> None:
    sampler = TrainSampler(11, 4, seed=0, rank=0, world=1)
    sampler.epoch, sampler.batch = 2, 1
    assert len(sampler) == 2
    assert list(sampler) == [[(2, position) for position in sampler.order(2)[4:8].tolist()]]


def test_ranks_divide_a_global_batch() -> None:
    full = list(TrainSampler(8, 4, seed=1, rank=0, world=1))
    parts = [list(TrainSampler(8, 4, seed=1, rank=rank, world=2)) for rank in range(2)]
    assert [first + second for first, second in zip(*parts, strict=True)] == full


def test_samples_of_an_image_are_grouped() -> None:
    images_N = np.arange(12) % 4
    order = TrainSampler(12, 4, seed=5, rank=0, world=1, images_N=images_N, together=3).order(0)
    assert sorted(order.tolist()) == list(range(12))
    assert all(len(set(group)) == 1 for group in images_N[order].reshape(4, 3).tolist())


def test_eval_sampler_yields_each_position_once() -> None:
    batches = [list(EvalSampler(7, 2, seed=0, rank=rank, world=2)) for rank in range(2)]
    assert batches == [[[(0, 0), (0, 1)], [(0, 4), (0, 5)]], [[(0, 2), (0, 3)], [(0, 6)]]]
    assert [len(EvalSampler(7, 2, seed=0, rank=rank, world=2)) for rank in range(2)] == [2, 2]


def test_parts_are_drawn_in_their_shares_and_equally_often() -> None:
    """3 of 12 draws from a part of 8, and 9 from one of 4: over four epochs 12 and 36."""
    sampler = MixedSampler([8, 4], [1, 3], 4, seed=0, rank=0, world=1)
    assert sampler.draws == [3, 9]
    epochs = [sampler.passes(epoch) for epoch in range(4)]
    assert all((draws_N2[:, 1] < 8).sum() == 3 for draws_N2 in epochs)
    draws_N2 = np.concatenate(epochs)
    drawn_N = np.bincount(draws_N2[:, 1], minlength=12)
    assert set(drawn_N[:8].tolist()) == {1, 2}
    assert set(drawn_N[8:].tolist()) == {9}
    assert len(np.unique(draws_N2, axis=0)) == len(
        draws_N2
    )  # no two draws have the same augmentation
    assert (sampler.passes(1) == sampler.passes(1)).all()
    assert sampler.passes(0)[:6].tolist() == PINNED


def test_mixed_batches_start_at_a_position_and_are_divided_among_ranks() -> None:
    whole = MixedSampler([8, 4], [1, 1], 4, seed=1, rank=0, world=1)
    whole.epoch = 2
    full = list(whole)
    assert [len(batch) for batch in full] == [4, 4, 4]
    parts = []
    for rank in range(2):
        sampler = MixedSampler([8, 4], [1, 1], 4, seed=1, rank=rank, world=2)
        sampler.epoch, sampler.batch = 2, 1
        parts.append(list(sampler))
    assert [first + second for first, second in zip(*parts, strict=True)] == full[1:]
