"""Masking of texts: rates, complete words and replacement shares, for WordPiece and byte-level
vocabularies.
"""

import gzip
import itertools
from pathlib import Path

import pytest
import tokenizers
import torch
from helpers.errors import raises
from helpers.vocabularies import write_byte_level
from torch import Tensor

from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer, load_tokenizer, train_wordpiece
from medvl.data.transforms.masked_text import TextMasking
from medvl.errors import ConfigError

TRAINING_TEXTS = [
    "No acute cardiopulmonary process.",
    "The heart size is normal; lungs are clear.",
    "Small left effusion.",
] * 4
TEXTS = [  # most words are not in the training texts, so they are split
    "Cardiomegaly with cephalization, 3.25 cm nodule (left-sided).",
    "Hydropneumothorax at the right apex is unchanged since 10:30",
    "Bibasilar atelectasis; no pneumoperitoneum.",
    "No effusion.",
    "Findings:\nno  change \n 5 mm\tnodule",
    "Tracheostomy tube terminates 4.5cm above carina, T10-T11 kyphosis, post-sternotomy wires "
    "intact and aligned.",
]


@pytest.fixture(scope="module", params=["wordpiece", "byte-level"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param == "wordpiece":
        return train_wordpiece([*TRAINING_TEXTS, *TEXTS], vocab_size=120, min_frequency=1)
    return load_tokenizer(
        write_byte_level(tmp_path_factory.mktemp("roberta"), TRAINING_TEXTS, vocab_size=330)
    )


def library_words(tokenizer: Tokenizer, texts: list[str], folder: Path) -> list[list[int | None]]:
    """Return the word index of each token from the tokenizers library, as an independent
    reference.
    """
    tokenizer.save(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.enable_truncation(tokenizer.max_tokens)
    return [reference.encode(text).word_ids for text in texts]


def count_words(hidden_BT: Tensor, words: list[list[int | None]]) -> tuple[int, int]:
    """Return the number of words of several tokens that are (completely, partly) masked."""
    complete = partial = 0
    for hidden_T, word_T in zip(hidden_BT.tolist(), words, strict=True):
        for word in set(word_T) - {None}:
            pieces = [hidden_T[position] for position, other in enumerate(word_T) if other == word]
            complete += len(pieces) > 1 and all(pieces)
            partial += any(pieces) and not all(pieces)
    return complete, partial


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[list[int | None]]:
    return library_words(tokenizer, TEXTS, tmp_path_factory.mktemp("reference"))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many(tokenizer: Tokenizer, copies: int = 600) -> tuple[Tensor, Tensor]:
    ids_BT, mask_BT = tokenizer(TEXTS)
    return ids_BT.repeat(copies, 1), mask_BT.repeat(copies, 1)


def ordinary(tokenizer: Tokenizer, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    special = [
        tokenizer.pad_id,
        tokenizer.cls_id,
        tokenizer.sep_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
    ]
    return mask_BT & ~torch.isin(ids_BT, torch.tensor(special))


def test_fixture_texts_have_split_words(
    tokenizer: Tokenizer, words: list[list[int | None]]
) -> None:
    """The tests below need many words of several tokens."""
    for word_T in words[:3]:
        inside = [word for word in word_T if word is not None]
        assert len(inside) > 1.5 * len(set(inside))
    if "<mask>" in tokenizer.vocabulary:
        assert not any(
            token.startswith("##") for token in tokenizer.vocabulary
        )  # the prefix that other collators rely on


def test_word_ids_match_the_library(tokenizer: Tokenizer, words: list[list[int | None]]) -> None:
    ours_BT = tokenizer.word_ids(*tokenizer(TEXTS)).tolist()
    for ours_T, word_T in zip(ours_BT, words, strict=True):
        assert ours_T[: len(word_T)] == [-1 if word is None else word for word in word_T]


def test_whole_words_are_masked(tokenizer: Tokenizer, words: list[list[int | None]]) -> None:
    masked = TextMasking(tokenizer)(*many(tokenizer, 40), seeded())
    complete, partial = count_words(masked.labels_BT != IGNORED, words * 40)
    assert complete > 50
    assert partial == 0


def test_tokens_are_masked_independently_without_whole_words(
    tokenizer: Tokenizer, words: list[list[int | None]]
) -> None:
    masked = TextMasking(tokenizer, whole_words=False)(*many(tokenizer, 40), seeded())
    assert count_words(masked.labels_BT != IGNORED, words * 40)[1] > 50


@pytest.mark.parametrize("whole_words", [True, False])
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_rate_is_the_share_of_masked_tokens(
    tokenizer: Tokenizer, whole_words: bool, rate: float
) -> None:
    """Measured on long texts, as a short text always has at least one masked word."""
    ids_1T, mask_1T = tokenizer([" ".join(TEXTS[:3] * 5)])
    ids_BT, mask_BT = ids_1T.repeat(300, 1), mask_1T.repeat(300, 1)
    masked = TextMasking(tokenizer, rate=rate, whole_words=whole_words)(ids_BT, mask_BT, seeded())
    able_BT = ordinary(tokenizer, ids_BT, mask_BT)
    share = (masked.labels_BT != IGNORED).sum() / able_BT.sum()
    assert share.item() == pytest.approx(rate, abs=0.01)


def test_replacements_are_80_10_10(tokenizer: Tokenizer) -> None:
    ids_BT, mask_BT = many(tokenizer)
    masked = TextMasking(tokenizer)(ids_BT, mask_BT, seeded())
    hidden_BT = masked.labels_BT != IGNORED
    now_N, before_N = masked.ids_BT[hidden_BT], ids_BT[hidden_BT]
    count = len(tokenizer.vocabulary)
    assert len(now_N) > 5000
    assert (now_N == tokenizer.mask_id).float().mean().item() == pytest.approx(0.8, abs=0.015)
    assert (now_N == before_N).float().mean().item() == pytest.approx(0.1 + 0.1 / count, abs=0.012)
    other_N = now_N[(now_N != tokenizer.mask_id) & (now_N != before_N)]
    assert len(other_N) / len(now_N) == pytest.approx(0.1, abs=0.012)
    assert ordinary(tokenizer, other_N, torch.ones_like(other_N).bool()).all()
    assert other_N.unique().numel() > 0.7 * count  # drawn from the complete vocabulary


def test_labels_are_original_ids_and_other_ids_are_unchanged(tokenizer: Tokenizer) -> None:
    ids_BT, mask_BT = many(tokenizer, 20)
    before = ids_BT.clone()
    masked = TextMasking(tokenizer)(ids_BT, mask_BT, seeded())
    assert torch.equal(ids_BT, before)
    hidden_BT = masked.labels_BT != IGNORED
    assert torch.equal(masked.labels_BT[hidden_BT], ids_BT[hidden_BT])
    assert torch.equal(masked.ids_BT[~hidden_BT], ids_BT[~hidden_BT])


@pytest.mark.parametrize("rate", [0.15, 0.999])
@pytest.mark.parametrize("whole_words", [True, False])
def test_special_tokens_and_padding_are_never_masked(
    tokenizer: Tokenizer, rate: float, whole_words: bool
) -> None:
    texts = [
        *TEXTS,
        "",
        "\u6f22 \u5b57 effusion",
    ]  # characters that are not in the WordPiece vocabulary
    ids_BT, mask_BT = tokenizer(texts * 50)
    masked = TextMasking(tokenizer, rate=rate, whole_words=whole_words)(ids_BT, mask_BT, seeded())
    hidden_BT = masked.labels_BT != IGNORED
    assert not (hidden_BT & ~ordinary(tokenizer, ids_BT, mask_BT)).any()
    assert not hidden_BT[len(TEXTS) :: len(texts)].any()  # a text without a word


def test_every_text_has_at_least_one_masked_word(tokenizer: Tokenizer) -> None:
    """At a tiny rate, each text has one masked word, uniformly distributed."""
    ids_BT, mask_BT = tokenizer(["no acute process"] * 2000)
    hidden_BT = TextMasking(tokenizer, rate=1e-6)(ids_BT, mask_BT, seeded()).labels_BT != IGNORED
    word_BT = tokenizer.word_ids(ids_BT, mask_BT)
    chosen = [word_BT[row][hidden_BT[row]].unique().tolist() for row in range(len(word_BT))]
    assert {len(words) for words in chosen} == {1}
    for word in range(3):
        assert chosen.count([word]) / 2000 == pytest.approx(1 / 3, abs=0.05)


def test_single_words_and_empty_batches(tokenizer: Tokenizer) -> None:
    masking = TextMasking(tokenizer)
    ids_BT, mask_BT = tokenizer(["effusion", ""])
    hidden_BT = masking(ids_BT, mask_BT, seeded()).labels_BT != IGNORED
    assert torch.equal(hidden_BT, ordinary(tokenizer, ids_BT, mask_BT))
    empty = masking(*tokenizer([]), seeded())
    assert empty.ids_BT.shape == empty.labels_BT.shape == (0, 0)


def test_masks_depend_only_on_the_generator(tokenizer: Tokenizer) -> None:
    masking, (ids_BT, mask_BT) = TextMasking(tokenizer), many(tokenizer, 4)
    first, again, other = (masking(ids_BT, mask_BT, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.ids_BT, again.ids_BT)
    assert torch.equal(first.labels_BT, again.labels_BT)
    assert not torch.equal(first.labels_BT, other.labels_BT)


def test_vocabulary_without_mask_token_raises() -> None:
    with raises(ConfigError, "unsupported"):
        TextMasking(load_tokenizer("clip"))


@pytest.mark.parametrize("rate", [0.0, 1.0, 15])
def test_invalid_rate_raises(tokenizer: Tokenizer, rate: float) -> None:
    with raises(ConfigError, "out_of_range", "rate"):
        TextMasking(tokenizer, rate=rate)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["wordpiece", "byte-level"])
def test_rate_and_whole_words_on_real_reports(real_data: Path, tmp_path: Path, kind: str) -> None:
    with gzip.open(real_data / "mlm" / "openi_reports.txt.gz", "rt", encoding="utf-8") as file:
        # Unlike RoBERTa's, this small vocabulary has no piece for 's: two words here, one in the
        # library.
        texts = [line.strip().replace("'", "") for line in itertools.islice(file, 600)]
    if kind == "wordpiece":
        tokenizer = train_wordpiece(texts[:300], vocab_size=600)
    else:
        tokenizer = load_tokenizer(write_byte_level(tmp_path, texts[:300], vocab_size=600))
    ids_BT, mask_BT = tokenizer(texts)
    hidden_BT = TextMasking(tokenizer)(ids_BT, mask_BT, seeded()).labels_BT != IGNORED
    able_BT = ordinary(tokenizer, ids_BT, mask_BT)
    assert (hidden_BT.sum() / able_BT.sum()).item() == pytest.approx(0.15, abs=0.005)
    assert hidden_BT.any(dim=1)[able_BT.any(dim=1)].all()
    complete, partial = count_words(hidden_BT, library_words(tokenizer, texts, tmp_path))
    assert complete > 200
    assert partial == 0
