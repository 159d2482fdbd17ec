r"""Limits of `tokenizer.json`, which comes with the checkpoints of others: ids, steps that multiply
texts, expressions.

The `tokenizers` library allocates and repeats what the file says, and its regular expressions may
need time that grows exponentially with the text. Expressions that medvl does not know are therefore
tried in a child process first.
"""

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from medvl.errors import ConfigError

CLIP_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
PUNCTUATION = r"[!-/:-@\[-`{-~]"
_CLIP_ENDS = r"<\|startoftext\|>|<\|endoftext\|>|"
_KNOWN_EXPRESSIONS = frozenset(
    {CLIP_WORDS, _CLIP_ENDS + CLIP_WORDS, PUNCTUATION, " {2,}", r"\s+", "\n"}
)
"""Expressions of CLIP and of models with SentencePiece, which are linear in the text."""
_NORMALIZERS = {
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Replace",
    "Sequence",
    "Strip",
    "StripAccents",
}
_PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Metaspace",
    "Punctuation",
    "Sequence",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
_POST_PROCESSORS = {
    "BertProcessing",
    "ByteLevel",
    "RobertaProcessing",
    "Sequence",
    "TemplateProcessing",
}
_DECODERS = {
    "BPEDecoder",
    "ByteFallback",
    "ByteLevel",
    "CTC",
    "Fuse",
    "Metaspace",
    "Replace",
    "Sequence",
    "Strip",
    "WordPiece",
}
_KINDS: Mapping[str, set[str]] = {
    "normalizer": _NORMALIZERS,
    "pre_tokenizer": _PRE_TOKENIZERS,
    "post_processor": _POST_PROCESSORS,
    "decoder": _DECODERS,
}
_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}
_MAX_GROWTH = 64
"""Largest factor by which the steps of a tokenizer may lengthen a text."""
_MAX_STEPS = 64
_MAX_TEMPLATE = 64
_MAX_WORD = 10_000
_MAX_EXPRESSION = 2000
_MAX_CHARSMAP = 1 << 20
_LONG_REPEAT = 10
_TRIAL_SECONDS = 10.0
_TRIAL = """
import json, sys, tokenizers
given = json.load(sys.stdin)
tokenizer = tokenizers.Tokenizer.from_str(given["tokenizer"])
for text in given["texts"]:
    tokenizer.encode(text)
"""
_TRIAL_LENGTH = 3000


def check_tokenizer_file(content: Any, text: str, where: str) -> None:
    """Check the content of a `tokenizer.json`, and try its regular expressions if they are unknown.

    Args:
        content: the parsed file.
        text: the file.
        where: its folder, for messages.

    Raises ConfigError: "malformed" for impossible ids, "unsupported" for a kind of step that no
    tokenizer of the library has or an expression that does not end, "too_large" for steps that
    multiply texts.
    """
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"the tokenizer of {where} is no object with a model", "malformed")
    model = content["model"]
    _check_model(model, where)
    additions = content.get("added_tokens") or []
    check_ids(
        [
            *_ids(model),
            *(
                entry.get("id")
                for entry in additions
                if isinstance(entry, dict) and entry.get("content")
            ),
        ],
        where,
        unique=False,
    )
    growth = 1.0
    expressions = []
    for part, kinds in _KINDS.items():
        steps = list(_steps(content.get(part), part, where))
        for step in steps:
            if step["type"] not in kinds:
                names = ", ".join(sorted(kinds))
                message = (
                    f"the tokenizer of {where} has a {part} {str(step['type'])!r}; "
                    f"expected one of {names}"
                )
                raise ConfigError(message, "unsupported", field=part)
            growth *= _growth(step, part)
            expressions += _expressions(step)
        if len(steps) > _MAX_STEPS:
            raise ConfigError(
                f"the tokenizer of {where} has {len(steps)} steps in {part}",
                "too_large",
                field=part,
            )
    if not growth <= _MAX_GROWTH:
        message = (
            f"the tokenizer of {where} can make texts over {_MAX_GROWTH} times as long: "
            f"shorten what it inserts"
        )
        raise ConfigError(message, "too_large", field="normalizer")
    _check_ends(
        content.get("post_processor"),
        {*_ids(model), *(each.get("id") for each in additions)},
        where,
    )
    unknown = [expression for expression in expressions if expression not in _KNOWN_EXPRESSIONS]
    if unknown:
        _try(unknown, text, where)


