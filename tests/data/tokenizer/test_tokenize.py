"""Tokenizers compared with the libraries of their vocabularies, and the WordPiece trainer."""

import functools
import json
import multiprocessing
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from helpers.errors import raises
from helpers.vocabularies import write_byte_level
from hypothesis import given, settings, strategies as st

from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from medvl.errors import ConfigError, WeightsError

TEXTS = [
    "FINDINGS: The heart size is normal. There is a small left pleural effusion.",
    "Small left pleural effusion with adjacent atelectasis, 3.2 cm. No pneumothorax.",
    "IMPRESSION: No acute cardiopulmonary process. ___ was notified by Dr. ___ at 10:30.",
    "Moderate cardiomegaly. Mild pulmonary oedema, improved. Right-sided effusion is unchanged.",
    "Heart size is normal, lungs are clear. No effusion or pneumothorax is seen.",
    "Compared with ___, the left effusion has increased; atelectasis is unchanged.",
] * 3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_wordpiece(TEXTS, vocab_size=200)


@pytest.fixture(scope="module")
def clip() -> Tokenizer:
    return load_tokenizer("clip")


@pytest.fixture(scope="module")
def roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a byte-level vocabulary in RoBERTa's two files."""
    return write_byte_level(tmp_path_factory.mktemp("roberta"), TEXTS)


def real(ids_BT: torch.Tensor, mask_BT: torch.Tensor, row: int = 0) -> list[int]:
    return ids_BT[row][mask_BT[row]].tolist()


def test_tokenizer_returns_padded_ids_and_mask(trained: Tokenizer) -> None:
    ids_BT, mask_BT = trained(["No effusion.", "", "The heart size is normal."])
    assert ids_BT.dtype == torch.int64
    assert mask_BT.dtype == torch.bool
    assert ids_BT.shape == mask_BT.shape
    assert mask_BT[:, 0].all()
    assert mask_BT.any(dim=0).all()  # no column is all padding
    assert real(ids_BT, mask_BT, 1) == [trained.cls_id, trained.sep_id]
    assert (ids_BT[~mask_BT] == trained.pad_id).all()
    for row in range(3):
        assert real(ids_BT, mask_BT, row)[0] == trained.cls_id
        assert real(ids_BT, mask_BT, row)[-1] == trained.sep_id
    empty_ids, empty_mask = trained([])
    assert empty_ids.shape == empty_mask.shape == (0, 0)
    assert trained(["", ""])[0].tolist() == [[trained.cls_id, trained.sep_id]] * 2


def test_trained_special_ids(trained: Tokenizer) -> None:
    assert [trained.pad_id, trained.unk_id, trained.cls_id, trained.sep_id, trained.mask_id] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert trained.vocab_size == len(trained.vocabulary) == 200
    assert [token for token, _ in sorted(trained.vocabulary.items(), key=lambda item: item[1])][
        :6
    ] == [*SPECIAL, "___"]


def test_single_text_raises(trained: Tokenizer) -> None:
    with raises(ConfigError, "wrong_type", "texts"):
        trained("no effusion")


def test_long_texts_are_truncated(trained: Tokenizer) -> None:
    short = train_wordpiece(TEXTS, vocab_size=200, max_tokens=8)
    ids_BT, mask_BT = short(["the heart size is normal " * 20, "no"])
    full = real(*trained(["the heart size is normal " * 20]))
    assert ids_BT.shape == (2, 8)
    assert real(ids_BT, mask_BT) == [*full[:7], short.sep_id]
    with raises(ConfigError, "out_of_range", "max_tokens"):
        train_wordpiece(TEXTS, max_tokens=2)


def test_masked_out_words_are_one_token(trained: Tokenizer) -> None:
    ids = real(*trained(["___ was seen by Dr. ___, and ____ not."]))
    assert ids.count(trained.vocabulary["___"]) == 3
    assert trained.unk_id not in real(*trained(["was notified by ___"]))
    assert trained.decode(real(*trained(["the left effusion ___"]))) == "the left effusion ___"


