"""Tokenizers: texts to padded token ids, for WordPiece, byte-level BPE and CLIP's vocabulary alike.

    tokenizer = load_tokenizer("vocab/mimic")                  # a folder
    tokenizer = load_tokenizer("OWNER/NAME", revision=COMMIT)  # from the hub, pinned
    tokenizer = load_tokenizer("clip")                         # open_clip's vocabulary, which lies in its wheel
    tokenizer = load_tokenizer(FOLDER, cleaning="canonical")   # SigLIP's: a SentencePiece vocabulary
    tokenizer = train_wordpiece(texts, vocab_size=8000)        # from the shards' own text
    ids_BT, mask_BT = tokenizer(["small left effusion", "no effusion"])

The work is done by the `tokenizers` library, one text after the other: its threads win nothing on a batch, and a loader
that forks its workers after they ran is warned about them.
"""

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from torch import Tensor

from medvl.data.tokenizer.files import (
    CLIP,
    CONFIG_FILE,
    MODEL_FILE,
    VOCABULARY_FILE,
    Cleaning,
    Loaded,
    byte_letters,
    clean,
    clip_backend,
    hub_backend,
    local_backend,
    wordpiece_backend,
)
from medvl.data.tokenizer.word_boundaries import WordBoundaries
from medvl.data.tokenizer.wordpiece_trainer import learn_pieces
from medvl.errors import ConfigError

