"""Report sections: layouts of MIMIC-CXR and other hospitals, old encodings, and unreadable
files.
"""

import time
from collections import Counter

import numpy as np
import pytest
from helpers.errors import raises
from hypothesis import given, settings, strategies as st

from medvl.data.corpora.common.tables import report_sections
from medvl.data.reports.sections import MAX_REPORT_BYTES, parse_report, read_report
from medvl.errors import ReportError

RULE = "_" * 78

MIMIC = f"""\
                                 FINAL ADDENDUM
  ADDENDUM  The findings were discussed with Dr. ___ at 3:00.

 {RULE}
 WET READ: ___ ___ 7:04 AM
  No acute process.

 {RULE}
                                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 INDICATION:  ___F with cough
  // evaluate for pneumonia

 TECHNIQUE:  Chest PA and lateral

 COMPARISON:  ___

 FINDINGS:

 The heart is normal. There is a 3.2
 cm mass in the left lung. Discussed with Dr. X:
 he agreed at 3:00 PM.

 No effusion.

 RECOMMENDATION(S):

 NOTIFICATION:   The findings were telephoned to ___ at
 10:15 on ___, 5 minutes after discovery.

 IMPRESSION:

 1. Left lung mass
 2. No acute process.
"""


def test_complete_mimic_report():
    report = parse_report(MIMIC)
    assert dict(report.sections) == {
        "wet_read": "___ ___ 7:04 AM No acute process.",
        "examination": "CHEST (PA AND LAT)",
        "indication": "___F with cough // evaluate for pneumonia",
        "technique": "Chest PA and lateral",
        "comparison": "___",
        "findings": "The heart is normal. There is a 3.2 cm mass in the left lung. "
        "Discussed with Dr. X: he agreed at 3:00 PM. No effusion.",
        "notification": "The findings were telephoned to ___ at 10:15 on ___, 5 minutes after "
        "discovery.",
        "impression": "1. Left lung mass. 2. No acute process.",
    }
    assert list(report.sections)[:2] == ["wet_read", "examination"]
    assert report.addenda == ("The findings were discussed with Dr. ___ at 3:00.",)
    assert report.empty_sections == ("recommendation",)
    assert report.preamble is None
    assert report.findings == report.sections["findings"]
    assert report.impression == report.sections["impression"]
    assert report.sentences() == [
        "The heart is normal.",
        "There is a 3.2 cm mass in the left lung.",
        "Discussed with Dr. X: he agreed at 3:00 PM.",
        "No effusion.",
        "Left lung mass.",
        "No acute process.",
    ]
    assert report.sentences(("impression",)) == ["Left lung mass.", "No acute process."]


@pytest.mark.parametrize(
    ("header", "section"),
    [
        ("IMPRESSION", "impression"), ("CONCLUSION", "impression"), ("CONCLUSIONS", "impression"),
        ("FINDINGS AND "
         "IMPRESSION", "impression"), ("FINDINGS/IMPRESSION", "impression"), ("SUMMARY", "impression"),
        ("FINDINGS", "findings"), ("FINDING", "findings"), ("CHEST, TWO VIEWS", "findings"),
        ("PA AND LATERAL VIEWS OF THE "
         "CHEST", "findings"), ("PORTABLE AP CHEST RADIOGRAPH", "findings"),
        ("PFI", "history"), ("CLINICAL HISTORY", "history"), ("REASON FOR EXAM", "indication"),
        ("REASON FOR "
         "EXAMINATION", "indication"), ("COMPARISONS", "comparison"), ("EXAM", "examination"),
        ("STUDY", "examination"), ("RECOMMENDATIONS", "recommendation"), ("WET READ", "wet_read"),
        ("IMPRESSON", "impression"), ("IMPRESSION AND "
                                      "PLAN", "impression"), ("COMPARISION", "comparison"),
        ("COMPARISON CHEST "
         "RADIOGRAPH", "comparison"), ("FINDGINGS", "findings"), ("NDICATION", "indication"),
        ("PORTABLE, "
         "UPRIGHT", "findings"), ("PERTINENT HISTORY", "history"), ("WETREAD", "wet_read"),
        ("CHEST READ "
         "BY", "chest read "
               "by"), ("OPERATORS NOTE", "operators note"), ("DOSE (IN MGY)", "dose (in mgy)"),
    ],
)  # fmt: skip
def test_header_names(header, section):
    assert dict(parse_report(f" {header}:  Some text here.").sections) == {
        section: "Some text here."
    }


