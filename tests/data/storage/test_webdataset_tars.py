"""Tars of other projects: training on them as they are, conversion to shards, evaluation, and
hostile ones.
"""

import io
import itertools
import json
import logging
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.mimic_files import textured
from helpers.object_store import Bucket
from PIL import Image

from medvl.cli.main import main
from medvl.data import FileAccess
from medvl.data.corpora import webdataset_tars
from medvl.data.images.codecs import encode_jpeg, encode_png
from medvl.data.loading.sources import no_text
from medvl.data.loading.webdataset_loader import WebdatasetLoader, open_webdataset_loader
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.storage.webdataset_tars import TarFields, expand_tars, read_tar
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, CorpusError, MedvlError, ShardError
from medvl.eval.core.open import open_source
from medvl.schema import Inputs

COUNT, TARS = 20, 4
SETTINGS: dict[str, Any] = {
    "image": EvalTransform(size=32),
    "text": WholeText(),
    "tokenizer": no_text,
    "seed": 3,
}


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))


def write_tar(path: Path, numbers: range) -> None:
    """A tar as PMC-OA's: samples numbered from zero in each, long names, a JSON with the
    article.
    """
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for place, number in enumerate(numbers):
            key = f"{'folder' * 20}/{place:05d}"
            add(tar, f"{key}.jpg", encode_jpeg(textured(number, 40, 50), 95))
            add(tar, f"{key}.txt", f"Caption of image {number}.".encode())
            add(
                tar,
                f"{key}.json",
                json.dumps({"pmcid": f"PMC{number // 3}", "caption": f"field {number}"}).encode(),
            )
            add(tar, f"{key}.cls", b"7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pmc")
    for number in range(TARS):
        write_tar(home / f"pmc-{number:05d}.tar", range(5 * number, 5 * number + 5))
    return home


def opened(pattern: str | Path, **changes: Any) -> WebdatasetLoader:
    return open_webdataset_loader(
        [pattern], **{"samples": COUNT, "batch": 4, "workers": 0, **SETTINGS, **changes}
    )


def test_tars_train_as_they_are(
    folder: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = folder / "pmc-{00000..00003}.tar"
    with caplog.at_level(logging.WARNING):
        loader = opened(pattern)
    assert sum("are not noticed" in record.message for record in caplog.records) == 1
    batches = list(loader)
    keys = Counter(key for batch in batches for key in batch.keys)
    assert len(batches) == COUNT // 4
    assert {batch.image_BCHW.shape[1] for batch in batches} == {3}  # as in evaluations of tars
    assert next(iter(opened(pattern, color=False))).image_BCHW.shape[1] == 1
    assert len(keys) >= COUNT // 2
    assert max(keys.values()) <= 2
    assert {text for batch in batches for text in batch.texts} <= {
        f"Caption of image {n}." for n in range(COUNT)
    }
    assert [batch.keys for batch in loader] != [batch.keys for batch in batches]  # the next epoch
    address = bucket.upload(folder, "pmc")
    bucket.proxy.fail_first(1, "reset", ".tar")
    remote = list(opened(f"{address}/pmc-{{00000..00003}}.tar"))
    assert [batch.keys for batch in remote] == [batch.keys for batch in batches]
    fields = opened(pattern, fields=TarFields(text="json:caption"))
    assert all(text.startswith("field ") for batch in fields for text in batch.texts)


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_read_disjoint_tars(folder: Path, workers: int) -> None:
    ranks = [
        list(opened(folder / "pmc-{00000..00003}.tar", rank=r, world=2, workers=workers))
        for r in range(2)
    ]
    assert [len(batches) for batches in ranks] == [5, 5]
    first, second = ({key for batch in batches for key in batch.keys} for batches in ranks)
    assert not first & second


@pytest.mark.parametrize("position", [3, 7])
def test_resume_yields_the_remaining_batches(folder: Path, position: int) -> None:
    def endless(loader: WebdatasetLoader) -> Iterator[list[str]]:
        while True:
            yield from (batch.keys for batch in loader)

    loader = opened(folder / "pmc-{00000..00003}.tar")
    batches = endless(loader)
    for _ in range(position):
        next(batches)
    again = opened(folder / "pmc-{00000..00003}.tar")
    again.load_state_dict(loader.state_dict())
    assert list(itertools.islice(endless(again), 6)) == list(itertools.islice(batches, 6))


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"batch": 3, "rank": 0, "world": 2}, "conflict", "batch"),
        ({"batch": 21}, "conflict", "batch"),
        ({"workers": 3, "rank": 0, "world": 2}, "conflict", "workers"),
        ({"inputs": Inputs(regions=True)}, "unsupported", "regions"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path, changes: dict[str, Any], code: str, field: str
) -> None:
    with raises(ConfigError, code, field):
        opened(folder / "pmc-{00000..00003}.tar", **changes)


