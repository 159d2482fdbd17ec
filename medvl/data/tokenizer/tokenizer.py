"""Tokenizers from texts to padded token ids: WordPiece, byte-level BPE, SentencePiece and CLIP's
vocabulary.

    tokenizer = load_tokenizer("vocab/mimic")                  # a folder
    tokenizer = load_tokenizer("OWNER/NAME", revision=COMMIT)  # from the hub, pinned
    # open_clip's vocabulary, which is part of its package
    tokenizer = load_tokenizer("clip")
    # SigLIP's: a SentencePiece vocabulary
    tokenizer = load_tokenizer(FOLDER, cleaning="canonical")
    tokenizer = train_wordpiece(texts, vocab_size=8000)        # from the shards' own text
    tokenizer = train_words(texts, min_frequency=3)            # complete words, as R2Gen
    ids_BT, mask_BT = tokenizer(["small left effusion", "no effusion"])
    # ids_BT, mask_BT, types_BT
    pairs = tokenizer.pairs([question], [context], truncation="only_second")
    # ids_BT, mask_BT, word_BT
    words = tokenizer.given_words([["IL-2", "gene"]])

Texts are encoded one by one with the `tokenizers` library: its threads are no faster on a batch,
and they make it warn when a loader forks its workers afterwards.
"""

import collections
import copy
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import AddedToken, models, processors
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.common.files import new_path, write_atomic
from medvl.data.tokenizer import files
from medvl.data.tokenizer.wordpiece import (
    MASKED_OUT,
    WordBoundaries,
    count_words,
    learn_pieces,
    pieces_per_word,
    token_texts,
)
from medvl.errors import ConfigError

# Encoded pairs of texts, and encoded words that a corpus has tokenized already.

