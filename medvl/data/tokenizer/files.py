"""Tokenizers on disk and on the hub: which files there are, and how they become a backend of `tokenizers`.

A folder holds `tokenizer.json` (Hugging Face's one-file format), or `vocab.txt` (WordPiece), or `vocab.json` with
`merges.txt` (byte-level BPE). `tokenizer_config.json` beside it names special tokens and the greatest length.
transformers is not used: its version 5 ignores a vocabulary file that is handed to its BERT tokenizer and makes every
word unknown.
"""

import contextlib
import dataclasses
import gzip
import html
import importlib.util
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from medvl.common.hub import fetch
from medvl.errors import ConfigError, WeightsError

MODEL_FILE, CONFIG_FILE, VOCABULARY_FILE = "tokenizer.json", "tokenizer_config.json", "vocab.txt"
_BPE_FILES = ("vocab.json", "merges.txt")
_LARGEST_FILE = 100 * 2**20
_LONGEST = 1_000_000  # what transformers writes for "no limit" is above this

CLIP: Literal["clip"] = "clip"
CLIP_TOKENS = 77
Cleaning = Literal["clip", "canonical"]
"""What is done to a text before it is split: what CLIP does, or SigLIP."""
_CLIP_START, _CLIP_END = "<start_of_text>", "<end_of_text>"
_CLIP_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
_CLIP_MERGES = 49152 - 256 - 2

_SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Role -> what its token is called where no configuration says so."""
_OTHER_NAMES = {"cls": "bos", "sep": "eos"}
"""Role -> what configurations of vocabularies that are no BERT's call it."""
_WITHOUT_PUNCTUATION = str.maketrans({"_": " ", **dict.fromkeys(string.punctuation.replace("_", ""))})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A backend and what it does not know of itself."""

    backend: Backend
    special: Mapping[str, str | None]
    """Token of each role: pad, unk, cls, sep, mask. None where the vocabulary has none (T5's has no cls)."""
    max_tokens: int | None
    """As stored; None where nothing is."""
    source: str
    cleaning: Cleaning | None = None


def local_backend(folder: Path, lowercase: bool | None) -> Loaded:
    """The tokenizer of a folder. Raises ConfigError when there is none, or its files are damaged or too large."""
    files = {name: folder / name for name in (MODEL_FILE, VOCABULARY_FILE, CONFIG_FILE, *_BPE_FILES)}
    return _read({name: path for name, path in files.items() if path.is_file()}, str(folder), lowercase, folder.name)


def hub_backend(hub_id: str, revision: str | None, lowercase: bool | None) -> Loaded:
    """The tokenizer of a repository at a commit. Raises WeightsError when it cannot be had."""
    files: dict[str, Path] = {}
    failures = []
    for names in ((MODEL_FILE,), (VOCABULARY_FILE,), _BPE_FILES):
        try:
            files |= {name: fetch(hub_id, name, revision) for name in names}
            break
        except WeightsError as error:
            failures.append(error)
    if not files:
        raise failures[0]
    with contextlib.suppress(WeightsError):  # old repositories have none: the conventions of their kind hold then
        files[CONFIG_FILE] = fetch(hub_id, CONFIG_FILE, revision)
    return _read(files, hub_id, lowercase, f"{hub_id}@{revision}")


def _read(files: Mapping[str, Path], where: str, lowercase: bool | None, source: str) -> Loaded:
    if lowercase is not None and MODEL_FILE in files:
        raise ConfigError(f"{where} says in {MODEL_FILE} how case is treated: leave lowercase out")
    try:
        config: dict[str, Any] = json.loads(_text(files[CONFIG_FILE])) if CONFIG_FILE in files else {}
        backend = _backend(files, config, lowercase)
    except ConfigError:
        raise
    except Exception as error:  # the backend raises bare Exception on a file that it cannot use
        raise ConfigError(f"the tokenizer of {where} cannot be read: {error}") from error
    if backend is None:
        raise ConfigError(f"{where} holds no tokenizer: neither {MODEL_FILE} nor {VOCABULARY_FILE} nor {_BPE_FILES}")
    longest, cleaning = config.get("model_max_length"), config.get("medvl_text")
    if cleaning not in (None, *get_args(Cleaning)):
        raise ConfigError(f"{where} has texts cleaned by {cleaning!r}: known are {', '.join(get_args(Cleaning))}")
    return Loaded(
        backend=backend,
        special={role: _special(backend, role, config) for role in _SPECIAL},
        max_tokens=int(longest) if isinstance(longest, int | float) and longest < _LONGEST else None,
        source=str(config.get("medvl_source", source)),
        cleaning=cleaning,
    )


def _backend(files: Mapping[str, Path], config: Mapping[str, Any], lowercase: bool | None) -> Backend | None:
    if MODEL_FILE in files:
        return Backend.from_str(_text(files[MODEL_FILE]))
    if VOCABULARY_FILE in files:
        tokens = [token.rstrip("\r") for token in _text(files[VOCABULARY_FILE]).split("\n")]
        vocabulary = {token: index for index, token in enumerate(tokens) if token}
        wanted = config.get("do_lower_case", True) if lowercase is None else lowercase
        return wordpiece_backend(vocabulary, lowercase=bool(wanted))
    if set(_BPE_FILES) <= set(files):
        return _byte_backend(json.loads(_text(files["vocab.json"])), _text(files["merges.txt"]))
    return None


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than {_LARGEST_FILE} bytes: it is no file of a tokenizer")
    return path.read_text(encoding="utf-8")


def _special(backend: Backend, role: str, config: Mapping[str, Any]) -> str | None:
    given = [config.get(f"{name}_token") for name in (role, _OTHER_NAMES.get(role))]
    named = [token.get("content") if isinstance(token, dict) else token for token in given]  # an AddedToken is a dict
    candidates = [token for token in named if isinstance(token, str)]
    return next((token for token in [*candidates, *_SPECIAL[role]] if backend.token_to_id(token) is not None), None)


def wordpiece_backend(vocabulary: Mapping[str, int], *, lowercase: bool) -> Backend:
    """BERT's tokenizer over a vocabulary. Raises ConfigError when a special token is missing."""
    missing = [names[0] for names in _SPECIAL.values() if names[0] not in vocabulary]
    if missing:
        raise ConfigError(f"the vocabulary lacks {', '.join(missing)}")
    backend = Backend(models.WordPiece(dict(vocabulary), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.add_special_tokens([names[0] for names in _SPECIAL.values()])
    return backend


def _byte_backend(vocabulary: dict[str, int], merges: str) -> Backend:
    """RoBERTa's tokenizer."""
    pairs = [tuple(line.split(" ")) for line in merges.split("\n") if line and not line.startswith("#version")]
    backend = Backend(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]), add_prefix_space=False
    )
    backend.add_special_tokens([names[1] for names in _SPECIAL.values()])
    return backend


def clip_backend() -> Loaded:
    """CLIP's tokenizer from the vocabulary in open_clip's wheel. Raises ConfigError when open_clip is not installed."""
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the CLIP vocabulary lies in open_clip_torch, which is not installed")
    path = Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : _CLIP_MERGES + 1]
    merges = [(left, right) for left, right in (line.split() for line in lines)]
    letters = list(byte_letters().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate([*tokens, _CLIP_START, _CLIP_END])}
    backend = Backend(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    split = pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    ends = [(token, vocabulary[token]) for token in (_CLIP_START, _CLIP_END)]
    backend.post_processor = processors.TemplateProcessing(single=f"{_CLIP_START} $A {_CLIP_END}", special_tokens=ends)
    backend.add_special_tokens([_CLIP_START, _CLIP_END])
    special = {"pad": None, "unk": None, "cls": _CLIP_START, "sep": _CLIP_END, "mask": None}
    return Loaded(backend=backend, special=special, max_tokens=CLIP_TOKENS, source=CLIP, cleaning=CLIP)


def clean(text: str, how: Cleaning | None) -> str:
    """A text as the tokenizer's model saw it in training."""
    if how == "canonical":  # lower case, without punctuation, spaces single: SigLIP's
        return " ".join(text.translate(_WITHOUT_PUNCTUATION).lower().split())
    return clip_clean(text) if how == CLIP else text


def clip_clean(text: str) -> str:
    """A text as CLIP saw it: encoding accidents and HTML entities mended, spaces single, lower case."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()


def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that byte-level BPE writes it as: itself, or one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
