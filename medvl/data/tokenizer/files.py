"""Tokenizer files on disk and on the hub, read into a `tokenizers.Tokenizer`.

A folder contains `tokenizer.json` (Hugging Face's one-file format), or `vocab.txt` (WordPiece), or
`vocab.json` with `merges.txt` (byte-level BPE). An optional `tokenizer_config.json` has the special
tokens and the maximum length. transformers is not used: version 5 ignores a vocabulary file passed
to its BERT tokenizer and makes every word unknown.
"""

import contextlib
import dataclasses
import gzip
import html
import importlib.util
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import (
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from medvl.common.hub import fetch
from medvl.common.text_files import read_text
from medvl.common.untrusted import parse_json
from medvl.data.tokenizer.limits import CLIP_WORDS, backend_errors, check_ids, check_tokenizer_file
from medvl.errors import ConfigError, WeightsError

# Cleaning of texts in the released code of dual-encoders and fusion-encoders, before a BERT
# tokenizer.
#
# "1. There is a 3.2 cm nodule - left/right?"
#    words ->  "there is a 3 2 cm nodule left right"
#    albef ->  "1 there is a 32 cm nodule left right"

_STOP_OR_NUMBER = re.compile(r"[0-9]+\.|\.")
_WORD = re.compile(r"\w+")
_DELETED_BY_ALBEF = re.compile(r"[,.'!?\"()*#:;~]")
_BLANKS_OF_ALBEF = str.maketrans({"-": " ", "/": " "})
_ALBEF_WORDS = 30


def clean_words(text: str) -> str:
    """Return the lower-case words of a text without punctuation and other than ASCII characters
    (GLoRIA, CARZero).

    Full stops end sentences, together with a number before them, and sentences of one word are
    removed. A text without a longer sentence keeps its words, where the released code leaves
    nothing of it.
    """
    sentences = [_WORD.findall(part.lower()) for part in _STOP_OR_NUMBER.split(text)]
    longer = [words for words in sentences if len(words) > 1]
    words = [
        word.encode("ascii", "ignore").decode("ascii")
        for part in longer or sentences
        for word in part
    ]
    return " ".join(word for word in words if word)


def clean_as_albef(text: str) -> str:
    """Return a caption or a question as ALBEF, M2I2 and MUMC read it: lower case, 30 words,
    little punctuation.
    """
    text = _DELETED_BY_ALBEF.sub("", text.lower()).translate(_BLANKS_OF_ALBEF)
    return " ".join(text.split()[:_ALBEF_WORDS])


# Cleaning of reports for vocabularies of words: lower case, full stops as words, no other
# punctuation.
#
# "1. Nodule of 3.2 cm. 2. No effusion."   ->   "nodule of 3.2 cm . no effusion ."

_PUNCTUATION = r",?;*!%^&_+()\[\]{}:<=>@\"/\\'"
_REMOVED = re.compile(rf"[{_PUNCTUATION}]|(?<!\d)\.|\.(?!\d)")
_LIST_NUMBER = re.compile(r"(^|\. )\d{1,2}\. ")
_SENTENCE_END = re.compile(r"\.+(?:\s+|$)")
_REMOVED_BY_R2GEN = re.compile(rf"[.{_PUNCTUATION}]")


def clean_report(text: str) -> str:
    """Return the words of a report, separated by spaces, each sentence closed by a full stop.

    As R2Gen's cleaner, except that decimal points are kept and that numbers are removed at the
    start of a sentence only: R2Gen's changes `3.2 cm` to `32 cm`, and `T11. The` to `t1the`.
    """
    text = _LIST_NUMBER.sub(r"\1", re.sub(r"\.{2,}", ".", " ".join(text.split())))
    sentences = (
        " ".join(_REMOVED.sub("", part).split()) for part in _SENTENCE_END.split(text.lower())
    )
    return " ".join(f"{sentence} ." for sentence in sentences if sentence)


def clean_report_as_r2gen(text: str) -> str:
    """Return the words of a report as R2Gen's released cleaner does, for vocabularies of its
    published checkpoints.

    Decimal points are removed, and list numbers at any place.
    """
    text = re.sub(r"\.{2,}", ".", re.sub(r"_{2,}", "_", " ".join(text.split())))
    text = text.replace("1. ", "")
    for number in "2345":
        text = text.replace(f". {number}. ", ". ")
    for number in "2345":
        text = text.replace(f" {number}. ", ". ")
    sentences = (
        _REMOVED_BY_R2GEN.sub("", part).strip() for part in text.strip().lower().split(". ")
    )
    return " ".join((" . ".join(sentences) + " .").split())


MODEL_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
VOCABULARY_FILE = "vocab.txt"
_BPE_FILES = ("vocab.json", "merges.txt")
_FORMATS = ((MODEL_FILE,), (VOCABULARY_FILE,), _BPE_FILES)
"""Files of a tokenizer; the first complete format is read."""
_LARGEST_FILE = 100 * 2**20
_LARGEST_LENGTH = 1_000_000  # transformers writes a larger number for "no limit"

CLIP: Literal["clip"] = "clip"
CLIP_TOKENS = 77
Cleaning = Literal["clip", "canonical", "siglip", "lower", "report", "r2gen", "words", "albef"]
"""Text cleaning before tokenization: that of CLIP, of SigLIP as in open_clip and as in transformers
(which removes underscores without a space), lower case alone (SigLIP 2), for vocabularies of words
(`report_cleaning`), or as the released code of R2Gen, of CARZero, or of ALBEF, M2I2 and MUMC
(`published_cleaning`).
"""
_CLIP_START = "<start_of_text>"
_CLIP_END = "<end_of_text>"
_CLIP_MERGES = 49152 - 256 - 2

_SPECIAL = {
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "cls": ("[CLS]", "<s>"), "sep": ("[SEP]",
    "</s>"), "mask": ("[MASK]", "<mask>"),
}  # fmt: skip
"""Role -> names of its token without a configuration."""
_OTHER_NAMES = {"cls": "bos", "sep": "eos"}
"""Role -> its name in configurations of vocabularies other than BERT's."""
_WITHOUT_PUNCTUATION = str.maketrans(
    {"_": " ", **dict.fromkeys(string.punctuation.replace("_", ""))}
)
_WITHOUT_ANY_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens and settings."""

    backend: Backend
    special: Mapping[str, str | None]
    """Token of each role: pad, unk, cls, sep, mask; None where the vocabulary has none (T5 has
    no cls).
    """
    max_tokens: int | None
    """Stored maximum length, or None."""
    source: str
    cleaning: Cleaning | None = None
    closing: bool = True
    """Whether texts end with the last token ([SEP])."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains the files of a tokenizer."""
    return any((folder / name).is_file() for name in (MODEL_FILE, VOCABULARY_FILE, _BPE_FILES[0]))


def read_tokenizer(
    source: str | Path, revision: str | None, lowercase: bool | None
) -> LoadedTokenizer:
    """Read the tokenizer in a folder or, with a revision, that of a hub repository at this commit.

    Raises ConfigError when it is missing, damaged or too large; WeightsError when it cannot be
    fetched.
    """
    where = str(source)
    if revision is None:
        folder = Path(source)
        names = [name for form in _FORMATS for name in form]
        paths = {name: folder / name for name in (*names, CONFIG_FILE)}
        files = {name: path for name, path in paths.items() if path.exists()}
        origin = folder.name
    else:
        files = _fetch_files(where, revision)
        origin = f"{where}@{revision}"
    if lowercase is not None and MODEL_FILE in files:
        raise ConfigError(
            f"lowercase of {where} is defined by its {MODEL_FILE}", "conflict", field="lowercase"
        )
    try:
        used = next((names for names in _FORMATS if set(names) <= set(files)), ())
        texts = {name: _text(files[name]) for name in (CONFIG_FILE, *used) if name in files}
        values = {name: parse_json(text) for name, text in texts.items() if name.endswith(".json")}
        config: dict[str, Any] = values.get(CONFIG_FILE, {})
        if not isinstance(config, dict):
            raise ConfigError(f"{files[CONFIG_FILE]}: expected a JSON object", "malformed")
        with backend_errors(where):
            backend = _backend(texts, values, lowercase, where)
    except ConfigError:
        raise
    except Exception as error:  # the backend raises bare Exception on a file that it cannot use
        raise ConfigError(
            f"the tokenizer of {where} cannot be read: {error}", "malformed"
        ) from error
    if backend is None:
        expected = f"{MODEL_FILE}, {VOCABULARY_FILE} or {' and '.join(_BPE_FILES)}"
        raise ConfigError(f"{where} has no tokenizer: expected {expected}", "not_found")
    longest = config.get("model_max_length")
    cleaning = config.get("medvl_text") or _cleaning_of_class(config, where)
    if cleaning not in (None, *get_args(Cleaning)):
        message = (
            f"{where}: medvl_text must be one of {', '.join(get_args(Cleaning))}, got {cleaning!r}"
        )
        raise ConfigError(message, "unknown_name", field="medvl_text")
    closing = config.get("medvl_closing", True)
    if not isinstance(closing, bool):
        message = f"{where}: medvl_closing must be true or false, got {closing!r}"
        raise ConfigError(message, "wrong_type", field="medvl_closing")
    return LoadedTokenizer(
        backend=backend,
        special={role: _special(backend, role, config) for role in _SPECIAL},
        max_tokens=int(longest)
        if isinstance(longest, int | float) and longest < _LARGEST_LENGTH
        else None,
        source=str(config.get("medvl_source", origin)),
        cleaning=cleaning,
        closing=closing,
    )


def _fetch_files(hub_id: str, revision: str) -> dict[str, Path]:
    """Return the files of a hub repository's tokenizer. Raises WeightsError."""
    files: dict[str, Path] = {}
    failures = []
    for names in _FORMATS:
        try:
            files |= {name: fetch(hub_id, name, revision) for name in names}
            break
        except WeightsError as error:
            failures.append(error)
    if not files:
        raise failures[0]
    with contextlib.suppress(WeightsError):  # old repositories have none; defaults are used
        files[CONFIG_FILE] = fetch(hub_id, CONFIG_FILE, revision)
    return files


def _cleaning_of_class(config: Mapping[str, Any], where: str) -> Cleaning | None:
    """Return how the class of a tokenizer in transformers cleans texts beside its file's rules."""
    kind = str(config.get("tokenizer_class", ""))
    lowercase = config.get("do_lower_case")
    if kind.startswith("SiglipTokenizer"):
        if lowercase is False:
            message = (
                f"{where}: medvl lower-cases the texts of a SiglipTokenizer; expected "
                f"do_lower_case true in {CONFIG_FILE}"
            )
            raise ConfigError(message, "unsupported", field="do_lower_case")
        return "siglip"
    is_lower = kind.startswith("Siglip2Tokenizer")
    return "lower" if is_lower or (kind.startswith("Gemma") and lowercase is True) else None


def _backend(
    texts: Mapping[str, str], values: Mapping[str, Any], lowercase: bool | None, where: str
) -> Backend | None:
    """Return the tokenizer of one format's files: their texts, and the values of JSON files."""
    if MODEL_FILE in texts:
        check_tokenizer_file(values[MODEL_FILE], texts[MODEL_FILE], where)
        return Backend.from_str(texts[MODEL_FILE])
    if VOCABULARY_FILE in texts:
        tokens = [token.rstrip("\r") for token in texts[VOCABULARY_FILE].split("\n")]
        vocabulary = {token: index for index, token in enumerate(tokens) if token}
        config = values.get(CONFIG_FILE, {})
        lowercase = config.get("do_lower_case", True) if lowercase is None else lowercase
        return build_wordpiece(
            vocabulary,
            lowercase=bool(lowercase),
            strip_accents=config.get("strip_accents"),
            split_chinese=bool(config.get("tokenize_chinese_chars", True)),
        )
    if set(_BPE_FILES) <= set(texts):
        vocabulary = values["vocab.json"]
        check_ids(list(vocabulary.values()), where)
        return _build_byte_level(vocabulary, texts["merges.txt"])
    return None


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_FILE:
        raise ConfigError(
            f"{path} is larger than {_LARGEST_FILE} bytes: not a tokenizer file", "too_large"
        )
    return read_text(path, ConfigError, what="a tokenizer file")


def _special(backend: Backend, role: str, config: Mapping[str, Any]) -> str | None:
    values = [config.get(f"{name}_token") for name in (role, _OTHER_NAMES.get(role))]
    # an AddedToken is a dict
    tokens = [value.get("content") if isinstance(value, dict) else value for value in values]
    candidates = [token for token in tokens if isinstance(token, str)]
    return next(
        (
            token
            for token in [*candidates, *_SPECIAL[role]]
            if backend.token_to_id(token) is not None
        ),
        None,
    )


def build_wordpiece(
    vocabulary: Mapping[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> Backend:
    """Build BERT's tokenizer for a vocabulary. Raises ConfigError when a special token is missing.

    Args:
        vocabulary: token -> id.
        lowercase: lower-case texts.
        strip_accents: remove accents; None does so where texts are lower-cased.
        split_chinese: make each Chinese character a word.
    """
    missing = [names[0] for names in _SPECIAL.values() if names[0] not in vocabulary]
    if missing:
        raise ConfigError(f"the vocabulary lacks {', '.join(missing)}", "missing")
    backend = Backend(models.WordPiece(dict(vocabulary), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.add_special_tokens([names[0] for names in _SPECIAL.values()])
    return backend


def build_words(vocabulary: Mapping[str, int], *, end: str, unknown: str) -> Backend:
    """Build a tokenizer of words separated by spaces, with one token for both ends of a text."""
    backend = Backend(models.WordLevel(dict(vocabulary), unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(end, vocabulary[end])]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=ends
    )
    backend.add_special_tokens([end, unknown])
    return backend


def _build_byte_level(vocabulary: dict[str, int], merges: str) -> Backend:
    """Build RoBERTa's tokenizer."""
    pairs = [
        tuple(line.split(" "))
        for line in merges.split("\n")
        if line and not line.startswith("#version")
    ]
    backend = Backend(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]), add_prefix_space=False
    )
    backend.add_special_tokens([names[1] for names in _SPECIAL.values()])
    return backend


def build_clip_tokenizer() -> LoadedTokenizer:
    """Build CLIP's tokenizer from the vocabulary in open_clip. Raises ConfigError when open_clip
    is not installed.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the CLIP vocabulary needs open_clip_torch, which is not installed", "not_found"
        )
    path = Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : _CLIP_MERGES + 1]
    merges = [(left, right) for left, right in (line.split() for line in lines)]
    letters = list(byte_characters().values())
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *(left + right for left, right in merges),
    ]
    vocabulary = {token: index for index, token in enumerate([*tokens, _CLIP_START, _CLIP_END])}
    backend = Backend(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    split = pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    ends = [(token, vocabulary[token]) for token in (_CLIP_START, _CLIP_END)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_CLIP_START} $A {_CLIP_END}", special_tokens=ends
    )
    backend.add_special_tokens([_CLIP_START, _CLIP_END])
    special = {"pad": None, "unk": None, "cls": _CLIP_START, "sep": _CLIP_END, "mask": None}
    return LoadedTokenizer(
        backend=backend, special=special, max_tokens=CLIP_TOKENS, source=CLIP, cleaning=CLIP
    )


def clean_text(text: str, how: Cleaning | None) -> str:
    """Clean a text as in the training of the tokenizer's model."""
    if how == "canonical":  # SigLIP: lower case, without punctuation, single spaces
        return " ".join(text.translate(_WITHOUT_PUNCTUATION).lower().split())
    if how == "siglip":
        return " ".join(text.lower().translate(_WITHOUT_ANY_PUNCTUATION).split())
    if how == "lower":
        return text.lower()
    if how in ("words", "albef"):
        return clean_words(text) if how == "words" else clean_as_albef(text)
    if how in ("report", "r2gen"):
        return clean_report(text) if how == "report" else clean_report_as_r2gen(text)
    return clean_clip_text(text) if how == CLIP else text


def clean_clip_text(text: str) -> str:
    """Clean a text as CLIP does: fix encoding errors and HTML entities, collapse spaces,
    lower-case.
    """
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()


def byte_characters() -> dict[int, str]:
    """Return byte -> printable character in byte-level BPE: the same one, or one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
