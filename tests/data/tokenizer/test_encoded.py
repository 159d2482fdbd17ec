"""Pairs of texts and given words, compared with transformers' tokenizers."""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.vocabularies import write_byte_level

from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from medvl.errors import ConfigError

TEXTS = [
    "Small left pleural effusion with IL-2 binding.",
    "No pneumothorax is seen; heart size is normal.",
] * 3
FIRST = [
    "Is there a left effusion?",
    "heart",
    "the heart size is normal and there is no left pleural effusion seen",
]
SECOND = ["Small left pleural effusion is seen in the binding.", "No", "normal"]
WORDS = [
    ["IL-2", "binding", ",", "left"],
    ["effusion"],
    ["a-b-c-d-e-f", "pleural", "\u200b", "heart", "size", "no"],
]


@pytest.fixture(scope="module", params=["wordpiece", "byte level"])
def tokenizers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """Return medvl's tokenizer of 16 tokens and transformers' tokenizer of the same vocabulary."""
    import transformers

    folder = tmp_path_factory.mktemp("vocabulary")
    if request.param == "wordpiece":
        train_wordpiece(TEXTS, vocab_size=120, max_tokens=16).save(folder)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        write_byte_level(folder, TEXTS)
        theirs = transformers.RobertaTokenizerFast.from_pretrained(folder, add_prefix_space=True)
    return load_tokenizer(folder, max_tokens=16), theirs


@pytest.mark.parametrize("truncation", ["longest_first", "only_second", "only_first"])
def test_pairs_are_those_of_transformers(
    tokenizers: tuple[Tokenizer, Any], truncation: Any
) -> None:
    ours, theirs = tokenizers
    first, second = (
        [f" {text}" for text in texts] for texts in (FIRST, SECOND)
    )  # as with add_prefix_space
    if truncation != "longest_first":
        first, second = first[:1], second[:1]
    if truncation == "only_second":
        first = [" heart"]
    if truncation == "only_first":
        second = [" heart"]
    pairs = ours.pairs(first, second, truncation)
    options = {
        "padding": True,
        "max_length": 16,
        "return_token_type_ids": True,
        "return_tensors": "pt",
    }
    expected = theirs(first, second, truncation=truncation, **options)
    assert torch.equal(pairs.ids_BT, expected["input_ids"])
    assert torch.equal(pairs.mask_BT, expected["attention_mask"].bool())
    assert torch.equal(pairs.types_BT, expected["token_type_ids"])
    assert pairs.ids_BT.shape[1] <= 16
    assert ours(["heart " * 30])[0].shape[1] == 16  # truncation of single texts is as before


def test_pairs_refuse_what_cannot_be_truncated_as_named(tokenizers: tuple[Tokenizer, Any]) -> None:
    ours = tokenizers[0]
    with raises(ConfigError, "too_large", "truncation"):
        ours.pairs(["heart " * 30], ["no"], "only_second")
    assert ours.pairs(["heart " * 30], ["no"]).ids_BT.shape == (1, 16)
    wrong: Any = "both"
    with raises(ConfigError, "unknown_name", "truncation"):
        ours.pairs(["a"], ["b"], wrong)
    with raises(ConfigError, "unsupported"):
        load_tokenizer("clip").pairs(["a"], ["b"])
    with raises(ConfigError, "unsupported"):
        load_tokenizer("clip").given_words([["a"]])


def test_given_words_are_those_of_transformers(tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, theirs = tokenizers
    words = ours.given_words(WORDS)
    expected = theirs(
        WORDS,
        is_split_into_words=True,
        padding=True,
        truncation=True,
        max_length=16,
        return_tensors="pt",
    )
    assert torch.equal(words.ids_BT, expected["input_ids"])
    assert torch.equal(words.mask_BT, expected["attention_mask"].bool())
    for row in range(len(WORDS)):
        places = [-1 if word is None else word for word in expected.word_ids(row)]
        assert words.word_BT[row].tolist() == places


def test_labels_stand_at_first_pieces() -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=60, max_tokens=16)
    words = tokenizer.given_words([["IL-2", "\u200b", "effusion", "x" * 3, "seen " * 9, "cut"]])
    labels_1T = words.labels([[7, 8, 9, 1, 2, 3]])
    word_T = words.word_BT[0].tolist()
    for word, label in ((0, 7), (2, 9), (3, 1), (4, 2)):
        first = word_T.index(word)
        assert labels_1T[0, first] == label
        assert words.first_BT[0, first]
    assert 1 not in word_T  # a word without a piece
    assert 5 not in word_T  # truncated
    assert int((labels_1T != -100).sum()) == 4
    with pytest.raises(ValueError, match="label for each word"):
        words.labels([[1]])