@pytest.mark.parametrize(
    ("header", "spellings"),
    [
        (
            "impression",
            "impresson imprression imoression impressoin imprssion impresion imperssion "
            "mpression impession",
        ),
        ("findings", "findins findindgs findgings findngs findnings finidngs"),
        ("comparison", "comparision comparsion comparrison comparisions"),
        ("indication", "idication"),
    ],
)
def test_misspelt_headers_as_in_the_section_parser_of_mimic_cxr(header, spellings):
    for spelling in spellings.split():
        for written in (spelling.upper(), spelling.title()):
            assert dict(parse_report(f"{written}: Clear.").sections) == {header: "Clear."}


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("Findings: Clear.\nImpression: Normal.", {"findings": "Clear.", "impression": "Normal."}),
        ("findings: clear.\nimpression: normal.", {"findings": "clear.", "impression": "normal."}),
        ("FINDINGS\nClear.\nIMPRESSION\nNormal.", {"findings": "Clear.", "impression": "Normal."}),
        ("Findings\n\nClear.\n\nImpression\n\nNormal.", {"findings": "Clear.", "impression": "Normal."}),
        ("FINDINGS:Clear.\r\nIMPRESSION:Normal.\r\n", {"findings": "Clear.", "impression": "Normal."}),
        ("\ufeffFINDINGS: Clear.", {"findings": "Clear."}),
        (
            "INDICATION: Cough. COMPARISON: None. FINDINGS: Clear. IMPRESSION: Normal.",
            {"indication": "Cough.", "comparison": "None.", "findings": "Clear.", "impression": "Normal."},
        ),
        ("CLINICAL HISTORY: Cough. FINDINGS: Clear.", {"history": "Cough.", "findings": "Clear."}),
        (
            "FINDINGS:\nLUNGS: Clear.\nHEART: Normal\nBONES AND SOFT TISSUES: "
            "Normal.\nIMPRESSION: Normal.",
            {"findings": "LUNGS: Clear. HEART: Normal. BONES AND SOFT TISSUES: "
                         "Normal.", "impression": "Normal."},
        ),
        ("Findings:\nLungs: clear\nHeart: normal", {"findings": "Lungs: clear. Heart: normal"}),
        ("FINDINGS: First.\nFINDINGS: Second.", {"findings": "Second."}),
        ("FINDINGS: First.\nIMPRESSION: "
         "Normal.\nFINDINGS:\n", {"findings": "First.", "impression": "Normal."}),
        ("FINDINGS: No change\n- Tube\n- Line", {"findings": "No change. - Tube. - Line"}),
        ("Findings: Clear.\nSigned by: Jane Doe", {"findings": "Clear.", "signed by": "Jane Doe"}),
        (
            "Impression: Clear.\nElectronically signed by Jane Doe, MD",
            {"impression": "Clear.", "electronically signed by": "Jane Doe, MD"},
        ),
        ("IMPRESSION: Clear.\n  DICTATED BY: DOE\n "
         "JANE", {"impression": "Clear.", "dictated by": "DOE JANE"}),
        ("Impression: Clear.\n/s/ Jane Doe, "
         "MD", {"impression": "Clear.", "signed by": "Jane Doe, MD"}),
        ("Impression: Clear.\nReported by: Jane "
         "Doe", {"impression": "Clear.", "reported by": "Jane Doe"}),
        ("Indication: Cough\nReported by the "
         "patient.", {"indication": "Cough. Reported by the patient."}),
        ("MRN# 12345\nFindings: Clear.", {"mrn": "12345", "findings": "Clear."}),
        ("Findings: Clear.\nAccession no. "
         "9876543", {"findings": "Clear.", "accession no": "9876543"}),
        ("Date of birth: 1950\nFindings: Clear.", {"date of birth": "1950", "findings": "Clear."}),
        ("FINDINGS:1. Clear.\nIMPRESSION:2 mm "
         "nodule.", {"findings": "1. Clear.", "impression": "2 mm nodule."}),
        ("CLINICAL HISTORY: Cough. FINDINGS:1. "
         "Clear.", {"history": "Cough.", "findings": "1. Clear."}),
        ("FINDINGS: Clear.\nRatio:2\nSeen at:10:30", {"findings": "Clear. Ratio:2. Seen at:10:30"}),
        *(
            (f"FINDINGS: Clear.\n{line}\nIMPRESSION: "
             f"Normal.", {"findings": "Clear.", name: "12", "impression": "Normal."})
            for line, name in [
                ("MRN:12", "mrn"), ("MRN #: "
                                    "12", "mrn"), ("Accession#:12", "accession"), ("Account "
                                                                                   "No.: "
                                                                                   "12", "account no"),
                ("D.O.B.:12", "d.o.b"), ("Date of "
                                         "birth:12", "date of "
                                                     "birth"), ("PATIENT ID#: 12", "patient id"),
                ("Patient ID: 12", "patient id"), ("Pt name: 12", "pt name"),
            ]
        ),
        ("Findings: Clear, films\nread by the "
         "team.", {"findings": "Clear, films read by the team."}),
        ("Findings: Clear.\nMass next to the physician: "
         "no", {"findings": "Clear. Mass next to the physician: no"}),
        ("The findings: none.\nSeen by Dr. X: yes.\n3:00 at noon\nAt: home", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_section_layouts(text, sections):
    assert dict(parse_report(text).sections) == sections


def test_sections_named_by_a_number_of_the_patient_are_not_stored() -> None:
    report, warnings = (
        parse_report("FINDINGS: Clear.\nMRN:12345678\nD.O.B.: 01/02/1950"),
        Counter[str](),
    )
    assert report_sections(report, warnings) == {"findings": "Clear."}
    assert warnings["sections_naming_a_person"] == 2


def test_repeated_section_keeps_the_position_of_the_last():
    report = parse_report("FINDINGS: One.\nIMPRESSION: Two.\nFINDINGS: Three.")
    assert list(report.sections) == ["impression", "findings"]
    assert report.repeated_sections == ("findings",)


def test_empty_sections_are_dropped_and_listed_once():
    report = parse_report("FINDINGS: ___\nIMPRESSION:\n\nTECHNIQUE: .\nTECHNIQUE:\nCOMPARISON: ___")
    assert dict(report.sections) == {"comparison": "___"}
    assert report.empty_sections == ("findings", "impression", "technique")
    assert report.findings is None
    assert report.impression is None
    assert report.sentences() == []


@pytest.mark.parametrize(
    ("text", "last_paragraph"),
    [
        ("PORTABLE CHEST\n COMPARISON: ___.\n\n The lungs are\n clear.", "The lungs are clear."),
        ("One.\n\nTwo.\n\n\n", "Two."),
        ("Two views of the chest. Clear.", "Two views of the chest. Clear."),
        (
            "TECHNIQUE: AP.\n\n The lungs are\n clear.\n\n NOTIFICATION: Dr. ___\n\n at ___.\n",
            "The lungs are clear.",
        ),
        ("INDICATION: Cough.\n\nCOMPARISON: None.\n", None),
        ("COMPARISON:\n\nNone.\n", None),
        ("COMPARISON: None.\n\nClear.\n\nSIGNED BY: Jane Doe\n\nJane Doe, MD", "Clear."),
        ("One.\n\n___\n", "One."),
        ("___\n", None),
        ("", None),
    ],
)
def test_last_paragraph_replaces_missing_sections(text, last_paragraph):
    report = parse_report(text)
    assert report.last_paragraph == last_paragraph
    assert " ".join(report.sentences()) == (last_paragraph or "")


def test_text_before_the_headers_of_every_block_is_preamble():
    report = parse_report(
        f"Read at 3 AM.\nWET READ: Clear.\n{RULE}\nFINAL REPORT\nPortable film.\nFINDINGS: Clear."
    )
    assert report.preamble == "Read at 3 AM. Portable film."
    assert report.has_headers
    assert not parse_report("Portable film.").has_headers


def test_preamble_and_addendum():
    report = parse_report("AP portable chest of ___.\n\nFINDINGS: Clear.\nADDENDUM: Tube seen.\n")
    assert report.preamble == "AP portable chest of ___."
    assert report.addenda == ("Tube seen.",)
    assert "addendum" not in report.sections
    below_a_rule = parse_report(f"FINDINGS: Clear.\n{RULE}\n ADDENDUM\n Tube seen.\n")
    assert below_a_rule.addenda == ("Tube seen.",)
    assert below_a_rule.findings == "Clear."


@pytest.mark.parametrize(
    ("data", "encoding", "findings"),
    [
        ("FINDINGS: ½ of the lung – clear.".encode(), "utf-8", "½ of the lung – clear."),
        (b"\xef\xbb\xbfFINDINGS: Clear.", "utf-8", "Clear."),
        (b"FINDINGS: \xbd of the lung \x96 clear.", "cp1252", "½ of the lung – clear."),
        (b"FINDINGS: \xbd clear\x81.", "latin-1", "½ clear\x81."),
    ],
)
def test_old_encodings_are_detected(tmp_path, data, encoding, findings):
    path = tmp_path / "s1.txt"
    path.write_bytes(data)
    report = read_report(path)
    assert report.encoding == encoding
    assert report.findings == findings


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"FINDINGS: \0 SECRET", ("malformed",)),
        ("FINDINGS: SECRET".encode("utf-16"), ("malformed",)),
        (b"SECRET" + bytes(range(1, 32)) * 4, ("malformed",)),
        (b"SECRET " * (MAX_REPORT_BYTES // 7 + 1), ("too_large",)),
    ],
)
def test_unreadable_report_raises_without_quoting_it(tmp_path, data, expected):
    path = tmp_path / "s1.txt"
    path.write_bytes(data)
    with raises(ReportError, *expected, names="s1.txt") as caught:
        read_report(path)
    assert "SECRET" not in str(caught.value)