def test_conversion_makes_shards(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, salt = tmp_path / "out", tmp_path / "salt"
    salt.write_text("5a" * 32)  # a random salt can put all articles into one split
    command = [
        "shards",
        "webdataset",
        "--tars",
        str(folder / "pmc-{00000..00003}.tar"),
        "--out",
        str(out),
    ]
    command += ["--salt-file", str(salt), "--workers", "1", "--name", "pmc"]
    main([*command, "--group", "json:pmcid", "--splits", "train=0.5", "test=0.5"])
    manifests = [Manifest.read(out / split) for split in ("train", "test")]
    assert sum(manifest.samples for manifest in manifests) == COUNT
    assert not set(manifests[0].patients) & set(manifests[1].patients)
    assert sum(len(manifest.patients) for manifest in manifests) == 7  # articles
    assert not verify_folder(out / "train", decode=True).problems
    source = ShardSource(out / "train")
    assert source.sample(0).sections["caption"].startswith("Caption of image ")
    assert not (tmp_path / "out-private/images").exists()
    assert "not noticed" not in capsys.readouterr().out


def test_evaluations_read_tars(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    pattern = folder / "pmc-{00000..00003}.tar"
    source = open_source(pattern)
    assert len(source) == COUNT
    changed = source.folder.stat()
    assert isinstance(source.folder, Path)
    assert (source.folder / "manifest.json").is_file()
    assert open_source(pattern).folder.stat() == changed  # converted once
    assert source.pixels(0).shape == (40, 50, 3)


@pytest.mark.parametrize(
    "pattern",
    [
        "pipe:cat a.tar",
        "pipe:curl {0..3}.tar",
        "file:///a.tar",
        "a.tar::pipe:id",
        "ftp://host/a.tar",
    ],
)
def test_commands_are_never_run(pattern: str) -> None:
    with raises(ConfigError, "unsupported", "tars"):
        expand_tars([pattern])


def test_pattern_of_too_many_names_is_refused() -> None:
    with raises(ConfigError, "too_large", "tars"):
        expand_tars(["{0..99999}/{0..99999}.tar"])


def hostile(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "a.tar"
    write_tar(path, range(5))
    whole = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "cut in a member":
        path.write_bytes(whole[:3000])
    elif kind == "cut after a member":
        with tarfile.open(path) as tar:
            path.write_bytes(whole[: tar.getmembers()[4].offset])
    elif kind == "compressed":
        with tarfile.open(path, "w:gz") as tar:
            add(tar, "a.txt", bytes(10**6))
    elif kind == "sparse":
        header = tarfile.TarInfo("a.jpg")
        header.type = tarfile.GNUTYPE_SPARSE
        path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    elif kind == "hidden sparse":
        header = tarfile.TarInfo("a.jpg")
        header.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999999"}
        path.write_bytes(header.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    elif kind == "huge extended header":
        header = tarfile.TarInfo("a.jpg")
        header.pax_headers = {"comment": "x" * 2**21}
        path.write_bytes(header.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    elif kind == "huge member":
        header = tarfile.TarInfo("a.jpg")
        header.size = 2**30
        path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    elif kind == "link":
        header = tarfile.TarInfo("a.jpg")
        header.type, header.linkname = tarfile.CHRTYPE, "/dev/zero"
        path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    elif kind == "garbage":
        path.write_bytes(b"garbage " * 1000)
    elif kind == "twice":
        with tarfile.open(path, "w") as tar:
            add(tar, "a.jpg", b"x")
            add(tar, "a.jpg", b"y")
    return path


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("missing", "not_found"),
        ("cut in a member", "truncated"),
        ("cut after a member", "truncated"),
        ("compressed", "malformed"),
        ("garbage", "malformed"),
        ("sparse", "unsupported"),
        ("hidden sparse", "unsupported"),
        ("link", "unsupported"),
        ("huge extended header", "too_large"),
        ("huge member", "too_large"),
        ("twice", "malformed"),
    ],
)
def test_damaged_and_hostile_tars_are_refused(tmp_path: Path, kind: str, code: str) -> None:
    path = hostile(tmp_path, kind)
    with raises(ShardError, code, names="a.tar"):
        list(read_tar(path, TarFields(text="txt")))


def test_unreadable_samples_are_counted_within_the_budget(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(8):
            add(
                tar,
                f"{number}.jpg",
                b"no image" if number == 3 else encode_jpeg(textured(number, 40, 50), 95),
            )
            add(tar, f"{number}.txt", b"caf\xe9" if number == 5 else b"A text.")
    loader = opened(tmp_path / "a.tar", samples=8, max_skipped=100, buffer=1)
    assert sum(map(len, loader)) < 8
    assert set(loader.skipped) == {"unknown_format", "sample_unreadable"}
    with pytest.raises(MedvlError):
        list(opened(tmp_path / "a.tar", samples=8, max_skipped=0, buffer=1))


def test_images_are_read_as_conversion_reads_them(tmp_path: Path) -> None:
    """Upright by their EXIF data, and without strips that a transform would enlarge to
    gigabytes.
    """
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    Image.fromarray(textured(0, 32, 32)).save(turned, "PNG", exif=exif)
    for name, data in (("turned", turned.getvalue()), ("strip", encode_png(textured(1, 1, 4000)))):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            add(tar, "a.png", data)
            add(tar, "a.txt", b"A text.")
    batch = next(iter(opened(tmp_path / "turned.tar", samples=1, batch=1, buffer=1)))
    np.testing.assert_array_equal(batch.image_BCHW[0, 0].numpy(), np.rot90(textured(0, 32, 32), -1))
    loader = opened(tmp_path / "strip.tar", samples=1, batch=1, buffer=1, max_skipped=100)
    with raises(ShardError, "empty"):
        next(iter(loader))
    assert set(loader.skipped) == {"too_small"}


def test_lists_are_no_texts_and_blank_groups_are_none(
    folder: Path, deid: Deidentifier, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, content in enumerate(
            [{"caption": ["A", "B"]}, {"caption": "A", "id": " "}, {"caption": "B", "id": ""}]
        ):
            add(tar, f"{number}.jpg", encode_jpeg(textured(number, 40, 50), 95))
            add(tar, f"{number}.json", json.dumps({"id": "x"} | content).encode())
    fields = TarFields(text="json:caption")
    plan = webdataset_tars.WebdatasetTars(
        tars=(str(tmp_path / "a.tar"),), members=fields, group="json:id"
    ).plan(deid, FileAccess(copies=tmp_path / "unpacked"))
    assert plan.rows.skipped == {"text_unreadable": 1}
    assert plan.warnings == {"no_group": 2}
    assert len({record.sample.patient for record in plan.records}) == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fields", [TarFields(), TarFields(image="webp", text="cap")])
def test_tars_without_any_sample_are_refused(
    tmp_path: Path, workers: int, fields: TarFields
) -> None:
    path = tmp_path / "other.tar"
    with tarfile.open(path, "w") as tar:
        if fields == TarFields():
            add(tar, "a.webp", b"x")
    loader = open_webdataset_loader(
        [path], samples=4, batch=2, workers=workers, fields=fields, **SETTINGS
    )
    with raises(ShardError, "empty", names=str(path)):
        next(iter(loader))


def test_errors_of_workers_name_the_tar(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.tar"
    path.write_bytes((folder / "pmc-00000.tar").read_bytes()[:3000])
    loader = open_webdataset_loader([path], samples=4, batch=2, workers=1, **SETTINGS)
    with raises(ShardError, "truncated") as caught:
        next(iter(loader))
    assert str(caught.value).startswith(str(path))


def write_clusters(home: Path) -> str:
    """Four tars of ten samples, each of one kind of figure but its last, as BIOMEDICA's clusters."""
    kinds = ("Clinical Imaging", "Plots", "Microscopy", "Plots")
    for number, kind in enumerate(kinds):
        with tarfile.open(home / f"c-{number}.tar", "w") as tar:
            for place in range(10):
                labels = ["Clinical Imaging"] if place == 9 else [kind]
                content = {"label": labels, "license": f"CC BY {number}"}
                add(tar, f"{place}.jpg", encode_jpeg(textured(10 * number + place, 40, 50), 95))
                add(tar, f"{place}.txt", f"{number}:{place}".encode())
                add(tar, f"{place}.json", json.dumps(content).encode())
    return str(home / "c-{0..3}.tar")


CLINICAL = "json:label=Clinical Imaging"


def test_conversion_keeps_samples_that_meet_conditions_and_counts_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern, salt = write_clusters(tmp_path), tmp_path / "salt"
    salt.write_text("5a" * 32)
    command = [
        "shards",
        "webdataset",
        "--tars",
        pattern,
        "--salt-file",
        str(salt),
        "--workers",
        "1",
    ]
    command += ["--splits", "train=1", "--keep-field", "json:license"]
    main([*command, "--out", str(tmp_path / "out"), "--where", CLINICAL])
    printed = capsys.readouterr().out
    source = ShardSource(tmp_path / "out/train")
    samples = [source.sample(place) for place in range(len(source))]
    texts = {sample.sections["caption"] for sample in samples}
    assert texts == {*(f"0:{place}" for place in range(10)), "1:9", "2:9", "3:9"}
    assert {(sample.sections["caption"][0], sample.extra["license"]) for sample in samples} == {
        (str(number), f"CC BY {number}") for number in range(4)
    }
    assert "read 40 samples: kept 13" in printed
    assert "18 label=Plots" in printed
    assert "9 label=Microscopy" in printed
    main([*command, "--out", str(tmp_path / "both"), "--where", CLINICAL, "json:label=Plots"])
    assert len(ShardSource(tmp_path / "both/train")) == 13 + 18  # values of one field: any of them
    main([*command, "--out", str(tmp_path / "some"), "--max-samples", "7"])
    assert len(ShardSource(tmp_path / "some/train")) == 7
    with raises(CorpusError, "empty"):  # no sample meets both
        webdataset_tars.WebdatasetTars(
            tars=(pattern,), members=TarFields(where=(CLINICAL, "json:license=none"))
        ).plan(Deidentifier(bytes(16)), FileAccess(copies=tmp_path / "images"))


@pytest.mark.parametrize("condition", ["label=Plots", "json:label", "json:=Plots", ":label=Plots"])
def test_conditions_of_other_forms_are_refused(condition: str) -> None:
    with raises(ConfigError, "malformed", "where"):
        TarFields(where=(condition,))


def test_training_reads_samples_that_meet_conditions_and_counts_the_others(tmp_path: Path) -> None:
    pattern = write_clusters(tmp_path)
    loader = opened(pattern, fields=TarFields(where=(CLINICAL,)), samples=13, batch=2, buffer=4)
    batches = list(loader)
    texts = [text for batch in batches for text in batch.texts]
    assert len(batches) == 13 // 2
    assert all(len(batch) == 2 for batch in batches)  # those left out take no place in a batch
    assert set(texts) <= {*(f"0:{place}" for place in range(10)), "1:9", "2:9", "3:9"}
    assert 0 < loader.skipped["where_not_met"] <= 2 * 27  # of two passes over the tars at most
    with raises(ShardError, "empty", names="label=Maps"):
        list(opened(pattern, fields=TarFields(where=("json:label=Maps",)), buffer=4))


@pytest.mark.parametrize(("open_tars", "kinds"), [(1, 1), (4, 4)])
def test_neighbours_in_a_batch_come_from_several_tars(
    tmp_path: Path, open_tars: int, kinds: int
) -> None:
    pattern = write_clusters(tmp_path)
    loader = opened(pattern, samples=40, batch=4, buffer=1, open_tars=open_tars)
    batches = list(loader)
    assert len({text.partition(":")[0] for text in batches[0].texts}) == kinds
    texts = Counter(text for batch in batches for text in batch.texts)
    assert len(texts) >= 38  # one sample waits in the buffer of each pass
