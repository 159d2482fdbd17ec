"""Hashed ids, salt files, capped ages, and the identifier screen."""

import multiprocessing
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import raises

from medvl.data.privacy import (
    Deidentifier,
    cap_age,
    default_salt_file,
    find_identifiers,
    is_identifying_header,
)
from medvl.errors import ConfigError, CorpusError

SALT = bytes(range(32))


@pytest.fixture
def deid() -> Deidentifier:
    return Deidentifier(SALT)


def test_hashes_are_stable_hexadecimal_and_depend_on_the_salt(deid):
    # Fixed value: a different hash would not match the ids in existing shards.
    assert deid.patient("10000032") == "8eb5a950e3f825eb9f64"
    assert (
        deid.patient("10000032")
        == Deidentifier(SALT).patient(10000032)
        == deid.patient(" 10000032 ")
    )
    assert re.fullmatch(r"[0-9a-f]{20}", deid.patient("10000032"))
    assert deid.patient("10000032") != Deidentifier(SALT[::-1]).patient("10000032")


def test_kinds_of_id_never_collide(deid):
    assert len({deid.patient("7"), deid.image("7"), deid.study("7", "7")}) == 3
    assert deid.study("ab", "c") != deid.study("a", "bc")
    ids = [str(number) for number in range(3000)]
    hashes = [
        hashed
        for one in ids
        for hashed in (deid.patient(one), deid.image(one), deid.study(one, "1"))
    ]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_id_raises(deid, empty):
    with raises(CorpusError, "missing"):
        deid.patient(empty)
    with raises(CorpusError, "missing"):
        deid.study("7", empty)


def test_repr_and_fingerprint_hide_the_salt(deid):
    assert SALT.hex() not in repr(deid)
    assert repr(SALT) not in repr(deid)
    assert re.fullmatch(r"[0-9a-f]{8}", deid.fingerprint)
    assert deid.fingerprint not in SALT.hex()
    assert deid.fingerprint != Deidentifier(SALT[::-1]).fingerprint


def test_deidentifier_can_be_pickled(deid):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(deid.patient, ("7",)) == deid.patient("7")


def test_created_salt_file_is_private_and_reusable(tmp_path):
    path = tmp_path / "config" / "salt"
    created = Deidentifier.from_file(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
    assert Deidentifier.from_file(path) == Deidentifier.from_file(path, create=True) == created
    assert Deidentifier.from_file(tmp_path / "other", create=True) != created
    assert sorted(child.name for child in path.parent.iterdir()) == [
        "salt"
    ]  # no temporary file is left


def _fingerprint(path: Path) -> str:
    return Deidentifier.from_file(path, create=True).fingerprint


def test_concurrent_salt_creation_gives_one_salt(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        fingerprints = pool.map(_fingerprint, [tmp_path / "salt"] * 16, chunksize=1)
    assert len(set(fingerprints)) == 1


def test_salt_file_errors_do_not_quote_the_salt(tmp_path):
    with raises(ConfigError, "not_found", names="MEDVL_SALT_FILE"):
        Deidentifier.from_file(tmp_path / "missing")
    short = tmp_path / "short"
    short.write_text("abcd\n")
    with raises(ConfigError, "out_of_range", "salt"):
        Deidentifier.from_file(short, create=True)
    words = tmp_path / "words"
    words.write_text("correct horse battery staple")
    with raises(ConfigError, "malformed") as caught:
        Deidentifier.from_file(words)
    assert "horse" not in str(caught.value)
    with raises(ConfigError, "not_a_file"):
        Deidentifier.from_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with raises(ConfigError, "not_a_file"):
        Deidentifier.from_file(tmp_path / "pipe")
    blocked = tmp_path / "blocked"
    blocked.symlink_to(tmp_path / "missing")
    with raises(ConfigError, "unreadable"):
        Deidentifier.from_file(blocked / "salt", create=True)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_salt_that_others_can_read_is_warned_of(tmp_path, caplog, mode):
    path = tmp_path / "salt"
    Deidentifier.from_file(path, create=True)
    assert not caplog.records
    path.chmod(mode)
    Deidentifier.from_file(path)
    assert f"{path} has the mode {mode:04o}" in caplog.text


def test_default_salt_file_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEDVL_SALT_FILE", str(tmp_path / "here"))
    assert default_salt_file() == tmp_path / "here"
    monkeypatch.delenv("MEDVL_SALT_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_salt_file() == tmp_path / ".config" / "medvl" / "salt"


@pytest.mark.parametrize(
    ("age", "years"),
    [
        (0, 0), (17, 17), (89, 89), (89.9, 89), (90, 90), (91, 90), (300, 90), (float("inf"), 90),
        ("65", 65), (" 65.0 ", 65), ("065Y", 65), ("102Y", 90), ("011M", 0), ("030M", 2), ("003W", 0), ("400D", 1),
        ("100y", 90), (None, None), (float("nan"), None), (-1, None), ("", None), ("nan", None), ("-5", None),
        ("sixty", None), ("65Z", None), ("0065Y", None),
        ([5], None), ({"years": 5}, None), (10**400, None), (np.float32(41.5), 41),
    ],
)  # fmt: skip
def test_cap_age(age, years):
    assert cap_age(age) == years


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Comparison is made to 3/14/2015 and 2014-12-01.", {"date": 2}),
        ("Prior of March 14, 2015; CT of 2 Feb 2014; MR of Sept. 2013.", {"date": 3}),
        ("Paged at (617) 555-0199, or 617.555.0188.", {"phone": 2}),
        ("Mail j.doe@example.org", {"email": 1}),
        ("MRN: 12345, accession 98765432", {"number": 2}),
        ("Discussed with Dr. Miller and Dr O'Brien.", {"doctor": 2}),
        ("Discussed with Dr. ___ at 3:45 p.m. on ___, 5 minutes after discovery.", {}),
        (
            "Compared with XXXX by Dr. XXXX XXXX. A 3.2 x 1.5 cm nodule, ribs 5-8, T12/L1, 1/2 "
            "of the lung.",
            {},
        ),
        ("ETT 4.5 cm above the carina; 02 sat 88-92%, BP 120/80, in 2015.", {}),
        ("", {}),
    ],
)
def test_find_identifiers(text, counts):
    assert find_identifiers(text) == counts


@pytest.mark.parametrize(
    ("header", "anywhere", "at_start"),
    [
        ("MRN", True, True),
        ("date of birth", True, True),
        ("Patient's name", True, True),
        ("ordering physician", True, True),
        ("medical record number", True, True),
        ("electronically signed by", True, True),
        ("reported by", True, True),
        ("reported history", False, False),
        ("discussed with the physician", True, False),
        ("findings", False, False),
        ("date", False, False),
    ],
)
def test_identifying_headers(header, anywhere, at_start):
    assert is_identifying_header(header) == anywhere
    assert is_identifying_header(header, at_start=True) == at_start
