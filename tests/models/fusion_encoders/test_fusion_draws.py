"""Which rows of a batch may be each other's negatives: never those of one study, of one text, or without one."""

import dataclasses

import pytest
import torch
from helpers.fusion_samples import TINY, flags, make_batch, tiny_model, tiny_tokenizer

from medvl.losses.itm import MatchingPairs
from medvl.models.base import complete_rows
from medvl.models.fusion_encoders.corruption import draw_pairs, same_rows

TOKENIZER = tiny_tokenizer()
DRAWN_FIRST = sorted(TINY.keys() - {"albef"})
"""Systems whose pairs are drawn before any arithmetic; ALBEF's follow from its similarities (test_fusion_albef)."""
STUDIES = ["a", "b", "a", "b", "a", "c"]


def wrong(pairs: MatchingPairs) -> list[tuple[int, int]]:
    """(image, text) of the pairs that do not match."""
    row_N = (~pairs.matched_N).nonzero().squeeze(1)
    return list(zip(pairs.image_N[row_N].tolist(), pairs.text_N[row_N].tolist(), strict=True))


def test_rows_are_the_same_by_study_text_or_group() -> None:
    batch = make_batch(TOKENIZER, 6)  # texts 0 and 4, and 1 and 5, are equal
    assert same_rows(batch)[4].int().tolist() == [1, 0, 0, 0, 1, 0]
    assert same_rows(batch)[2].int().tolist() == [0, 0, 1, 0, 0, 0]
    by_study = same_rows(dataclasses.replace(batch, studies=STUDIES))
    assert by_study[0].int().tolist() == [1, 0, 1, 0, 1, 0]
    assert by_study[5].int().tolist() == [0, 1, 0, 0, 0, 1]
    assert same_rows(batch, torch.tensor([7, 7, 8, 9, 10, 11]))[0].int().tolist() == [1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("name", DRAWN_FIRST)
def test_no_system_takes_another_image_of_the_study_for_a_negative(name: str) -> None:
    """The report describes it too, even where other words were drawn of it."""
    model = tiny_model(name, TOKENIZER)
    batch = make_batch(TOKENIZER, 6, studies=STUDIES)
    for seed in range(30):
        torch.manual_seed(seed)
        pairs = model.draw(batch).pairs
        assert len(wrong(pairs)) == 3
        assert all(STUDIES[image] != STUDIES[text] for image, text in wrong(pairs))
    assert not wrong(model.draw(make_batch(TOKENIZER, 6, studies=["a"] * 6)).pairs)


@pytest.mark.parametrize("name", DRAWN_FIRST)
def test_negatives_are_exactly_half_and_never_positives(name: str) -> None:
    """Rows 0 and 4 share their text, as do 1 and 5: neither is the other's negative."""
    model, batch = tiny_model(name, TOKENIZER), make_batch(TOKENIZER, 6)
    for seed in range(30):
        torch.manual_seed(seed)
        pairs = model.draw(batch).pairs
        assert pairs.matched_N.sum() == 3
        assert torch.equal(pairs.image_N[pairs.matched_N], pairs.text_N[pairs.matched_N])
        assert all(batch.texts[image] != batch.texts[text] for image, text in wrong(pairs))


@pytest.mark.parametrize("name", DRAWN_FIRST)
def test_draws_are_of_who_is_eligible(name: str) -> None:
    batch = make_batch(TOKENIZER, 6, has_image_B=flags(1, 0, 1, 1, 0, 1), has_text_B=flags(1, 1, 0, 1, 1, 1))
    draw = tiny_model(name, TOKENIZER).draw(batch)
    assert set(draw.pairs.text_N.tolist()) == {0, 3, 5}
    assert set(draw.pairs.image_N.tolist()) <= {0, 3, 5}
    assert set((draw.masked_N // batch.ids_BT.shape[1]).tolist()) == {0, 1, 3, 4, 5}


def test_pairs_are_of_complete_samples() -> None:
    batch = make_batch(TOKENIZER, 6, has_image_B=flags(1, 0, 1, 1, 1, 1), has_text_B=flags(1, 1, 1, 0, 1, 1))
    assert complete_rows(batch).tolist() == [0, 2, 4, 5]
    pairs = draw_pairs(dataclasses.replace(batch, studies=STUDIES))
    assert set(pairs.text_N.tolist()) == {0, 2, 4, 5}
    assert all(STUDIES[image] != STUDIES[text] for image, text in wrong(pairs))