Truncation = Literal["longest_first", "only_first", "only_second"]
"""Which text of a pair is shortened at its end: token by token whichever is longer at that moment,
as in BERT; the first; or the second, as in question answering with a context. Names as in
transformers.
"""
IGNORED = -100
"""Label of tokens without one, which torch's cross-entropy ignores."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Pairs of texts as single sequences, such as `[CLS] first [SEP] second [SEP]`."""

    ids_BT: Tensor
    """int64 token ids, padded on the right."""
    mask_BT: Tensor
    """bool, True on real tokens."""
    types_BT: Tensor
    """int64: 0 for the first text with its special tokens, 1 for the second; all 0 for RoBERTa;
    0 on padding.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedWords:
    """Sequences of given words, each encoded apart."""

    ids_BT: Tensor
    """int64 token ids, padded on the right."""
    mask_BT: Tensor
    """bool, True on real tokens."""
    word_BT: Tensor
    """int64: index of the given word that a token is a piece of; -1 on special tokens and padding.
    Words that were truncated, or have no piece (control characters), are missing.
    """

    @property
    def first_BT(self) -> Tensor:
        """Return (B, T) bool: True on the first piece of each word."""
        before_BT = torch.nn.functional.pad(self.word_BT[:, :-1], (1, 0), value=-1)
        return (self.word_BT >= 0) & (self.word_BT != before_BT)

    def labels(self, labels: Sequence[Sequence[int]]) -> Tensor:
        """Return (B, T) int64: the label of each given word at its first piece, -100 elsewhere.

        Raises ValueError when a sequence has fewer labels than encoded words.
        """
        labels_BT = torch.full_like(self.word_BT, IGNORED)
        for row, of_row in enumerate(labels):
            place_N = self.first_BT[row].nonzero()[:, 0]
            word_N = self.word_BT[row, place_N]
            if len(word_N) and int(word_N.max()) >= len(of_row):
                raise ValueError(
                    f"expected a label for each word of sequence {row}, got {len(of_row)}"
                )
            labels_BT[row, place_N] = torch.tensor(of_row, dtype=torch.int64)[word_N]
        return labels_BT


def pad_rows(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return (B, T) int64, padded on the right to the longest row."""
    width = max(map(len, rows), default=0)
    return torch.tensor(
        [[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64
    ).view(len(rows), width)


def row_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, T) bool: True where `pad_rows` has no padding."""
    length_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.arange(max(map(len, rows), default=0)) < length_B[:, None]


DEFAULT_TOKENS = 512
"""Maximum length where neither the caller nor the tokenizer's files set one."""
_END = "<end>"
_UNKNOWN = "<unk>"
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Tokenizer:
    """Tokenizer between texts and ids, from `load_tokenizer` or `train_wordpiece`. It can be
    pickled.

    Attributes:
        vocab_size: number of ids.
        pad_id, cls_id, sep_id: padding (0 where the vocabulary has none), first and last token of
            every text. Where texts have no first token (T5, SigLIP), `cls_id` is `sep_id`.
        unk_id, mask_id: None where the vocabulary has none (CLIP).
        max_tokens: longer texts are truncated, keeping their first and last token.
        source: origin of the vocabulary.
    """

    def __init__(self, loaded: files.LoadedTokenizer, *, max_tokens: int | None = None) -> None:
        longest = max_tokens or loaded.max_tokens or DEFAULT_TOKENS
        if longest < 3:
            raise ConfigError(
                f"max_tokens must be at least 3, got {longest}", "out_of_range", field="max_tokens"
            )
        self._loaded = loaded
        self._backend = loaded.backend
        self._backend.no_padding()
        self._backend.enable_truncation(longest)
        self.max_tokens = longest
        self.source = loaded.source
        self.vocab_size = max(self._backend.get_vocab().values(), default=0) + 1
        ids = {
            role: None if token is None else self._id(token)
            for role, token in loaded.special.items()
        }
        if ids["sep"] is None:
            raise ConfigError(
                f"the vocabulary of {self.source} has no first and last token", "missing"
            )
        self.pad_id: int = ids["pad"] or 0
        self.sep_id: int = ids["sep"]
        self.cls_id: int = self.sep_id if ids["cls"] is None else ids["cls"]
        self.unk_id: int | None = ids["unk"]
        self.mask_id: int | None = ids["mask"]
        special = {self.cls_id, self.sep_id} | ({ids["pad"]} if ids["pad"] is not None else set())
        self._special = sorted(special)
        if not loaded.closing:
            self._leave_open()
        self._words = WordBoundaries(self._backend, self.vocab_size, self._special)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode texts; an empty text becomes its first and last token.

        Returns ids_BT, int64, padded on the right to the longest of the texts, and mask_BT, bool,
        True on real tokens.
        """
        if isinstance(texts, str):
            raise ConfigError(
                "expected a list of texts, got a single text", "wrong_type", field="texts"
            )
        encoded = [
            self._encode(files.clean_text(text, self._loaded.cleaning)).ids for text in texts
        ]
        return pad_rows(encoded, self.pad_id), row_mask(encoded)

    def pairs(
        self, first: Sequence[str], second: Sequence[str], truncation: Truncation = "longest_first"
    ) -> EncodedPairs:
        """Encode pairs of texts, such as `[CLS] first [SEP] second [SEP]`, truncated to
        `max_tokens`.

        Raises ConfigError for a vocabulary without pairs (CLIP, SigLIP, complete words), or where
        the text that `truncation` names is shorter than what has to be removed.
        """
        check_choice(truncation, get_args(Truncation), "truncation")
        if self._loaded.cleaning is not None or self._backend.num_special_tokens_to_add(True) < 3:
            raise ConfigError(
                f"{self.source} has no special tokens for pairs; use a BERT vocabulary",
                "unsupported",
            )
        self._backend.enable_truncation(self.max_tokens, strategy=truncation)
        try:
            encoded = [self._encode(a, b) for a, b in zip(first, second, strict=True)]
        except Exception as error:  # the backend raises bare Exception
            if "Truncation" not in str(error):
                raise
            message = (
                f"a pair does not fit into {self.max_tokens} tokens with truncation {truncation!r}"
            )
            raise ConfigError(
                f"{message}; use 'longest_first'", "too_large", field="truncation"
            ) from None
        finally:
            self._backend.enable_truncation(self.max_tokens)
        ids = [each.ids for each in encoded]
        return EncodedPairs(
            pad_rows(ids, self.pad_id),
            row_mask(ids),
            pad_rows([each.type_ids for each in encoded], 0),
        )

    def given_words(self, sequences: Sequence[Sequence[str]]) -> EncodedWords:
        """Encode sequences of words as a corpus has them, each word separately, truncated to
        `max_tokens`.

        The tokenizer's own words can differ: `IL-2` is one given word, but three words for BERT.
        Raises ConfigError for a tokenizer that cleans its texts (CLIP, SigLIP, complete words).
        """
        if self._loaded.cleaning is not None:
            message = (
                f"the tokenizer of {self.source} cleans whole texts and takes no given "
                f"words; use another"
            )
            raise ConfigError(message, "unsupported")
        # byte-level BPE marks the beginning of a word by its space
        space = " " if self._words.joins_spaces else ""
        encoded = [
            self._encode([space + word for word in words], is_pretokenized=True)
            for words in sequences
        ]
        ids = [each.ids for each in encoded]
        places = [[-1 if word is None else word for word in each.word_ids] for each in encoded]
        return EncodedWords(pad_rows(ids, self.pad_id), row_mask(ids), pad_rows(places, -1))

    def encode_whole(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text of any length without special tokens, and the (start, end) of
        each in characters.

        Raises ConfigError for a tokenizer that cleans its texts (CLIP, SigLIP, complete words).
        """
        if self._loaded.cleaning is not None:
            message = (
                f"the tokenizer of {self.source} cleans texts, so it cannot locate "
                f"tokens; use another"
            )
            raise ConfigError(message, "unsupported")
        encoding = self._encode(text, add_special_tokens=False)
        parts = [encoding, *encoding.overflowing]
        return [number for part in parts for number in part.ids], [
            place for part in parts for place in part.offsets
        ]

    @property
    def has_pairs(self) -> bool:
        """Whether pairs have one closing token each, as in BERT and ALBERT."""
        return self._loaded.cleaning is None and bool(
            self._backend.num_special_tokens_to_add(True) == 3
        )

    def with_max_tokens(self, max_tokens: int) -> "Tokenizer":
        """Return a copy with another maximum length. Raises ConfigError for one below 3."""
        return Tokenizer(copy.deepcopy(self._loaded), max_tokens=max_tokens)

    def as_published(self, *, cleaning: files.Cleaning | None, closing: bool = True) -> "Tokenizer":
        """Return a copy that cleans texts as a released system, and with `closing` False ends them
        without [SEP].

        A tokenizer that cleans its texts already (CLIP, SigLIP, complete words) keeps its own
        cleaning. Raises ConfigError for texts without [SEP] unless the vocabulary is BERT's.
        """
        cleaning = self._loaded.cleaning or cleaning
        loaded = dataclasses.replace(
            copy.deepcopy(self._loaded), cleaning=cleaning, closing=closing
        )
        return Tokenizer(loaded, max_tokens=self.max_tokens)

    def for_answers(self) -> "Tokenizer":
        """Return the tokenizer of answers, which a decoder has to end: with [SEP], and without
        ALBEF's cleaning.
        """
        if self._loaded.closing and self._loaded.cleaning != "albef":
            return self
        cleaning = None if self._loaded.cleaning == "albef" else self._loaded.cleaning
        loaded = dataclasses.replace(copy.deepcopy(self._loaded), cleaning=cleaning, closing=True)
        ends = [(self._name(number), number) for number in (self.cls_id, self.sep_id)]
        loaded.backend.post_processor = processors.TemplateProcessing(
            single=f"{ends[0][0]} $A {ends[1][0]}", special_tokens=ends
        )
        return Tokenizer(loaded, max_tokens=self.max_tokens)

    def for_writing(self) -> "Tokenizer":
        """Return the tokenizer of texts that follow a prompt: without a first token, and with the
        closing one, which the files of causal language models leave out.
        """
        loaded = dataclasses.replace(copy.deepcopy(self._loaded), closing=True)
        end = self._name(self.sep_id)
        loaded.backend.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, self.sep_id)]
        )
        return Tokenizer(loaded, max_tokens=self.max_tokens)

    def truncates(self, text: str) -> bool:
        """Return whether a text is longer than `max_tokens`, so that encoding it truncates it."""
        return bool(self._encode(files.clean_text(text, self._loaded.cleaning)).overflowing)

    def cut_tokens(self, text: str) -> int:
        """Return how many tokens of a text are beyond `max_tokens`."""
        rest = self._encode(files.clean_text(text, self._loaded.cleaning)).overflowing
        return sum(part.special_tokens_mask.count(0) for part in rest)

    def pieces_per_word(self, words: Mapping[str, int]) -> tuple[float, float, float]:
        """Return the mean pieces of a word, the share of words of one piece, and the share with an
        unknown piece.

        `words` maps each word to its frequency, which is its weight in the means.
        """
        return pieces_per_word(self._backend, words, self._loaded.special["unk"])

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of a sequence of ids without special tokens; case and spacing may have
        changed.
        """
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if self._loaded.cleaning != files.CLIP:
            text: str = self._backend.decode(numbers, skip_special_tokens=True)
            return text
        ends = (self.cls_id, self.sep_id)
        tokens = [
            self._backend.id_to_token(number) or "" for number in numbers if number not in ends
        ]
        bytes_of = {character: byte for byte, character in files.byte_characters().items()}
        words = "".join(tokens).replace("</w>", " ")
        raw = b"".join(
            b" " if character == " " else bytes([bytes_of[character]]) for character in words
        )
        return raw.decode("utf-8", errors="replace").strip()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id."""
        tokens: dict[str, int] = self._backend.get_vocab()
        return tokens

    @functools.cached_property
    def token_texts(self) -> list[str]:
        """Text of each id; joining those of a text gives it back
        (`medvl.data.tokenizer.wordpiece`).
        """
        return token_texts(self._backend, self.vocab_size, self._special)

    def sentence_ids(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> Tensor:
        """Return (B, T) int64: index of the span that contains each token, -1 for none; T as in the
        encoded texts.

        `spans` has the (start, end) in characters of each text, from
        `medvl.data.reports.sentences.sentence_spans`. Raises ConfigError for a tokenizer that
        cleans its texts (CLIP, SigLIP), which shifts their characters.
        """
        if self._loaded.cleaning is not None:
            message = (
                f"the tokenizer of {self.source} cleans texts, so it cannot locate "
                f"sentences; use another"
            )
            raise ConfigError(message, "unsupported", field="sentences")
        rows = []
        for text, of_text in zip(texts, spans, strict=True):
            offsets = self._encode(text).offsets  # (0, 0) for special tokens
            places = [
                next((n for n, (a, b) in enumerate(of_text) if a < end <= b), -1)
                for _, end in offsets
            ]
            rows.append(torch.tensor(places, dtype=torch.int64))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)

    def word_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return (B, T) int64: the index of each token's word in its text; -1 on special tokens
        and padding.
        """
        return self._words.words(ids_BT, mask_BT)

    def save(self, folder: Path | str, *, token_types: bool = False) -> None:
        """Write the tokenizer to a folder that `load_tokenizer` and transformers' AutoTokenizer can
        read.

        With `token_types`, transformers' tokenizer also returns `token_type_ids`, which a BERT
        needs for pairs.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.no_truncation()  # the maximum length is stored in the configuration
        try:
            with new_path(folder / files.MODEL_FILE) as path:
                self._backend.save(str(path))
        finally:
            self._backend.enable_truncation(self.max_tokens)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.max_tokens,
            "medvl_source": self.source,
            **({"medvl_text": self._loaded.cleaning} if self._loaded.cleaning else {}),
            **({} if self._loaded.closing else {"medvl_closing": False}),
            **(
                {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
                if token_types
                else {}
            ),
            **{
                f"{role}_token": token
                for role, token in self._loaded.special.items()
                if token is not None
            },
        }
        write_atomic(
            folder / files.CONFIG_FILE, json.dumps(config, indent=1, sort_keys=True) + "\n"
        )
        if isinstance(self._backend.model, models.WordPiece):
            tokens = sorted(self.vocabulary.items(), key=lambda item: item[1])
            write_atomic(
                folder / files.VOCABULARY_FILE, "".join(f"{token}\n" for token, _ in tokens)
            )

    def _leave_open(self) -> None:
        """End texts without [SEP], as ALBEF's released tokenizer."""
        if self.cls_id == self.sep_id:
            raise ConfigError(
                f"the vocabulary of {self.source} has no first token: texts need [SEP]",
                "unsupported",
            )
        first = self._name(self.cls_id)
        self._backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, self.cls_id)]
        )

    def _name(self, number: int) -> str:
        token: str | None = self._backend.id_to_token(number)
        assert token is not None, "a special token of this vocabulary"
        return token

    def _encode(self, *inputs: Any, **options: Any) -> Any:
        """Return the backend's encoding. Raises ConfigError where its library fails on a text."""
        with files.backend_errors(self.source):
            return self._backend.encode(*inputs, **options)

    def _id(self, token: str) -> int:
        number: int | None = self._backend.token_to_id(token)
        if number is None:
            raise ConfigError(f"the vocabulary of {self.source} has no {token}", "missing")
        return number


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    max_tokens: int | None = None,
    lowercase: bool | None = None,
    cleaning: files.Cleaning | None = None,
    closing: bool | None = None,
) -> Tokenizer:
    """Load a tokenizer from a folder or the hub, or CLIP's.

    Args:
        source: a local folder, "clip", or a repository on the hub.
        revision: commit of the hub repository, 40 hexadecimal digits.
        max_tokens: maximum length including the first and last token. Default: the value in the
            files, else 512.
        lowercase: for a bare `vocab.txt` (WordPiece). Default: the value in its configuration, else
            True, as in Hugging Face's BERT tokenizers; Bio_ClinicalBERT was used that way although
            its vocabulary is cased.
        cleaning: "canonical" lower-cases texts and removes punctuation, which SigLIP needs but its
            files do not state; "siglip" does so as the tokenizer of transformers. "words" and
            "albef" clean as the released code of CARZero and of ALBEF, M2I2 and MUMC. Default: that
            of the files, if saved by medvl or of a class that cleans (SiglipTokenizer).
        closing: whether texts end with [SEP]; ALBEF's, M2I2's and MUMC's do not. Default: that of
            the files.

    Raises:
        ConfigError: the folder has no tokenizer, a file is damaged, or a setting does not match the
            source.
        WeightsError: the repository cannot be fetched, or the revision is not a commit.
    """
    is_folder = Path(source).is_dir()
    is_clip = str(source) == files.CLIP
    if is_clip:
        loaded = files.build_clip_tokenizer()
    elif is_folder or revision is not None:
        loaded = files.read_tokenizer(source, None if is_folder else revision, lowercase)
    else:
        message = (
            f"{source} is not a folder; for a hub repository also give its revision, a "
            f"commit of 40 digits"
        )
        raise ConfigError(message, "not_found", field="revision")
    if revision is not None and (is_folder or is_clip):
        raise ConfigError(
            f"{source} is not a hub repository and has no revision", "conflict", field="revision"
        )
    if cleaning is not None:
        loaded = dataclasses.replace(loaded, cleaning=cleaning)
    if closing is not None:
        loaded = dataclasses.replace(loaded, closing=closing)
    return Tokenizer(loaded, max_tokens=max_tokens)


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int = 8000, min_frequency: int = 2, max_tokens: int = 128
) -> Tokenizer:
    """Train a lower-casing WordPiece tokenizer.

    The most frequent pair of pieces is merged first, as in Hugging Face's trainer; the rule of the
    paper divides by the frequencies of both pieces. The same texts in any order give the same
    vocabulary with the same ids. `___` is one token. Memory is bounded: see
    `medvl.data.tokenizer.wordpiece`.

    Args:
        texts: read once.
        vocab_size: maximum number of ids; fewer when no more pieces reach `min_frequency`.
        min_frequency: least frequency of characters and pieces.
        max_tokens: maximum length of a text.

    Raises:
        ConfigError: the texts have no word, or `vocab_size` is too small for their characters.
    """
    words, count = count_words(texts)
    if not words:
        raise ConfigError(
            f"cannot train a vocabulary: {count} texts contain no word", "empty", field="texts"
        )
    reserved = [*_SPECIAL_TOKENS, MASKED_OUT]
    pieces = learn_pieces(words, vocab_size - len(reserved), min_frequency)
    vocabulary = {token: index for index, token in enumerate([*reserved, *pieces])}
    backend = files.build_wordpiece(vocabulary, lowercase=True)
    backend.add_tokens([AddedToken(MASKED_OUT, normalized=False)])
    special = dict(zip(("pad", "unk", "cls", "sep", "mask"), _SPECIAL_TOKENS, strict=True))
    source = f"WordPiece of {len(vocabulary)} from {count} texts"
    return Tokenizer(
        files.LoadedTokenizer(
            backend=backend, special=special, max_tokens=max_tokens, source=source
        )
    )