def test_missing_report_raises_os_error(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        read_report(tmp_path / "s2.txt")
    assert caught.value.filename == str(tmp_path / "s2.txt")


@pytest.mark.fault("S15")
def test_mutated_reports_raise_only_report_errors(tmp_path):
    path = tmp_path / "s1.txt"
    random = np.random.default_rng(0)
    read = 0
    for _ in range(500):
        data = bytearray(MIMIC.encode())
        for _ in range(random.integers(1, 8)):
            start = int(random.integers(len(data)))
            data[start : start + int(random.integers(0, 40))] = random.bytes(
                int(random.integers(0, 12))
            )
        path.write_bytes(data)
        try:
            report = read_report(path)
        except ReportError:
            continue
        read += 1
        assert all(report.sections.values())
        assert all(report.sentences())
    assert read > 250


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([*MIMIC.splitlines(), "", "Findings:", "CHEST:", "1. One", "___"]),
        max_size=30,
    )
)
def test_section_texts_are_never_empty_or_wrapped(lines):
    report = parse_report("\n".join(lines))
    texts = [*report.sections.values(), *report.addenda]
    texts += [text for text in (report.preamble, report.last_paragraph) if text is not None]
    assert all(text and text == " ".join(text.split()) for text in texts)
    assert not set(report.empty_sections) & set(report.sections)


