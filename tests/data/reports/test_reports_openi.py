"""Open-i XML: one report, a folder, an archive, and XML or archives that were made to do harm."""

import gzip
import io
import os
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from helpers.figure_files import xml

from medvl.data.reports import openi_xml
from medvl.data.reports.openi_xml import OpeniImage, iter_openi_reports, read_openi_xml
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


def test_one_report():
    report = read_openi_xml(xml(7))
    assert report.id == "CXR7"
    assert dict(report.sections) == {
        "comparison": "None.",
        "findings": "Heart < 1/2. XXXX effusion on the left.",
        "impression": "Effusion.",
    }
    assert report.empty_sections == ("indication",)
    assert report.mesh_major == ("Pleural Effusion/left", "Opacity")
    assert report.mesh_automatic == ("effusion",)
    assert report.images == (OpeniImage("CXR7_IM-0001-3001", "PA view"), OpeniImage("CXR7_IM-0001-4001", None))


def test_folder_and_archive_give_the_same_reports(tmp_path):
    folder = tmp_path / "ecgen-radiology"
    folder.mkdir()
    for number in (10, 2, 1):
        (folder / f"{number}.xml").write_bytes(xml(number))
    assert read_openi_xml(folder / "10.xml").id == "CXR10"
    reports = list(iter_openi_reports(folder))
    assert [report.id for report in reports] == ["CXR1", "CXR2", "CXR10"]
    members = [(f"ecgen-radiology/{number}.xml", xml(number)) for number in (1, 2, 10)]
    packed = archive(tmp_path / "reports.tgz", [*members, ("ecgen-radiology/README.txt", b"hello")])
    assert list(iter_openi_reports(packed)) == reports


BOMB = b"""<!DOCTYPE lolz [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;">]>
<eCitation><uId id="CXR1"/><AbstractText Label="FINDINGS">&d;&d;&d;</AbstractText></eCitation>"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BOMB, "is no Open-i report: it has a document type"),
        (BOMB.decode().encode("utf-16"), "is no Open-i report: it has a document type"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "is no Open-i report: it has a document type"),
        (b"<eCitation><uId id='CXR1'/>", "is no well-formed XML (line 1)"),
        (b"<a>&b;</a>", "is no well-formed XML (line 1)"),
        (b"", "is no well-formed XML"),
        (b"\x00\xff\xfe", "is no well-formed XML"),
        (b"<?xml version='1.0' encoding='klingon'?><a/>", "its encoding is unknown"),
        (b"<eCitation/>", "lacks an id of the form CXR1"),
        (b"<eCitation><uId id='../CXR1'/></eCitation>", "lacks an id of the form CXR1"),
        (xml().replace(b"CXR1_IM-0001-3001", b"../../secret"), "the id of an image is no file name"),
        (b" " * (openi_xml.MAX_XML_BYTES + 1), "has more than 1048576 bytes"),
    ],
)
def test_xml_that_is_refused(data, message):
    with pytest.raises(CorpusError, match=re.escape(message)) as caught:
        read_openi_xml(data)
    assert "secret" not in str(caught.value)


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(CorpusError, match=r"1.xml cannot be read \(No such file"):
        read_openi_xml(tmp_path / "1.xml")
    with pytest.raises(CorpusError, match="holds no XML reports"):
        list(iter_openi_reports(tmp_path))
    with pytest.raises(CorpusError, match="missing does not exist"):
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
def test_archives_with_paths_and_links_that_lead_out(tmp_path, name, fields):
    data = b"" if fields else xml()
    packed = archive(tmp_path / "reports.tgz", [(name, data)], **fields)
    with pytest.raises(CorpusError, match="holds a link or a path that leads out of it"):
        list(iter_openi_reports(packed))


def test_archives_that_unpack_to_too_much(tmp_path, monkeypatch):
    large = archive(tmp_path / "large.tgz", [("1.xml", bytes(openi_xml.MAX_XML_BYTES + 1))])
    with pytest.raises(CorpusError, match="holds a file of 1048577 bytes"):
        list(iter_openi_reports(large))
    monkeypatch.setattr(openi_xml, "MAX_ARCHIVE_BYTES", 1 << 20)
    many = archive(tmp_path / "many.tgz", [(f"{number}.txt", bytes(100_000)) for number in range(20)])
    with pytest.raises(CorpusError, match="unpacks to far more"):
        list(iter_openi_reports(many))
    with tarfile.open(tmp_path / "name.tgz", "w:gz", pax_headers={"comment": "x" * (2 << 20)}) as tar:
        tar.addfile(tarfile.TarInfo("1.xml"))
    with pytest.raises(CorpusError, match="unpacks to far more"):
        list(iter_openi_reports(tmp_path / "name.tgz"))


def test_archives_that_are_damaged(tmp_path):
    whole = archive(tmp_path / "whole.tgz", [(f"{number}.xml", os.urandom(5000)) for number in range(9)]).read_bytes()
    damaged = tmp_path / "damaged.tgz"
    for data in (whole[: len(whole) // 2], b"no archive", gzip.compress(b"no tar" * 1000), b""):
        damaged.write_bytes(data)
        with pytest.raises(CorpusError, match=r"damaged.tgz"):
            list(iter_openi_reports(damaged))


@pytest.mark.real
def test_the_collection(real_data):
    """The counts that its data card gives."""
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
