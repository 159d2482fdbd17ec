"""Headings of many hospitals: parts of the findings, qualified headers, context, people, and
columns of tables.
"""

from collections import Counter

import numpy as np
import pytest

from medvl.data.corpora.common.tables import report_sections
from medvl.data.reports.headings import column_section, section_name
from medvl.data.reports.sections import parse_report
from medvl.data.transforms.text import WholeText, choose_sections

PARTS = (
    "CARDIOVASCULAR", "SKELETON", "PLEURAL CAVITIES", "TUBES AND LINES", "LINES/TUBES",
    "LINES, TUBES AND DEVICES", "LUNGS", "LUNGS AND PLEURA", "HEART", "HEART AND GREAT VESSELS",
    "CARDIOMEDIASTINAL SILHOUETTE", "MEDIASTINUM AND HILA", "BONES", "MUSCULOSKELETAL",
    "UPPER ABDOMEN", "SOFT TISSUES", "CHEST WALL", "AIRWAY", "TRACHEA", "THYROID", "LOWER NECK",
    "BREAST", "SUPPORT DEVICES", "HARDWARE", "FOREIGN BODIES", "OTHER", "OTHER FINDINGS",
    "ADDITIONAL FINDINGS", "INCIDENTAL FINDINGS", "PULMONARY VASCULATURE", "PARENCHYMA",
    "INTERSTITIUM", "COSTOPHRENIC ANGLES", "DIAPHRAGM", "VISUALIZED ABDOMEN", "RIGHT LUNG",
    "LEFT LUNG", "RIGHT UPPER LOBE", "APICES", "LYMPH NODES", "THORACIC AORTA", "SPINE", "RIBS",
    "SHOULDERS", "CHEST", "CHEST FINDINGS", "CARDIAC FINDINGS", "POSTOPERATIVE CHANGES", "STERNUM",
    "CATHETERS", "PACEMAKER", "NODULES", "CONSOLIDATION", "EFFUSION", "PNEUMOTHORAX", "INFLATION",
    "LUNG VOLUMES", "IMAGE QUALITY", "LIMITATIONS", "NOTE", "COMMENT", "COMMENTS", "SIZE",
    "LOCATION", "QUALITY", "RADIOGRAPHIC FINDINGS", "DESCRIPTION", "IN SUMMARY", "THORACIC INLET",
    "Cardiovascular", "Pleural cavities", "Tubes and lines", "Bones and soft tissues",
    "Heart/Mediastinum", "Other findings", "Extrathoracic", "Incidental findings",
    "Left hemithorax", "Lines & tubes", "Views", "Cardio-thoracic ratio",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("section", ["findings", "impression"])
def test_parts_stay_in_their_section(part: str, section: str) -> None:
    own = {"findings": "FINDINGS", "impression": "IMPRESSION"}[section]
    text = (
        f"HISTORY: Pneumonia?\n{own}:\nFirst.\n{part}: Second.\nThird.\nFourth line: "
        f"fifth.\nNOTIFICATION: None."
    )
    if section == "impression" and part in (
        "DESCRIPTION",
        "RADIOGRAPHIC FINDINGS",
        "CHEST FINDINGS",
    ):
        return  # the findings follow
    report, counts = parse_report(text), Counter[str]()
    stored = report_sections(report, counts)
    assert stored == {
        "history": "Pneumonia?",
        section: f"First. {part}: Second. Third. Fourth line: fifth.",
        "notification": "None.",
    }
    assert not +counts


FINDINGS = (
    "Radiological Findings", "Findings (PA and lateral)", "CHEST FINDINGS", "FINDINGS - CHEST",
    "Radiology findings", "X-ray findings", "CXR Findings", "Imaging Findings",
    "Radiographic Findings", "Findings of the chest", "FINDINGS (CHEST X-RAY)", "FINDINGS, PA VIEW",
    "Chest X-ray Findings", "CHEST RADIOGRAPH FINDINGS", "Key findings", "Main Findings",
    "Pertinent findings", "Detailed Findings", "FINDINGS IN DETAIL", "Findings/Observations",
    "OBSERVATIONS", "Report findings", "Findings: ", "FINDINGS ", "Findings are as follows",
    "FINDINGS (2 VIEWS)", "AP portable findings", "Current findings", "Hallazgos", "Befund",
    "Report", "RESULTS", "Findings_Section", "Findings and Discussion", "*Findings*",
    "__FINDINGS__", "[FINDINGS]", "II. FINDINGS", "2) Findings", "- FINDINGS", "F I N D I N G S",
)  # fmt: skip
IMPRESSIONS = (
    "Impression/Plan", "Final Impression", "Radiologist's Impression", "Radiologist’s Impression",
    "Radiological Impression", "Impressions", "IMPRESSION AND PLAN", "Impression (PA and lateral)",
    "Overall Impression", "Impression and Recommendation", "CONCLUSION", "Conclusion(s)", "Opinion",
    "Radiological diagnosis", "Chest impression", "IMPRESSION - CHEST",
    "Attending physician's impression", "Physician Impression", "Reading radiologist's impression",
    "Summary", "Assessment", "Assessment and Plan", "Interpretation", "Findings and impression",
    "FINDINGS/IMPRESSION", "Findings & Impression", "Diagnostic Impression", "Imaging impression",
    "Preliminary impression", "Beurteilung", "Impresión", "III. IMPRESSION", "=== IMPRESSION ===",
    "**Impression**", "> Impression",
)  # fmt: skip


@pytest.mark.parametrize(
    "context",
    ["Clinical History: Pneumonia?", "TECHNIQUE: PA.", "Comparison:\nNone.", "EXAM: CHEST"],
)
@pytest.mark.parametrize(
    ("header", "section"),
    [*((h, "findings") for h in FINDINGS), *((h, "impression") for h in IMPRESSIONS)],
)
def test_qualified_headers_after_context(context: str, header: str, section: str) -> None:
    for text in (f"{context}\n{header}: Clear lungs.", f"{context}\n\n{header}:\nClear lungs."):
        assert parse_report(text).sections.get(section) == "Clear lungs.", text
        assert "Clear" not in " ".join(
            v for k, v in parse_report(text).sections.items() if k != section
        )


CONTEXT = {
    "history": "Clinical History|CLINICAL INFORMATION|Relevant clinical history|Pertinent "
    "History|Brief history|Clinical details|Hx"
    "|Clinical Data|HISTORY OF PRESENT ILLNESS|Past medical history|Patient history|Clinical "
    "notes|Clinical findings|Background",
    "indication": "Indication|Reason for exam|REASON FOR THIS EXAMINATION|Reason for "
    "visit|Clinical indication|Clinical question"
    "|Indication for study|Reason for referral|Chief complaint|Provisional diagnosis|Exam "
    "indication",
    "comparison": "Comparison|COMPARISONS|Compared with|Prior studies|Previous "
    "imaging|Comparison studies|Relevant prior studies"
    "|Comparison to prior|Date of comparison",
    "technique": "Technique|TECHNIQUES|Imaging technique|Exam technique|Protocol|Technical "
    "factors|Procedure|Scan protocol",
    "examination": "Examination|Exam|Study|Type of study|Exam type|Procedure name|Exam description",
    "recommendation": "Recommendation|RECOMMENDATIONS|Recommendation(s)|Follow-up|Recommended "
    "follow-up|Advice",
    "notification": "Notification|Communication|Critical results|Findings discussed "
    "with|RESULTS CALLED TO|Discussed with",
}


@pytest.mark.parametrize(
    ("header", "section"),
    [(header, section) for section, names in CONTEXT.items() for header in names.split("|")],
)
def test_context_ends_the_findings(header: str, section: str) -> None:
    text = f"FINDINGS: Clear.\n{header}: Something else.\nIMPRESSION: Normal."
    assert dict(parse_report(text).sections) == {
        "findings": "Clear.",
        section: "Something else.",
        "impression": "Normal.",
    }


@pytest.mark.parametrize(
    "header",
    [
        "Radiologist", "Attending", "ATTENDING "
                                    "RADIOLOGIST", "Reading "
                                                   "physician", "Referring "
                                                                "physician", "Ordering "
                                                                             "provider", "Signed by",
        "Electronically signed "
        "by", "Dictated "
              "by", "Transcribed by", "Technologist", "Radiographer", "Consultant", "Patient name",
        "PATIENT", "Name", "MRN", "Date of "
                                  "birth", "DOB", "Accession "
                                                  "number", "Reported "
                                                            "by", "Resident", "Report "
                                                                              "status", "Exam date",
        "Dictation "
        "date", "Signature", "Electronic "
                             "signature", "cc", "CC", "Hospital number", "Impression dictated by",
        "Verified "
        "by", "Authorised "
              "by", "Requested by", "Address", "Age/Sex", "Order number", "Interpreted by",
    ],
)  # fmt: skip
def test_people_and_numbers_are_left_out_and_counted(header: str) -> None:
    for text in (
        f"{header}: Roe\nFINDINGS: Clear.\nIMPRESSION: Normal.",
        f"FINDINGS: Clear.\n{header}: Roe\nIMPRESSION: Normal.",
        f"FINDINGS: Clear.\nIMPRESSION: Normal.\n{header}: Roe",
    ):
        if header == "cc":
            continue
        counts = Counter[str]()
        assert report_sections(parse_report(text), counts) == {
            "findings": "Clear.",
            "impression": "Normal.",
        }, text
        assert (+counts).total() == 1


@pytest.mark.parametrize(
    ("text", "impression"),
    [
        ("FINDINGS: Clear. Impression: Normal.\nSigned by: Roe", "Normal."),
        ("FINDINGS: Clear. Final Impression: Normal.", "Normal."),
        ("Findings: Clear.  Impression: Normal.", "Normal."),
        ("Findings: Clear. Radiologist's Impression: Normal.", "Normal."),
        ("FINDINGS: Clear lungs Impression: Normal.", "Normal."),
        ("FINDINGS: Clear lungs Final Impression: Normal.", "Normal."),
        ("FINDINGS: Clear.\tIMPRESSION: Normal.", "Normal."),
        ("FINDINGS: Clear.IMPRESSION: Normal.", "Normal."),
        ("Findings: Clear; Impression: Normal.", "Normal."),
        ("findings: clear. impression: normal.", "normal."),
        ("FINDINGS: Clear.\nCLINICAL IMPRESSION: Normal.", "Normal."),
        ("Clinical Impression: Pneumonia?\nFINDINGS: Clear.", None),
    ],
)
def test_impression_within_a_line(text: str, impression: str | None) -> None:
    report = parse_report(text)
    assert report.impression == impression
    assert report.findings is not None
    assert report.findings.lower() in ("clear.", "clear", "clear;", "clear lungs")


@pytest.mark.parametrize(
    "prose",
    [
        "The findings are "
        "unchanged.", "Discussed with Dr. Roe: he "
                      "agreed.", "Note: the left lung is clear.", "Findings discussed with Dr. X.",
        "History of asthma is "
        "noted.", "Comparison with the prior study shows no "
                  "change.", "Impression of a nodule: none.",
        "Lungs are clear and the heart is "
        "normal.", "Compared with 2014, no change.", "New: none.", "T8: old fracture.",
        "Report dictated in a hurry.", "Study of the chest.", "Technically limited: rotated.",
    ],
)  # fmt: skip
def test_prose_is_no_header(prose: str) -> None:
    assert dict(parse_report(f"FINDINGS: Clear.\n{prose}\nEnd.").sections) == {
        "findings": f"Clear. {prose} End."
    }


@pytest.mark.parametrize(
    ("column", "section"),
    [
        ("section_clinical_history", "history"), ("Clinical "
                                                  "History", "history"), ("section_findings", "findings"),
        ("findings_section", "findings"), ("FINDINGS_TEXT", "findings"), ("findingsText", "findings"), ("Findings", "findings"),
        ("report_findings", "findings"), ("text_impression", "impression"), ("Impression", "impression"), ("impressionSection", "impression"),
        ("section_impression_en", "impression"), ("REASON_FOR_EXAM", "indication"), ("clinical_indication", "indication"),
        ("section_comparison", "comparison"), ("comparison_text", "comparison"), ("Technique", "technique"), ("exam_type", "examination"),
        ("Radiological "
         "Findings", "findings"), ("findings-and-impression", "impression"), ("sectionFindings", "findings"),
        ("report", "report"), ("caption", "caption"), ("text", "text"), ("description", "description"), ("lungs", "lungs"),
    ],
)  # fmt: skip
def test_sections_of_columns(column: str, section: str) -> None:
    assert column_section(column) == section
    if section not in ("report", "description"):
        assert section_name(column) == section


def test_context_columns_are_no_training_text() -> None:
    texts = {
        "section_clinical_history": "Pneumonia?",
        "section_findings": "Clear",
        "section_impression": "Normal",
    }
    rng = np.random.default_rng(0)
    assert choose_sections(texts, ("impression",)) == ["Normal"]
    assert WholeText()(texts, rng) == "Clear. Normal"
    assert WholeText()({"Clinical History": "Pneumonia?", "note": "Clear"}, rng) == "Clear"
    assert WholeText()({"section_clinical_history": "Pneumonia?"}, rng) == ""