def check_ids(ids: list[Any], where: str, *, unique: bool = True) -> None:
    """Raise ConfigError "malformed" unless ids are numbers from 0 without large gaps, and
    different with `unique`.
    """
    wrong = next(
        (each for each in ids if not isinstance(each, int) or isinstance(each, bool) or each < 0),
        None,
    )
    different = len(set(map(str, ids)))
    if wrong is not None:
        raise ConfigError(
            f"the vocabulary of {where} has the id {wrong!r}; expected numbers from 0", "malformed"
        )
    if ids and max(ids) >= 2 * different + 1024:
        message = (
            f"the vocabulary of {where} has the id {max(ids)} and {different} ids: they "
            f"must follow each other"
        )
        raise ConfigError(message, "malformed")
    if unique and different < len(ids):
        message = (
            f"the vocabulary of {where} gives {len(ids)} tokens {different} ids: each "
            f"needs one of its own"
        )
        raise ConfigError(message, "malformed")


@contextlib.contextmanager
def backend_errors(where: str) -> Iterator[None]:
    """Raise ConfigError for a panic of the `tokenizers` library, which is no `Exception` and
    would end the program.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        message = (
            f"the tokenizer of {where} failed within its library: take the tokenizer of "
            f"another checkpoint"
        )
        raise ConfigError(message, "malformed") from None


def _check_model(model: Mapping[str, Any], where: str) -> None:
    kind = model.get("type", "BPE" if "merges" in model else "WordPiece")
    if kind not in _MODELS:
        expected = ", ".join(sorted(_MODELS))
        message = f"the tokenizer of {where} has a model {str(kind)!r}; expected one of {expected}"
        raise ConfigError(message, "unsupported", field="model")
    if not isinstance(model.get("vocab"), dict | list):
        raise ConfigError(f"the tokenizer of {where} has no vocabulary", "malformed", field="model")
    if model.get("dropout"):
        message = (
            f"the tokenizer of {where} drops merges at random, which changes the ids of a "
            f"text; set dropout to null"
        )
        raise ConfigError(message, "unsupported", field="dropout")
    longest = model.get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or longest > _MAX_WORD:
        message = (
            f"the tokenizer of {where} takes words of {longest} characters, over the "
            f"limit of {_MAX_WORD}"
        )
        raise ConfigError(message, "too_large", field="max_input_chars_per_word")
    unknown = model.get("unk_token", "[UNK]" if kind == "WordPiece" else None)
    if kind in ("WordPiece", "WordLevel") and unknown not in model["vocab"]:
        message = f"the tokenizer of {where} lacks its token for unknown words, {unknown!r}"
        raise ConfigError(message, "missing", field="unk_token")
    check_ids(_ids(model), where)


def _ids(model: Mapping[str, Any]) -> list[Any]:
    vocabulary = model["vocab"]
    return (
        list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    )


def _steps(value: Any, part: str, where: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a step of a tokenizer and, of a sequence, all of its steps."""
    if value is None:
        return
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("type"), str)
        or depth > _LONG_REPEAT
    ):
        raise ConfigError(
            f"the tokenizer of {where} has a malformed {part}", "malformed", field=part
        )
    yield value
    for names in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = value.get(names, [])
        for each in inner if isinstance(inner, list) else []:
            yield from _steps(each, part, where, depth + 1)


def _growth(step: Mapping[str, Any], part: str) -> float:
    """Return the largest factor by which a step lengthens a text; 1 for steps with a small one."""
    if step["type"] == "Precompiled":
        charsmap = step.get("precompiled_charsmap") or ""
        return 1.0 if len(charsmap) <= _MAX_CHARSMAP else math.inf
    if step["type"] == "TemplateProcessing":
        pieces = [*(step.get("single") or []), *(step.get("pair") or [])]
        tokens = [each.get("ids") or [] for each in (step.get("special_tokens") or {}).values()]
        return (
            1.0
            if len(pieces) <= _MAX_TEMPLATE and all(len(ids) <= _MAX_TEMPLATE for ids in tokens)
            else math.inf
        )
    if step["type"] == "Prepend":
        return float(max(1, len(str(step.get("prepend", "")))))
    if step["type"] == "Replace":
        pattern = step.get("pattern") or {}
        content = len(str(step.get("content", "")))
        if isinstance(pattern, dict) and "String" in pattern:
            return max(1.0, content / max(1, len(str(pattern["String"]))))
        return 1.0 + content  # an expression may match between all characters
    return 1.0