def test_trained_tokenizer_lower_cases(trained: Tokenizer) -> None:
    upper, lower = trained(["LEFT Effusion"]), trained(["left effusion"])
    assert torch.equal(upper[0], lower[0])
    assert trained.decode(upper[0][0]) == "left effusion"
    assert trained.unk_id in real(*trained(["\u6f22"]))  # a character that is not in the texts


def test_vocabulary_does_not_depend_on_order_or_process() -> None:
    expected = train_wordpiece(TEXTS, vocab_size=150).vocabulary
    for seed in range(3):
        shuffled = TEXTS[:]
        random.Random(seed).shuffle(shuffled)
        assert train_wordpiece(iter(shuffled), vocab_size=150).vocabulary == expected
    program = (
        "import json, sys; from medvl.data.tokenizer.tokenizer import train_wordpiece;"
        "print(json.dumps(train_wordpiece(json.loads(sys.stdin.read()), "
        "vocab_size=150).vocabulary))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(result.stdout) == expected


def test_trained_vocabulary_encodes_as_compactly_as_the_library() -> None:
    ours = train_wordpiece(TEXTS, vocab_size=150, max_tokens=500)
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=SPECIAL, show_progress=False
    )
    theirs.train_from_iterator([text.replace("___", "") for text in TEXTS], trainer)
    texts = [text.replace("___", "") for text in TEXTS]
    length = sum(len(encoding.ids) for encoding in theirs.encode_batch(texts))
    assert int(ours(texts)[1].sum()) - 2 * len(texts) < 1.03 * length


