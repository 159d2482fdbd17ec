"""Images inside of larger files: their places, and their bytes."""

import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow
import pytest
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.images.codecs import encode_png
from medvl.data.loading.sources import FileSource
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.storage import store, tars
from medvl.data.storage.tars import read_part, read_parts
from medvl.errors import ImageError
from medvl.schema import FilePart, PackedPage, Sample


def packed(path: Path, contents: list[bytes], codec: str) -> list[FilePart]:
    """Write a page with some contents between other bytes; return their places."""
    page = b"head" + b"--".join(contents)
    data = pyarrow.compress(page, codec=codec, asbytes=True)
    path.write_bytes(b"before" + data + b"after")
    start = 4
    found = []
    for number, content in enumerate(contents):
        place = PackedPage(codec, len(page), start, len(content))
        found.append(FilePart(str(path), f"row {number}", 6, len(data), place))
        start += len(content) + 2
    return found


def in_tar(path: Path, contents: list[bytes]) -> list[FilePart]:
    with tarfile.open(path, "w") as tar:
        for number, content in enumerate(contents):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with tarfile.open(path) as tar:
        return [
            FilePart(str(path), f"member {info.name}", info.offset_data, info.size) for info in tar
        ]


@pytest.mark.parametrize("codec", ["snappy", "gzip", "brotli", "zstd", "lz4_raw"])
def test_parts_of_a_page_are_unpacked_once(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [bytes([number]) * 100 * number for number in range(5)]
    found = packed(tmp_path / "a.page", contents, codec)
    calls: list[str] = []

    def counted(*arguments: object) -> memoryview:
        calls.append("")
        return unpack(*arguments)

    unpack: Callable[..., memoryview] = tars.unpack
    monkeypatch.setattr(tars, "unpack", counted)
    assert read_parts(reversed(found)) == dict(zip(found, contents, strict=True))
    assert len(calls) == 1
    assert [read_part(pickle.loads(pickle.dumps(part))) for part in found] == contents


def test_parts_that_cannot_be_read_are_errors_with_their_place(tmp_path: Path) -> None:
    first, second = in_tar(tmp_path / "a.tar", [b"a" * 700, b"b" * 700])
    absent = replace(first, file=str(tmp_path / "absent.tar"))
    page = packed(tmp_path / "a.page", [b"content"], "snappy")[0]
    assert page.page is not None
    other_size = replace(page, page=page.page._replace(unpacked=2 * page.page.unpacked))
    tar = tmp_path / "a.tar"
    tar.write_bytes(tar.read_bytes()[: second.offset + 10])
    found = read_parts([first, second, absent, other_size])
    assert found[first] == b"a" * 700
    assert isinstance(found[absent], FileNotFoundError)
    for part, code in ((second, "truncated"), (other_size, "malformed")):
        with raises(ImageError, code, names=f"{part.file}, {part.name}"):
            read_part(part)
    with pytest.raises(FileNotFoundError):
        read_part(absent)
    with raises(ImageError, "not_a_file"):
        read_part(replace(first, file=str(tmp_path)))


def test_remote_parts_are_requested_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = in_tar(tmp_path / "a.tar", [bytes([number]) * 300 for number in range(4)])
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(store, "_filesystem", lambda url: (files, f"/{url.partition('://')[2]}"))
    files.put(str(tmp_path / "a.tar"), "/lab/a.tar")
    requests: list[tuple[int, int]] = []
    read = store.read

    def counted(url: str, offset: int, size: int) -> bytes:
        requests.append((offset, size))
        return read(url, offset, size)

    monkeypatch.setattr(store, "read", counted)
    remote = [replace(part, file="s3://lab/a.tar") for part in local]
    assert list(read_parts(remote).values()) == list(read_parts(local).values())
    assert sorted(requests) == [(part.offset, part.size) for part in local]
    absent = replace(remote[0], file="s3://lab/b.tar")
    assert isinstance(read_parts([absent])[absent], FileNotFoundError)


def plan_of(images: list[Path] | list[FilePart], deid: Deidentifier) -> Plan:
    samples = [
        Sample(
            key=deid.image(str(number)),
            corpus="ours",
            split="train",
            patient=deid.patient(str(number)),
            study=deid.study(str(number), "1"),
            image=image,
            sections={"caption": f"Caption {number}."},
        )
        for number, image in enumerate(images)
    ]
    return Plan("ours", Records(map(Record, samples)), (), RowCounts())


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_have_the_bytes_of_those_from_files(
    workers: int, tmp_path: Path, deid: Deidentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [encode_png(textured(number, 40, 50 + number)) for number in range(12)]
    contents[3] = contents[3][:100]
    contents[5] = b"no image"
    files = [tmp_path / str(number) for number in range(12)]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    monkeypatch.setattr("medvl.data.convert.record._GROUP_BYTES", 10_000)
    sources: dict[str, list[Path] | list[FilePart]] = {
        "files": files,
        "tar": in_tar(tmp_path / "a.tar", contents),
        "page": packed(tmp_path / "a.page", contents, "snappy"),
    }
    found = {}
    for name, images in sources.items():
        plan = plan_of(images, deid)
        assert [record.sample.image for record in plan.records] == images
        run = ShardRun(out=tmp_path / name, workers=workers, max_skipped=2)
        manifests = write_shards(plan, deid, run, ShardOptions(samples_per_shard=5))
        assert manifests["train"].samples == 10
        found[name] = {
            path.name: path.read_bytes() for path in sorted((tmp_path / name / "train").iterdir())
        }
        listed = (tmp_path / f"{name}-private" / "sources.tsv").read_text()
        assert f"{deid.image('7')}\t{images[7]}\n" in listed
    assert found["files"] == found["tar"] == found["page"]


def test_shards_of_a_replaced_file_are_read_again(tmp_path: Path, deid: Deidentifier) -> None:
    contents = [encode_png(textured(number, 40, 50)) for number in range(4)]
    tar = tmp_path / "a.tar"
    images = in_tar(tar, contents)
    whole = tar.read_bytes()
    tar.write_bytes(whole[: images[2].offset + 20])
    run = ShardRun(out=tmp_path / "out", workers=1, max_skipped=2)
    assert write_shards(plan_of(images, deid), deid, run)["train"].skipped == {"truncated": 2}
    tar.write_bytes(whole)
    strict = replace(run, max_skipped=0)
    write_shards(plan_of(images, deid), deid, strict)
    assert Manifest.read(tmp_path / "out/train").samples == 4


def test_parts_are_read_for_evaluation(tmp_path: Path, deid: Deidentifier) -> None:
    pixels = textured(0, 40, 50)
    plan = plan_of(in_tar(tmp_path / "a.tar", [encode_png(pixels)]), deid)
    assert (FileSource(plan.iter_samples(), ()).pixels(0) == pixels).all()
