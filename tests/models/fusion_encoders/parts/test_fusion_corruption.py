"""Sampling of image-text pairs and masked words: negatives never share a study or a text."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.fusion_samples import TINY, flags, make_batch, tiny_model, tiny_tokenizer

from medvl.losses.pairs.image_text import MatchingPairs
from medvl.models.base import complete_rows
from medvl.models.fusion_encoders.parts.inputs import same_rows, sample_pairs
from medvl.schema import Batch

TOKENIZER = tiny_tokenizer()
SYSTEMS = sorted(TINY.keys() - {"albef", "m2i2", "mumc"})
"""Systems with random pairs; the others sample them by similarity (test_fusion_albef)."""
STUDIES = ["a", "b", "a", "b", "a", "c"]


def wrong_pairs(pairs: MatchingPairs) -> list[tuple[int, int]]:
    """Return (image, text) of the pairs that do not match."""
    row_N = (~pairs.matched_N).nonzero().squeeze(1)
    return list(zip(pairs.image_N[row_N].tolist(), pairs.text_N[row_N].tolist(), strict=True))


def pairs_of(model: Any, batch: Batch) -> MatchingPairs:
    pairs: MatchingPairs = model.corrupt(batch).of(model.itm)
    return pairs


def test_same_rows_compares_study_text_and_groups() -> None:
    batch = make_batch(TOKENIZER, 6)  # texts 0 and 4, and 1 and 5, are equal
    assert same_rows(batch)[4].int().tolist() == [1, 0, 0, 0, 1, 0]
    assert same_rows(batch)[2].int().tolist() == [0, 0, 1, 0, 0, 0]
    by_study = same_rows(dataclasses.replace(batch, studies=STUDIES))
    assert by_study[0].int().tolist() == [1, 0, 1, 0, 1, 0]
    assert by_study[5].int().tolist() == [0, 1, 0, 0, 0, 1]
    assert same_rows(batch, torch.tensor([7, 7, 8, 9, 10, 11]))[0].int().tolist() == [
        1,
        1,
        0,
        0,
        1,
        0,
    ]


@pytest.mark.parametrize("name", SYSTEMS)
def test_negatives_never_share_a_study(name: str) -> None:
    """A report describes all images of its study, even if another sentence was sampled."""
    model: Any = tiny_model(name, TOKENIZER)
    batch = make_batch(TOKENIZER, 6, studies=STUDIES)
    for seed in range(30):
        torch.manual_seed(seed)
        pairs = pairs_of(model, batch)
        assert len(wrong_pairs(pairs)) == 3
        assert all(STUDIES[image] != STUDIES[text] for image, text in wrong_pairs(pairs))
    assert not wrong_pairs(pairs_of(model, make_batch(TOKENIZER, 6, studies=["a"] * 6)))


@pytest.mark.parametrize("name", SYSTEMS)
def test_half_of_the_pairs_are_negatives_without_equal_texts(name: str) -> None:
    """Rows 0 and 4 share their text, as do 1 and 5: neither is the other's negative."""
    model, batch = tiny_model(name, TOKENIZER), make_batch(TOKENIZER, 6)
    for seed in range(30):
        torch.manual_seed(seed)
        pairs = pairs_of(model, batch)
        assert pairs.matched_N.sum() == 3
        assert torch.equal(pairs.image_N[pairs.matched_N], pairs.text_N[pairs.matched_N])
        assert all(batch.texts[image] != batch.texts[text] for image, text in wrong_pairs(pairs))


@pytest.mark.parametrize("name", SYSTEMS)
def test_only_samples_with_the_modality_are_corrupted(name: str) -> None:
    batch = make_batch(
        TOKENIZER, 6, has_image_B=flags(1, 0, 1, 1, 0, 1), has_text_B=flags(1, 1, 0, 1, 1, 1)
    )
    model: Any = tiny_model(name, TOKENIZER)
    corruption = model.corrupt(batch)
    pairs, words = corruption.of(model.itm), corruption.of(model.mlm)
    assert set(pairs.text_N.tolist()) == {0, 3, 5}
    assert set(pairs.image_N.tolist()) <= {0, 3, 5}
    assert set((words.position_N // batch.ids_BT.shape[1]).tolist()) == {0, 1, 3, 4, 5}


def test_pairs_use_complete_samples_only() -> None:
    batch = make_batch(
        TOKENIZER, 6, has_image_B=flags(1, 0, 1, 1, 1, 1), has_text_B=flags(1, 1, 1, 0, 1, 1)
    )
    assert complete_rows(batch).tolist() == [0, 2, 4, 5]
    pairs = sample_pairs(dataclasses.replace(batch, studies=STUDIES))
    assert set(pairs.text_N.tolist()) == {0, 2, 4, 5}
    assert all(STUDIES[image] != STUDIES[text] for image, text in wrong_pairs(pairs))