def test_a_report_of_one_line_is_divided_at_its_headers():
    line = (
        "EXAM: CHEST PA AND LATERAL INDICATION: cough FINDINGS: Clear lungs IMPRESSION: No "
        "acute disease"
    )
    assert parse_report(line).sections == {
        "examination": "CHEST PA AND LATERAL",
        "indication": "cough",
        "findings": "Clear lungs",
        "impression": "No acute disease",
    }
    kept = parse_report(
        "FINDINGS: Clear lungs as in the IMPRESSION: of before.\nIMPRESSION: Normal."
    )
    assert kept.findings == "Clear lungs as in the IMPRESSION: of before."


@pytest.mark.parametrize(
    ("line", "sections"),
    [
        ("FINDINGS AND IMPRESSION: Clear lungs.", {"impression": "Clear lungs."}),
        (
            "CLINICAL HISTORY: cough. FINDINGS: Clear lungs. IMPRESSION AND RECOMMENDATIONS: "
            "Normal.",
            {"history": "cough.", "findings": "Clear lungs.", "impression": "Normal."},
        ),
        (
            "EXAM: CHEST INDICATION AND HISTORY: cough FINDINGS/IMPRESSION: Normal",
            {"examination": "CHEST", "history": "cough", "impression": "Normal"},
        ),
        (
            "HISTORY: cough. FINDINGS & IMPRESSION: Normal",
            {"history": "cough.", "impression": "Normal"},
        ),
    ],
)
def test_headers_of_several_words_are_not_divided(line, sections):
    report = parse_report(line)
    assert report.sections == sections
    assert report.preamble is None


def test_hostile_texts_parse_in_linear_time():
    """They take a second or two; in quadratic time, minutes."""
    started = time.process_time()
    for text in (
        " " * 200_000,
        "_" * 200_000,
        "A" * 200_000,
        "A:" * 50_000,
        "ABC AND " * 20_000,
        "\n" * 50_000,
        ". " * 50_000,
    ):
        parse_report(text)
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "text",
    [
        "## Findings\nLungs are clear.\n\n## Impression\nNormal.",
        "### FINDINGS: Lungs are clear.\n### IMPRESSION: Normal.",
        "**FINDINGS:** Lungs are clear.\n**IMPRESSION:** Normal.",
        "**Findings**: Lungs are clear.\n\n**Impression**\nNormal.",
        "# Report of the chest\n## **Findings:**\nLungs are clear.\n## **Impression:**\nNormal.",
    ],
)
def test_headers_in_markdown(text: str) -> None:
    report = parse_report(text)
    assert dict(report.sections) == {"findings": "Lungs are clear.", "impression": "Normal."}


def test_markdown_hides_no_identifying_header() -> None:
    report = parse_report(
        "**Patient name:** Jane Doe\n## FINDINGS\n* The **left** lung is clear.\n# 3 tube in place."
    )
    assert report.sections["patient name"] == "Jane Doe"
    assert report.sections["findings"] == "* The **left** lung is clear. # 3 tube in place."