def train_words(
    texts: Iterable[str],
    *,
    min_frequency: int = 3,
    max_tokens: int = 128,
    cleaning: Literal["report", "r2gen"] = "report",
) -> Tokenizer:
    """Return a tokenizer of all words that occur at least `min_frequency` times; others become
    `<unk>`, as in R2Gen.

    Id 0 pads texts and is their first and last token; the words and `<unk>` follow in alphabetical
    order.

    Args:
        texts: read once.
        min_frequency: 3 for R2Gen's IU X-ray, 10 for its MIMIC-CXR.
        max_tokens: maximum length of a text.
        cleaning: "r2gen" also removes decimal points; for checkpoints that were published with such
            a vocabulary.

    Raises:
        ConfigError: no word is frequent enough.
    """
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(files.clean_text(text, cleaning).split())
    words = sorted(word for word, count in counts.items() if count >= min_frequency)
    if not words:
        message = f"cannot make a vocabulary: no word occurs {min_frequency} times"
        raise ConfigError(message, "empty", field="texts")
    vocabulary = {word: index for index, word in enumerate([_END, *sorted([*words, _UNKNOWN])])}
    special = {"pad": _END, "unk": _UNKNOWN, "cls": _END, "sep": _END, "mask": None}
    loaded = files.LoadedTokenizer(
        backend=files.build_words(vocabulary, end=_END, unknown=_UNKNOWN),
        special=special,
        max_tokens=max_tokens,
        source=f"{len(words)} words that occur {min_frequency} times",
        cleaning=cleaning,
    )
    return Tokenizer(loaded, max_tokens=max_tokens)