DEFAULT_TOKENS = 512
"""Greatest length where neither the caller nor the tokenizer's files name one."""
MASKED_OUT = "___"
"""What MIMIC writes for removed words: one token of its own in a trained vocabulary."""
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Tokenizer:
    """Texts to ids and back. Made by `load_tokenizer` or `train_wordpiece`; can be pickled, forked and spawned.

    Attributes:
        vocab_size: number of ids.
        pad_id, cls_id, sep_id: padding (0 where the vocabulary has none), and what every text begins and ends with;
            where texts begin with nothing (T5, SigLIP), `cls_id` is `sep_id`.
        unk_id, mask_id: None where the vocabulary has none (CLIP).
        max_tokens: longer texts are cut, keeping their first and last token.
        source: where the vocabulary is from.
    """

    def __init__(self, loaded: Loaded, *, max_tokens: int | None = None) -> None:
        longest = max_tokens or loaded.max_tokens or DEFAULT_TOKENS
        if longest < 3:
            raise ConfigError(f"max_tokens is {longest}: a text has a first and a last token, and needs one between")
        self._loaded = loaded
        self._backend = loaded.backend
        self._backend.no_padding()
        self._backend.enable_truncation(longest)
        self.max_tokens, self.source = longest, loaded.source
        self.vocab_size = max(self._backend.get_vocab().values(), default=0) + 1
        ids = {role: None if token is None else self._id(token) for role, token in loaded.special.items()}
        if ids["sep"] is None:
            raise ConfigError(f"the vocabulary of {self.source} names no tokens to begin and to end a text with")
        self.pad_id: int = ids["pad"] or 0
        self.sep_id: int = ids["sep"]
        self.cls_id: int = self.sep_id if ids["cls"] is None else ids["cls"]
        self.unk_id: int | None = ids["unk"]
        self.mask_id: int | None = ids["mask"]
        special = {self.cls_id, self.sep_id} | ({ids["pad"]} if ids["pad"] is not None else set())
        self._words = WordBoundaries(self._backend, self.vocab_size, sorted(special))

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode texts.

        Args:
            texts: any number; an empty one becomes its first and last token.

        Returns:
            ids_BT, int64, padded on the right to the longest of these texts; mask_BT, bool, True on real tokens.
        """
        if isinstance(texts, str):
            raise ConfigError("give a list of texts, not one text: its letters would be taken for texts")
        encoded = [self._backend.encode(clean(text, self._loaded.cleaning)).ids for text in texts]
        width = max(map(len, encoded), default=0)
        padded = [ids + [self.pad_id] * (width - len(ids)) for ids in encoded]
        ids_BT = torch.tensor(padded, dtype=torch.int64).view(len(encoded), width)
        length_B = torch.tensor([len(ids) for ids in encoded], dtype=torch.int64)
        return ids_BT, torch.arange(width) < length_B[:, None]

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of one sequence of ids, without special tokens; case and spacing may have been lost on the way."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if self._loaded.cleaning != CLIP:
            text: str = self._backend.decode(numbers, skip_special_tokens=True)
            return text
        kept = [
            self._backend.id_to_token(number) or "" for number in numbers if number not in (self.cls_id, self.sep_id)
        ]
        letters = {letter: byte for byte, letter in byte_letters().items()}
        words = "".join(kept).replace("</w>", " ")
        raw = b"".join(b" " if letter == " " else bytes([letters[letter]]) for letter in words)
        return raw.decode("utf-8", errors="replace").strip()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id."""
        tokens: dict[str, int] = self._backend.get_vocab()
        return tokens

    def word_starts(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T) bool: True on the first sub-word of every word; False on special tokens and padding."""
        return self._words.starts(ids_BT, mask_BT)

    def word_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T) int64: which word of its text a token belongs to, from 0; -1 on special tokens and padding."""
        return self._words.words(ids_BT, mask_BT)

    def save(self, folder: Path | str) -> None:
        """Write the tokenizer into a folder, from which `load_tokenizer` and transformers' AutoTokenizer read it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.no_truncation()  # the file describes the vocabulary; the length belongs to the configuration
        try:
            self._backend.save(str(folder / MODEL_FILE))
        finally:
            self._backend.enable_truncation(self.max_tokens)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.max_tokens,
            "medvl_source": self.source,
            **({"medvl_text": self._loaded.cleaning} if self._loaded.cleaning else {}),
            **{f"{role}_token": token for role, token in self._loaded.special.items() if token is not None},
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if isinstance(self._backend.model, models.WordPiece):
            tokens = sorted(self.vocabulary.items(), key=lambda item: item[1])
            (folder / VOCABULARY_FILE).write_text("".join(f"{token}\n" for token, _ in tokens), encoding="utf-8")

    def _id(self, token: str) -> int:
        number: int | None = self._backend.token_to_id(token)
        if number is None:
            raise ConfigError(f"the vocabulary of {self.source} has no {token}")
        return number


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    max_tokens: int | None = None,
    lowercase: bool | None = None,
    cleaning: Cleaning | None = None,
) -> Tokenizer:
    """A tokenizer from a folder, from the hub, or CLIP's.

    Args:
        source: a local folder; "clip"; or a repository on the hub.
        revision: commit of the repository, all 40 digits; for the hub only.
        max_tokens: greatest length with its first and last token. Default: what the files say, else 512.
        lowercase: for a bare `vocab.txt` (WordPiece): what its own configuration says is the default, and without one
            True, as for every BERT tokenizer of Hugging Face; so was Bio_ClinicalBERT used, whose vocabulary is cased.
        cleaning: "canonical" lower-cases texts and takes their punctuation away, as SigLIP's are, of which its files
            say nothing. Default: what the files say; ours do.

    Raises:
        ConfigError: the folder holds no tokenizer, a file is damaged, or a setting does not go with the source.
        WeightsError: the repository cannot be had, or the revision is no commit.
    """
    if str(source) == CLIP:
        loaded = clip_backend()
    elif Path(source).is_dir():
        loaded = local_backend(Path(source), lowercase)
    elif revision is not None:
        loaded, revision = hub_backend(str(source), revision, lowercase), None
    else:
        raise ConfigError(
            f"{source} is no folder; for a repository on the hub give its revision, a commit of 40 digits, as well"
        )
    if revision is not None:
        raise ConfigError(f"revision is for repositories on the hub: {source} is not one")
    if cleaning is not None:
        loaded = dataclasses.replace(loaded, cleaning=cleaning)
    return Tokenizer(loaded, max_tokens=max_tokens)


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int = 8000, min_frequency: int = 2, max_tokens: int = 128
) -> Tokenizer:
    """A lower-casing WordPiece tokenizer with a vocabulary of these texts.

    The same texts in any order give the same vocabulary, id by id. `___` is one token.

    Args:
        texts: read once.
        vocab_size: most ids; fewer when the texts have no more pieces of that frequency.
        min_frequency: characters and pieces that are rarer are not taken.
        max_tokens: greatest length of a text.

    Raises:
        ConfigError: there is no text, or `vocab_size` is too small for the characters that occur.
    """
    words, count = _count_words(texts)
    if not words:
        raise ConfigError(f"{count} texts hold no word: a vocabulary cannot be trained on them")
    reserved = [*_SPECIAL_TOKENS, MASKED_OUT]
    pieces = learn_pieces(words, vocab_size - len(reserved), min_frequency)
    vocabulary = {token: index for index, token in enumerate([*reserved, *pieces])}
    backend = wordpiece_backend(vocabulary, lowercase=True)
    backend.add_tokens([AddedToken(MASKED_OUT, normalized=False)])
    special = dict(zip(("pad", "unk", "cls", "sep", "mask"), _SPECIAL_TOKENS, strict=True))
    source = f"WordPiece of {len(vocabulary)} from {count} texts"
    return Tokenizer(Loaded(backend=backend, special=special, max_tokens=max_tokens, source=source))


def _count_words(texts: Iterable[str]) -> tuple[Mapping[str, int], int]:
    """(how often every word occurs, number of texts), words split and lower-cased as the tokenizer will do it."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    chunks: collections.Counter[str] = collections.Counter()
    count = 0
    for text in texts:
        count += 1
        chunks.update(text.split())
    words: collections.Counter[str] = collections.Counter()
    for chunk, frequency in chunks.items():  # every distinct chunk is split once, however often it occurs
        for part in chunk.split(MASKED_OUT):
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(part)):
                words[word] += frequency
    return words, count
