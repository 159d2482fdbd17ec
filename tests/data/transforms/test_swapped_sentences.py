"""Reports with swapped sentences: what changes places, how often, and that sentence numbers
follow.
"""

import numpy as np
import pytest
from helpers.errors import raises

from medvl.data.loading.items import sample_rng
from medvl.data.reports.sentences import sentence_spans, split_sentences
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.transforms.text import ShuffledSentences, SwappedSentences
from medvl.errors import ConfigError

SECTIONS = {
    "history": "Cough for a week.",
    "findings": "1. The left lung is clear. 2. There is a 3.5 cm mass on the right. Unchanged. "
    "Seen by Dr. Miller today",
    "impression": "- No acute disease\n- Follow up in 6 mo. if needed",
}
SENTENCES = [
    "The left lung is clear.",
    "There is a 3.5 cm mass on the right.",
    "Seen by Dr. Miller today",
    "No acute disease",
    "Follow up in 6 mo. if needed",
]


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_all_sentences_of_three_words_are_kept_in_another_order() -> None:
    texts = [SwappedSentences()(SECTIONS, rng(seed)) for seed in range(200)]
    assert all(sorted(text.split("\n\n")) == sorted(SENTENCES) for text in texts)
    assert len(set(texts)) > 20
    assert all(split_sentences(text) == text.split("\n\n") for text in texts)
    assert SwappedSentences(swap_probability=0.0)(SECTIONS, rng(0)).split("\n\n") == SENTENCES


def test_the_number_of_swaps_is_geometric() -> None:
    """In a text of two sentences, a swap of two random ones exchanges them half of the time.

    With k swaps with probability .4 * .6^k, the order is that of before with probability 1/2 +
    .4/2.
    """
    sections = {"findings": "The heart is large. The lungs are clear."}
    texts = [SwappedSentences()(sections, rng(seed)) for seed in range(4000)]
    kept = np.mean([text.startswith("The heart") for text in texts])
    assert kept == pytest.approx(0.5 + 0.2, abs=0.03)


def test_the_order_depends_on_seed_epoch_and_key_only() -> None:
    drawn = {
        (seed, epoch, key): SwappedSentences()(SECTIONS, sample_rng(seed, epoch, key, "text"))
        for seed in (0, 1) for epoch in range(4) for key in "abcd"
    }  # fmt: skip
    assert len(set(drawn.values())) > 8
    assert drawn == {
        place: SwappedSentences()(SECTIONS, sample_rng(*place, "text")) for place in drawn
    }


def test_tokens_have_the_numbers_of_the_swapped_sentences() -> None:
    tokenizer = train_wordpiece(SENTENCES, vocab_size=90, min_frequency=1)
    for seed in range(10):
        text = SwappedSentences()(SECTIONS, rng(seed))
        (ids_T,), _ = tokenizer([text])
        (number_T,) = tokenizer.sentence_ids([text], [sentence_spans(text)])
        for number, sentence in enumerate(text.split("\n\n")):
            assert ids_T[number_T == number].tolist() == tokenizer([sentence])[0][0, 1:-1].tolist()
        assert (number_T == -1).sum() == 2  # [CLS] and [SEP]


def test_short_texts_and_settings() -> None:
    policy = SwappedSentences()
    assert policy({"findings": "Clear. Normal."}, rng(0)) in (
        "Clear.\n\nNormal.",
        "Normal.\n\nClear.",
    )
    assert policy({"findings": "___"}, rng(0)) == "___"
    assert policy({}, rng(0)) == ""
    with raises(ConfigError, "out_of_range", "swap_probability"):
        SwappedSentences(swap_probability=1.0)


def test_some_sentences_in_random_order_are_of_any_number_with_equal_probability() -> None:
    """The released code of MaCo shuffles a report's sentences and keeps the first k."""
    texts = [ShuffledSentences()(SECTIONS, rng(seed)).split("\n\n") for seed in range(900)]
    known = {*SENTENCES, "Unchanged."}
    assert all(len(set(text)) == len(text) and set(text) <= known for text in texts)
    shares = np.bincount([len(text) for text in texts]) / len(texts)
    assert shares == pytest.approx(np.array([0, *[1 / len(known)] * len(known)]), abs=0.06)
    assert {text[0] for text in texts if len(text) > 1} == known
    assert ShuffledSentences()({"findings": "___"}, rng(0)) == "___"
    assert ShuffledSentences()({}, rng(0)) == ""