@pytest.mark.parametrize(
    ("texts", "options", "expected"),
    [
        ([], {}, ("empty", "texts")),
        (["", "  "], {}, ("empty", "texts")),
        (TEXTS, {"vocab_size": 20}, ("out_of_range", "vocab_size")),
    ],
)
def test_train_wordpiece_invalid_input_raises(
    texts: list[str], options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with raises(ConfigError, *expected):
        train_wordpiece(texts, **options)


def test_save_and_load(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer")
    trained.save(tmp_path / "again")
    for file in sorted((tmp_path / "tokenizer").iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.vocabulary == trained.vocabulary
    assert (loaded.max_tokens, loaded.source) == (trained.max_tokens, trained.source)
    assert [loaded.pad_id, loaded.unk_id, loaded.cls_id, loaded.sep_id, loaded.mask_id] == [
        0,
        1,
        2,
        3,
        4,
    ]
    for ours, theirs in zip(loaded(TEXTS), trained(TEXTS), strict=True):
        assert torch.equal(ours, theirs)
    assert load_tokenizer(str(tmp_path / "tokenizer"), max_tokens=5)(TEXTS)[0].shape[1] == 5


def test_transformers_reads_saved_tokenizers(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:6]:
        assert theirs(text)["input_ids"] == real(*trained([text]))
    assert (theirs.pad_token_id, theirs.mask_token_id) == (trained.pad_id, trained.mask_id)


@pytest.mark.parametrize("lowercase", [True, False])
def test_vocabulary_file_alone(trained: Tokenizer, tmp_path: Path, lowercase: bool) -> None:
    """A bare vocab.txt is lower-cased without a configuration, as in Hugging Face."""
    trained.save(tmp_path / "full")
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "vocab.txt").write_bytes(
        (tmp_path / "full" / "vocab.txt").read_bytes().replace(b"\n", b"\r\n")
    )
    assert torch.equal(load_tokenizer(folder)(["Left Effusion"])[0], trained(["left effusion"])[0])
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": lowercase, "model_max_length": 64})
    )
    loaded = load_tokenizer(folder)
    assert loaded.max_tokens == 64
    assert (loaded.unk_id in real(*loaded(["Left Effusion"]))) is not lowercase
    assert (
        load_tokenizer(folder, lowercase=not lowercase)(["Left"])[0].tolist()
        != loaded(["Left"])[0].tolist()
    )


@pytest.mark.parametrize("accents", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_accents_and_chinese_of_a_vocabulary_file(
    tmp_path: Path, lowercase: bool, chinese: bool, accents: bool | None
) -> None:
    """A configuration beside a vocab.txt applies as in transformers."""
    from transformers import BertTokenizer

    letters = [*"ULulceéö", "肺", "癌", "##e", "##é", "##癌", "##ö", "##u", "##l"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    settings = {
        "do_lower_case": lowercase,
        "strip_accents": accents,
        "tokenize_chinese_chars": chinese,
    }
    (tmp_path / "vocab.txt").write_text("\n".join(tokens), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = BertTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, **settings
    )
    for text in ("uléö Uleo", "肺癌", "c肺癌 é癌"):
        assert real(*load_tokenizer(tmp_path)([text])) == theirs(text)["input_ids"]


def test_byte_level_ids_match_the_library(roberta_folder: Path) -> None:
    ours = load_tokenizer(roberta_folder)
    theirs = tokenizers.ByteLevelBPETokenizer(
        str(roberta_folder / "vocab.json"), str(roberta_folder / "merges.txt")
    )
    assert (ours.cls_id, ours.pad_id, ours.sep_id, ours.unk_id, ours.mask_id) == (0, 1, 2, 3, 4)
    for text in [*TEXTS[:6], "caf\u00e9 \u2013 5\u00b0C", ""]:
        ids = real(*ours([text]))
        assert ids == [0, *theirs.encode(text).ids, 2]
        assert ours.decode(ids) == text
    padded, _ = ours(["left effusion", ""])
    assert (padded[1, 2:] == 1).all()


@functools.cache
def clip_once() -> Tokenizer:
    return load_tokenizer("clip")


ASSIGNED = st.characters(
    exclude_categories=("Cn", "Cs")
)  # other letters depend on the Unicode version of a library


@given(st.lists(st.text(ASSIGNED, max_size=40), min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_clip_ids_match_open_clip_on_random_texts(texts: list[str]) -> None:
    import open_clip

    ids_BT, mask_BT = clip_once()(texts)
    expected = open_clip.tokenize(texts)
    for row in range(len(texts)):
        ids = real(ids_BT, mask_BT, row)
        assert ids == expected[row, : len(ids)].tolist()
        assert (expected[row, len(ids) :] == 0).all()


def test_clip_ids_match_open_clip(clip: Tokenizer) -> None:
    import open_clip

    assert (clip.vocab_size, clip.max_tokens, clip.cls_id, clip.sep_id) == (49408, 77, 49406, 49407)
    assert (clip.mask_id, clip.unk_id, clip.pad_id) == (None, None, 0)
    texts = [*TEXTS, "it's 12.5mg/dL &amp; \u201cquoted\u201d", "effusion " * 100]
    ids_BT, mask_BT = clip(texts)
    assert torch.equal(
        ids_BT.masked_fill(~mask_BT, 0), open_clip.tokenize(texts)[:, : ids_BT.shape[1]]
    )
    assert clip.decode(real(*clip(["Small LEFT effusion"]))) == "small left effusion"
    assert clip.decode(real(*clip(["caf\u00e9"]))) == "caf\u00e9"


def test_clip_round_trip(clip: Tokenizer, tmp_path: Path) -> None:
    clip.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert torch.equal(loaded(TEXTS)[0], clip(TEXTS)[0])
    assert (loaded.max_tokens, loaded.cls_id, loaded.source) == (77, 49406, "clip")


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    ids_BT, mask_BT = tokenizer([text, text + " and more of it"])  # so that the first is padded
    word_BT = tokenizer.word_ids(ids_BT, mask_BT)
    assert (word_BT[~mask_BT] == -1).all()
    assert word_BT[0, 0] == -1
    count = int(word_BT[0].max()) + 1
    return [tokenizer.decode(ids_BT[0][word_BT[0] == word]).strip() for word in range(count)]


def test_wordpiece_words(trained: Tokenizer) -> None:
    words = ["heart", "-", "size", "leftpleural", ",", "3", ".", "2", "___", "atelectasis"]
    assert words_of(trained, "Heart-size leftpleural, 3.2 ___ atelectasis") == words


def test_byte_level_words(roberta_folder: Path) -> None:
    tokenizer = load_tokenizer(roberta_folder)
    assert words_of(tokenizer, "the xyzzy effusion, 3.2cm") == [
        "the",
        "xyzzy",
        "effusion",
        ",",
        "3",
        ".",
        "2",
        "cm",
    ]
    assert words_of(tokenizer, "atelectasis") == ["atelectasis"]


def test_clip_words(clip: Tokenizer) -> None:
    assert words_of(clip, "small atelectasis, 3.2cm") == [
        "small",
        "atelectasis",
        ",",
        "3",
        ".",
        "2",
        "cm",
    ]


@given(
    st.lists(
        st.sampled_from([*" ".join(TEXTS).split(), "xyzzy", "Q", "9"]), min_size=1, max_size=12
    )
)
@settings(max_examples=40, deadline=None)
def test_words_match_the_pre_tokenizer(words: list[str]) -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=120)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    text = " ".join(words).replace("___", "x")
    ids_BT, mask_BT = tokenizer([text])
    if mask_BT.sum() < tokenizer.max_tokens:
        assert int(tokenizer.word_ids(ids_BT, mask_BT).max()) + 1 == len(
            splitter.pre_tokenize_str(text.lower())
        )


def test_tokenizers_can_be_pickled_forked_and_spawned(trained: Tokenizer, clip: Tokenizer) -> None:
    for tokenizer in (trained, clip):
        copied = pickle.loads(pickle.dumps(tokenizer))
        assert torch.equal(copied(TEXTS)[0], tokenizer(TEXTS)[0])
        assert copied.max_tokens == tokenizer.max_tokens
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            ids = pool.apply(ids_in_child, (trained, TEXTS))
        assert ids == trained(TEXTS)[0].tolist()


def ids_in_child(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts)[0].tolist()
    return ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ("not_found",)),
        ({"tokenizer.json": "{"}, ("malformed",)),
        ({"tokenizer.json": "{}"}, ("malformed",)),
        ({"vocab.txt": "left\nright\n"}, ("missing",)),
        ({"vocab.json": "[]", "merges.txt": ""}, ("malformed",)),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a\n"}, ("malformed",)),
        ({"vocab.txt": "\n".join(SPECIAL), "tokenizer_config.json": "{"}, ("malformed",)),
        ({"vocab.txt": b"\xff\xfe\x00"}, ("malformed",)),
    ],
)
def test_damaged_folder_raises(
    tmp_path: Path, files: dict[str, str | bytes], expected: tuple[str, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(ConfigError, *expected):
        load_tokenizer(tmp_path)


def test_vocabulary_without_last_token_raises(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"left": 0, "[UNK]": 1}, unk_token="[UNK]")
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    with raises(ConfigError, "missing"):
        load_tokenizer(tmp_path)


def test_oversized_file_raises(tmp_path: Path) -> None:
    with (tmp_path / "vocab.txt").open("wb") as file:
        file.truncate(200 * 2**20)
    with raises(ConfigError, "too_large"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("source", "options", "error", "expected"),
    [
        ("owner/name", {}, ConfigError, ("not_found", "revision")),
        ("owner/name", {"revision": "main"}, WeightsError, ("out_of_range", "revision")),
        ("owner/name", {"revision": COMMIT}, WeightsError, ("not_found",)),
        ("clip", {"revision": COMMIT}, ConfigError, ("conflict", "revision")),
    ],
)
def test_invalid_source_raises(
    source: str, options: dict[str, Any], error: type, expected: tuple[str, ...]
) -> None:
    with raises(error, *expected):
        load_tokenizer(source, **options)


def test_hub_repository_is_read_from_the_cache(
    trained: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    trained.save(snapshot)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer_config.json").unlink()  # vocab.txt alone, as in many old repositories
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_tokenizer("owner/name", revision=COMMIT, max_tokens=64)
    assert loaded.source == f"owner/name@{COMMIT}"
    assert loaded.max_tokens == 64
    text = ["the left effusion"]
    assert torch.equal(loaded(text)[0], trained(text)[0])