def _expressions(step: Mapping[str, Any]) -> list[str]:
    pattern = step.get("pattern")
    return [str(pattern["Regex"])] if isinstance(pattern, dict) and "Regex" in pattern else []


def _check_ends(value: Any, ids: set[Any], where: str) -> None:
    """Raise ConfigError "malformed" where the tokens at the ends of a text are not in the
    vocabulary.
    """
    for step in _steps(value, "post_processor", where):
        tokens = [pair for pair in (step.get("cls"), step.get("sep")) if isinstance(pair, list)]
        numbers = [pair[1] for pair in tokens if len(pair) == 2]
        numbers += [
            id_
            for each in (step.get("special_tokens") or {}).values()
            for id_ in each.get("ids") or []
        ]
        outside = [id_ for id_ in numbers if id_ not in ids]
        if outside:
            message = (
                f"the tokenizer of {where} ends texts with the id {outside[0]!r}, which "
                f"its vocabulary lacks"
            )
            raise ConfigError(message, "malformed", field="post_processor")


def _try(expressions: list[str], text: str, where: str) -> None:
    """Raise ConfigError "unsupported" where expressions are ambiguous, or do not end on repeated
    characters.
    """
    for expression in expressions:
        if len(expression) > _MAX_EXPRESSION or _is_ambiguous(expression):
            message = (
                f"the tokenizer of {where} has a regular expression that may never end: "
                f"repeats in a repeat"
            )
            raise ConfigError(message, "unsupported", field="pre_tokenizer")
    letters = sorted(
        {
            "a",
            "A",
            "1",
            " ",
            "\n",
            "-",
            "\N{LATIN SMALL LETTER E WITH ACUTE}",
            *"".join(expressions),
        }
    )
    end = f"!{''.join(letters)}"  # libraries stop early where a text lacks a letter that must occur
    texts = [letter * _TRIAL_LENGTH + end for letter in letters]
    request = json.dumps({"tokenizer": text, "texts": texts}).encode()
    command = [sys.executable, "-I", "-c", _TRIAL]
    try:
        subprocess.run(
            command,
            input=request,
            check=True,
            capture_output=True,
            timeout=_TRIAL_SECONDS + len(text) / 1e6,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        message = (
            f"the tokenizer of {where} has a regular expression that fails or does not "
            f"end: {expressions[0][:80]!r}"
        )
        raise ConfigError(message, "unsupported", field="pre_tokenizer") from None


def _is_ambiguous(expression: str) -> bool:
    r"""Return whether an expression repeats a group that itself repeats or has alternatives, or
    refers back to one.
    """
    groups = [False]
    position = 0
    while position < len(expression):
        character = expression[position]
        if character == "\\":
            if expression[position + 1 : position + 2].isdigit() or expression[
                position + 1 : position + 2
            ] in (
                "k",
                "g",
            ):
                return True
            position += 2
            continue
        if character == "[":
            position = _end_of_class(expression, position)
        elif character == "(":
            groups.append(False)
        elif character == ")" and len(groups) > 1:
            inner = groups.pop()
            if inner and _repeats(expression, position + 1):
                return True
            groups[-1] |= inner
        elif character == "|" and len(groups) > 1:
            groups[-1] = True
        if character not in "(|" and _repeats(expression, position + 1):
            groups[-1] = True
        position += 1
    return False


def _end_of_class(expression: str, position: int) -> int:
    """Return the position of the bracket that closes a class, which may contain classes."""
    depth = 0
    while position < len(expression):
        if expression[position] == "\\":
            position += 1
        elif expression[position] == "[":
            depth += 1
        elif expression[position] == "]":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return position


def _repeats(expression: str, position: int) -> bool:
    """Return whether a quantifier at this position repeats often."""
    if expression[position : position + 1] in ("*", "+"):
        return True
    if expression[position : position + 1] != "{":
        return False
    low, _, high = expression[position + 1 :].partition("}")[0].partition(",")
    most = high if "," in expression[position:].partition("}")[0] else low
    return not most.strip().isdigit() or int(most) > _LONG_REPEAT
