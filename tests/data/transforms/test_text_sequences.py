"""Windows, pairs and masks of training sequences of text."""

import itertools

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.text_shards import make_documents, text_vocabulary

from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.data.transforms.masked_text import PairTask, TextMasking, TextSequence, TextSequences
from medvl.errors import ConfigError

TEXTS = make_documents(12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return text_vocabulary()


def draw(sequences: TextSequences, text: str, seed: int, other: str = "") -> TextSequence:
    return sequences("key", "document", text, lambda: other, np.random.default_rng(seed))


def segments(tokenizer: Tokenizer, row: TextSequence) -> list[list[int]]:
    """Split a sequence into its segments; checks its special tokens and types."""
    assert (row.ids[0], row.ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
    inner = row.ids[1:-1]
    parts, types = [inner], [0] * len(row.ids)
    if tokenizer.sep_id in inner:
        middle = inner.index(tokenizer.sep_id)
        parts = [inner[:middle], inner[middle + 1 :]]
        types = [0] * (middle + 2) + [1] * (len(inner) - middle)
    assert row.types == types
    return parts


def is_part(part: list[int], whole: list[int]) -> bool:
    return any(
        whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1)
    )


def test_whole_texts_are_encoded_without_truncation(tokenizer: Tokenizer) -> None:
    long = text_vocabulary(max_tokens=500)
    for text in TEXTS:
        ids, offsets = tokenizer.encode_whole(text)
        assert ids == long([text])[0][0, 1:-1].tolist()
        assert [text[begin:end].lower() for begin, end in offsets[:3]] == [
            token.strip() for token in (tokenizer.token_texts[number] for number in ids[:3])
        ]
    with raises(ConfigError, "unsupported"):
        load_tokenizer("clip").encode_whole("text")


def test_windows_begin_at_sentences_and_cover_the_text(tokenizer: Tokenizer) -> None:
    sequences = TextSequences(tokenizer, TextMasking(tokenizer))
    ids, _ = tokenizer.encode_whole(TEXTS[0])
    assert len(ids) > 30
    seen = set()
    for seed in range(150):
        (part,) = segments(tokenizer, draw(sequences, TEXTS[0], seed))
        assert len(part) == 30
        begin = next(n for n in range(len(ids) - 29) if ids[n : n + 30] == part)
        seen.add(begin)
    assert {n for begin in seen for n in range(begin, begin + 30)} == set(range(len(ids)))
    sentences = {
        n
        for n in seen
        if n in (0, len(ids) - 30) or tokenizer.token_texts[ids[n - 1]].strip() == "."
    }
    assert all(
        n - 30 in sentences for n in seen - sentences
    )  # within a sentence of more than 30 tokens
    short = TextSequences(tokenizer, TextMasking(tokenizer), short_probability=1.0)
    lengths = {len(draw(short, TEXTS[0], seed).ids) for seed in range(30)}
    assert min(lengths) < 16 < max(lengths) <= 32


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_pairs_are_segments_of_the_named_documents(tokenizer: Tokenizer, pairs: PairTask) -> None:
    sequences = TextSequences(tokenizer, TextMasking(tokenizer), pairs=pairs)
    text, other = TEXTS[0], "Zebra " * 40
    ids, other_ids = tokenizer.encode_whole(text)[0], tokenizer.encode_whole(other)[0]
    labels = []
    for seed in range(60):
        row = draw(sequences, text, seed, other)
        first, second = segments(tokenizer, row)
        labels.append(row.pair)
        assert len(row.ids) <= 32
        if row.pair == 0:
            assert is_part([*first, *second], ids)
        elif pairs == "next":
            assert is_part(first, ids)
            assert is_part(second, other_ids)
        else:
            assert is_part([*second, *first], ids)
    assert 15 < sum(labels) < 45
    assert draw(sequences, "no", 0, other).pair in (0, 1, -100)
    lonely = [draw(sequences, text, seed, "") for seed in range(20)]  # a corpus of one document
    if pairs == "next":
        assert {row.pair for row in lonely} == {0, -100}
    with raises(ConfigError, "unsupported", "pairs"):
        TextSequences(load_tokenizer("clip"), TextMasking(tokenizer), pairs=pairs)


def test_a_higher_rate_masks_the_same_tokens_and_more(tokenizer: Tokenizer) -> None:
    for longest in (1, 3):
        masking = TextMasking(tokenizer, longest_span=longest)
        sequences = TextSequences(tokenizer, masking)
        batch = sequences.collate([draw(sequences, text, seed) for seed, text in enumerate(TEXTS)])
        selected = [batch.order_BT < rate for rate in (0.05, 0.15, 0.5)]
        assert all((low <= high).all() for low, high in itertools.pairwise(selected))
        special_BT = (
            torch.isin(batch.ids_BT, torch.tensor([tokenizer.cls_id, tokenizer.sep_id]))
            | ~batch.mask_BT
        )
        assert not selected[-1][special_BT].any()
        assert selected[0].any(dim=1).all()  # at least one of each text
        word_BT = tokenizer.word_ids(batch.ids_BT, batch.mask_BT)
        for mask_BT in selected:  # whole words
            for row in range(len(TEXTS)):
                chosen = set(word_BT[row][mask_BT[row]].tolist())
                assert all(mask_BT[row][word_BT[row] == word].all() for word in chosen)


def test_spans_reach_the_rate_and_have_the_published_lengths(tokenizer: Tokenizer) -> None:
    masking = TextMasking(tokenizer, longest_span=3, whole_words=False)
    ids_BT = torch.full((100, 240), tokenizer.vocabulary["left"])
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    draw = masking.draw(
        ids_BT, mask_BT, torch.rand(3, 100, 240, generator=torch.Generator().manual_seed(0))
    )
    selected_BT = draw.order_BT < 0.15
    count_B = selected_BT.sum(dim=1)
    assert ((count_B >= 36) & (count_B < 39)).all()  # until 15 % of 240 tokens are reached
    lengths = [(row[:, None] == row.unique()).sum(dim=0) for row in draw.order_BT]
    share_3 = torch.bincount(torch.cat(lengths), minlength=4)[1:4] / sum(map(len, lengths))
    torch.testing.assert_close(share_3, torch.tensor([6 / 11, 3 / 11, 2 / 11]), atol=0.02, rtol=0)


def test_batches_do_not_depend_on_their_neighbours(tokenizer: Tokenizer) -> None:
    sequences = TextSequences(tokenizer, TextMasking(tokenizer), pairs="order")
    rows = [draw(sequences, text, seed) for seed, text in enumerate(TEXTS)]
    together, alone = sequences.collate(rows), sequences.collate(rows[3:4])
    width = alone.ids_BT.shape[1]
    for name in ("ids_BT", "order_BT", "masked_BT", "types_BT", "mask_BT"):
        assert torch.equal(getattr(together, name)[3:4, :width], getattr(alone, name)), name
    assert together.pair_B[3] == alone.pair_B[0]
    assert together.to("cpu").pin_memory is not None
    assert len(together.rows([0, 2])) == 2
