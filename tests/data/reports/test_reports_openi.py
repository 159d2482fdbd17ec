"""Open-i XML: a report, a folder, an archive, and hostile XML and archives."""

import gzip
import io
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.figure_files import xml

from medvl.data.corpora.reports import openi
from medvl.data.corpora.reports.openi import OpeniImage, OpeniReport, iter_openi_reports
from medvl.errors import CorpusError


def archive(path: Path, members: list[tuple[str, bytes]], **fields: object) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def read(folder: Path, data: bytes) -> OpeniReport:
    (folder / "1.xml").write_bytes(data)
    [report] = iter_openi_reports(folder)
    return report


def test_a_report_is_read(tmp_path):
    report = read(tmp_path, xml(7))
    assert report.id == "CXR7"
    assert dict(report.sections) == {
        "comparison": "None.",
        "findings": "Heart < 1/2. XXXX effusion on the left.",
        "impression": "Effusion.",
    }
    assert report.empty_sections == ("indication",)
    assert report.mesh_major == ("Pleural Effusion/left", "Opacity")
    assert report.mesh_automatic == ("effusion",)
    assert report.images == (
        OpeniImage("CXR7_IM-0001-3001", "PA view"),
        OpeniImage("CXR7_IM-0001-4001", None),
    )


def test_folder_and_archive_give_equal_reports(tmp_path):
    folder = tmp_path / "ecgen-radiology"
    folder.mkdir()
    for number in (10, 2, 1):
        (folder / f"{number}.xml").write_bytes(xml(number))
    reports = list(iter_openi_reports(folder))
    assert [report.id for report in reports] == ["CXR1", "CXR2", "CXR10"]
    members = [(f"ecgen-radiology/{number}.xml", xml(number)) for number in (1, 2, 10)]
    packed = archive(tmp_path / "reports.tgz", [*members, ("ecgen-radiology/README.txt", b"hello")])
    assert list(iter_openi_reports(packed)) == reports


BOMB = b"""<!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;">]>
<eCitation><uId id="CXR1"/><AbstractText Label="FINDINGS">&d;&d;&d;</AbstractText></eCitation>"""


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (BOMB, ("unsupported",)),
        (BOMB.decode().encode("utf-16"), ("unsupported",)),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', ("unsupported",)),
        (b"<eCitation><uId id='CXR1'/>", ("malformed",)),
        (b"<a>&b;</a>", ("malformed",)),
        (b"", ("malformed",)),
        (b"\x00\xff\xfe", ("malformed",)),
        (b"<?xml version='1.0' encoding='klingon'?><a/>", ("unsupported",)),
        (b"<eCitation/>", ("malformed", "uId")),
        (b"<eCitation><uId id='../CXR1'/></eCitation>", ("malformed", "uId")),
        (xml().replace(b"CXR1_IM-0001-3001", b"../../secret"), ("malformed", "parentImage")),
        (b" " * (openi.MAX_XML_BYTES + 1), ("too_large",)),
    ],
)
def test_invalid_xml_raises(data, expected, tmp_path):
    with raises(CorpusError, *expected) as caught:
        read(tmp_path, data)
    assert "secret" not in str(caught.value)


def test_missing_files_and_empty_folders_raise(tmp_path):
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "1.xml").symlink_to(tmp_path / "nowhere.xml")
    with raises(CorpusError, "unreadable", names="1.xml"):
        list(iter_openi_reports(tmp_path / "dangling"))
    (tmp_path / "empty").mkdir()
    with raises(CorpusError, "empty"):
        list(iter_openi_reports(tmp_path / "empty"))
    with raises(CorpusError, "not_found"):
        list(iter_openi_reports(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("../1.xml", {}),
        ("/etc/1.xml", {}),
        ("1.xml", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("1.xml", {"type": tarfile.LNKTYPE, "linkname": "2.xml"}),
        ("1.xml", {"type": tarfile.CHRTYPE}),
    ],
)
def test_archive_with_links_or_outside_paths_raises(tmp_path, name, fields):
    data = b"" if fields else xml()
    packed = archive(tmp_path / "reports.tgz", [(name, data)], **fields)
    with raises(CorpusError, "malformed"):
        list(iter_openi_reports(packed))


def test_archive_bomb_raises(tmp_path, monkeypatch):
    large = archive(tmp_path / "large.tgz", [("1.xml", bytes(openi.MAX_XML_BYTES + 1))])
    with raises(CorpusError, "too_large"):
        list(iter_openi_reports(large))
    monkeypatch.setattr(openi, "MAX_ARCHIVE_BYTES", 1 << 20)
    many = archive(
        tmp_path / "many.tgz", [(f"{number}.txt", bytes(100_000)) for number in range(20)]
    )
    with raises(CorpusError, "too_large"):
        list(iter_openi_reports(many))
    with tarfile.open(
        tmp_path / "name.tgz", "w:gz", pax_headers={"comment": "x" * (2 << 20)}
    ) as tar:
        tar.addfile(tarfile.TarInfo("1.xml"))
    with raises(CorpusError, "too_large"):
        list(iter_openi_reports(tmp_path / "name.tgz"))


def test_damaged_archive_raises(tmp_path):
    content = archive(
        tmp_path / "complete.tgz", [(f"{number}.xml", os.urandom(5000)) for number in range(9)]
    ).read_bytes()
    damaged = tmp_path / "damaged.tgz"
    for data in (content[: len(content) // 2], b"no archive", gzip.compress(b"no tar" * 1000), b""):
        damaged.write_bytes(data)
        with raises(CorpusError, "malformed", names="damaged.tgz"):
            list(iter_openi_reports(damaged))


@pytest.mark.real
def test_full_collection_has_the_published_counts(real_data):
    """Compare the counts with the data card."""
    reports = list(iter_openi_reports(real_data / "openi" / "NLMCXR_reports.tgz"))
    assert len(reports) == len({report.id for report in reports}) == 3955
    empty = Counter(name for report in reports for name in report.empty_sections)
    assert empty == {"findings": 530, "impression": 34, "comparison": 622, "indication": 90}
    assert sum(not {"findings", "impression"} & report.sections.keys() for report in reports) == 28
    assert sum(report.mesh_major == ("normal",) for report in reports) == 1391
    assert sum(bool(report.mesh_automatic) for report in reports) == 2182
    images = Counter(len(report.images) for report in reports)
    assert images == {0: 104, 1: 446, 2: 3208, 3: 181, 4: 15, 5: 1}
    assert sum("XXXX" in " ".join(report.sections.values()) for report in reports) == 3411
