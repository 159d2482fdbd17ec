"""Tokenizer files of others: impossible ids, steps that multiply texts, expressions that never
end, what is no file.
"""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises
from tokenizers import Regex, Tokenizer as Backend, models, normalizers, pre_tokenizers, processors

from medvl.data.tokenizer.limits import CLIP_WORDS
from medvl.data.tokenizer.tokenizer import load_tokenizer, train_wordpiece
from medvl.errors import ConfigError

TEXTS = ["small left effusion", "no pneumothorax", "the heart is of normal size"]
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_wordpiece(TEXTS, vocab_size=100, min_frequency=1).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def change(folder: Path, edit: Callable[[Any], Any]) -> Path:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    replaced = edit(content)
    path.write_text(json.dumps(content if replaced is None else replaced))
    return folder


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def split(expression: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def set_id(value: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["model"]["vocab"]["##n"] = value

    return edit


def all_zero(content: Any) -> None:
    content["model"]["vocab"] = dict.fromkeys(content["model"]["vocab"], 0)


def added(**entry: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        token = {**copy.deepcopy(content["added_tokens"][0]), "content": "<new>", **entry}
        content["added_tokens"].append(token)

    return edit


def ends_with(number: int) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [number]

    return edit


def part(name: str, value: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content[name] = value

    return edit


def model(name: str, value: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["model"][name] = value

    return edit


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an id of 2^31": (set_id(2**31), "malformed"),
    "an id of 2^63": (set_id(2**63), "malformed"),
    "a negative id": (set_id(-1), "malformed"),
    "an id that is a text": (set_id("7"), "malformed"),
    "an id with a fraction": (set_id(7.5), "malformed"),
    "an id that is true": (set_id(True), "malformed"),
    "an id far behind the others": (set_id(100_000), "malformed"),
    "one id for all": (all_zero, "malformed"),
    "one id twice": (set_id(9), "malformed"),
    "an added id of 2^31": (added(id=2**31), "malformed"),
    "a closing id out of the vocabulary": (ends_with(4_000_000), "malformed"),
    "a replacement that multiplies": (
        part("normalizer", replace({"String": "a"}, "a" * 100_000)),
        "too_large",
    ),
    "replacements that multiply": (
        part("normalizer", sequence(*[replace({"String": "a"}, "aa") for _ in range(30)])),
        "too_large",
    ),
    "insertions between letters": (
        part("normalizer", replace({"Regex": "x*"}, "b" * 100)),
        "too_large",
    ),
    "a long beginning": (
        part("normalizer", {"type": "Prepend", "prepend": "a" * 1000}),
        "too_large",
    ),
    "a chain of beginnings": (
        part("normalizer", sequence(*[{"type": "Prepend", "prepend": "aaa"}] * 20)),
        "too_large",
    ),
    "a decoder that multiplies": (
        part("decoder", replace({"String": "a"}, "a" * 1000)),
        "too_large",
    ),
    "a template of 10,000 tokens": (
        lambda c: c["post_processor"].update(single=c["post_processor"]["single"] * 10_000),
        "too_large",
    ),
    "words of any length": (model("max_input_chars_per_word", 10**9), "too_large"),
    "an unknown step": (part("pre_tokenizer", {"type": "Download", "url": "x"}), "unsupported"),
    "an unknown model": (model("type", "Pickle"), "unsupported"),
    "steps in no order": (part("normalizer", ["Lowercase"]), "malformed"),
    "no vocabulary": (model("vocab", None), "malformed"),
    "no token for unknown words": (model("unk_token", "[NONE]"), "missing"),
    "a list": (lambda _: [1, 2], "malformed"),
    "(a+)+$": (part("pre_tokenizer", split("(a+)+$")), "unsupported"),
    "(a|aa)+$": (part("pre_tokenizer", split("(a|aa)+$")), "unsupported"),
    "((a*)*)*b": (part("pre_tokenizer", split("((a*)*)*b")), "unsupported"),
    r"(\w+\s?)*$": (part("pre_tokenizer", split(r"(\w+\s?)*$")), "unsupported"),
    "(?:a{1,50}){1,50}c": (part("pre_tokenizer", split("(?:a{1,50}){1,50}c")), "unsupported"),
    r"(a)\1+": (part("pre_tokenizer", split(r"(a)\1+")), "unsupported"),
    "a*a*a*a*a*b": (part("pre_tokenizer", split("a*a*a*a*a*b")), "unsupported"),
    "an expression in a normalizer": (
        part("normalizer", replace({"Regex": "(.*)*x"}, "")),
        "unsupported",
    ),
    "a broken expression": (part("pre_tokenizer", split("(a")), "unsupported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_tokenizer_files_are_refused_in_seconds(name: str, folder: Path) -> None:
    edit, code = REFUSED[name]
    begin = time.monotonic()
    with raises(ConfigError, code, names=str(folder)):
        load_tokenizer(change(folder, edit))
    assert time.monotonic() - begin < 60


def test_steps_of_published_tokenizers_are_read(tmp_path: Path) -> None:
    """Each loads with the same ids as in its library."""
    vocabulary = {
        token: number
        for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *"abcdefghisnortlu"])
    }
    for number, (normalizer, pre_tokenizer) in enumerate(
        (
            (normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.Metaspace()),
            (
                normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
                pre_tokenizers.Split(Regex(GPT2), "isolated"),
            ),
            (normalizers.Prepend("_"), pre_tokenizers.Split(Regex(LLAMA3), "isolated")),
            (normalizers.NFKC(), pre_tokenizers.Split(Regex(CLIP_WORDS), "removed", invert=True)),
            (
                normalizers.Strip(),
                pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
            ),
        )
    ):
        backend = Backend(models.BPE(dict(vocabulary), [], unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
        expected = backend.encode("no left  effusion").ids
        folder = tmp_path / str(number)
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        ids_BT, _ = load_tokenizer(folder)(["no left  effusion"])
        assert ids_BT[0].tolist() == expected


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_pipes_and_folders_are_no_tokenizer_files(file: str, folder: Path) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with raises(ConfigError, "not_a_file", names=file):
        load_tokenizer(folder)
    (folder / file).unlink()
    (folder / file).mkdir()
    with raises(ConfigError, "not_a_file", names=file):
        load_tokenizer(folder)


def test_a_key_twice_in_a_tokenizer_file_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(
        path.read_text()
        .replace('"[PAD]":', '"[PAD]": 1, "[PAD]":', 1)
        .replace('"[PAD]": 0', '"[PAD]":0, "[PAD]":3', 1)
    )
    with raises(ConfigError, "malformed", names="twice"):
        load_tokenizer(folder)
