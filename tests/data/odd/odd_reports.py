"""Reports in the layouts of many hospitals, list forms, and cells as exports write them, each
with its right value.
"""

from typing import NamedTuple

FINDINGS = ("No pneumothorax", "Small left pleural effusion", "Heart is enlarged")
IMPRESSION = "Cardiomegaly with effusion"


class Layout(NamedTuple):
    """A report and the sentences of its sections, without final punctuation."""

    text: str
    findings: tuple[str, ...] = FINDINGS
    impression: tuple[str, ...] = (IMPRESSION,)
    context: tuple[str, ...] = ()
    """Names of the other sections that are stored."""
    counts: tuple[str, ...] = ()
    """What is counted in the manifest."""


_BODY = "No pneumothorax. Small left pleural effusion. Heart is enlarged."

LAYOUTS = {
    "american template": Layout(
        "EXAMINATION: XR CHEST 2 VIEWS\n\nCLINICAL HISTORY: Fever. Pneumonia?\n\nCOMPARISON: "
        "2014.\n\nFINDINGS:\n"
        "TUBES AND LINES: None.\nCARDIOVASCULAR: Heart is enlarged.\nPLEURAL CAVITIES: Small "
        "left pleural effusion.\n"
        "SKELETON: No fracture.\n\nIMPRESSION:\nCardiomegaly with effusion.",
        ("TUBES AND LINES: None", "CARDIOVASCULAR: Heart is enlarged",
        "PLEURAL CAVITIES: Small left pleural effusion",
         "SKELETON: No fracture"),
        context=("examination", "history", "comparison"),
    ),
    "template without the header of the findings": Layout(
        "INDICATION: Cough.\nTECHNIQUE: PA and lateral.\nLUNGS AND PLEURA: No "
        "pneumothorax.\nHEART AND MEDIASTINUM: Heart is "
        "enlarged.\nOTHER FINDINGS: None.\nIMPRESSION: Cardiomegaly with effusion.",
        ("LUNGS AND PLEURA: No pneumothorax", "HEART AND MEDIASTINUM: Heart is enlarged",
        "OTHER FINDINGS: None"), context=("indication", "technique"),
    ),
    "comparison within the findings": Layout(
        "Findings:\nLungs: No pneumothorax.\nComparison: 2014.\nHeart: Heart is "
        "enlarged.\nImpression: Cardiomegaly with effusion.",
        ("Lungs: No pneumothorax", "Heart: Heart is enlarged"),
        context=("comparison",),
    ),
    "British": Layout(
        "Clinical Details: SOB ?pneumonia\n\nXR Chest:\n\nReport:\nNo pneumothorax.\nSmall left "
        "pleural effusion.\nHeart is enlarged.\n\n"
        "Conclusion:\nCardiomegaly with effusion.\n\nReported by: Dr J Smith\nGMC number: 1234567",
        context=("history",),
        counts=("sections_naming_a_person",),
    ),
    "qualified headers": Layout(
        f"Clinical Findings: Fever, pneumonia suspected.\nRadiological Findings (PA and "
        f"lateral):\n{_BODY}\n"
        "Radiologist's Impression: Cardiomegaly with effusion.",
        context=("history",),
    ),
    "impression and plan": Layout(
        f"Reason for visit: Pneumonia?\nFINDINGS - CHEST: {_BODY}\nImpression/Plan: "
        f"Cardiomegaly with effusion.",
        context=("indication",),
    ),
    "chest findings": Layout(
        f"CLINICAL INFORMATION: Pneumonia?\nCHEST FINDINGS:\n{_BODY}\nFINAL "
        f"IMPRESSION:\nCardiomegaly with effusion.",
        context=("history",),
    ),
    "plain lines": Layout(
        "FINDINGS\nNo pneumothorax\nSmall left pleural effusion\nHeart is "
        "enlarged\n\nIMPRESSION\nCardiomegaly with effusion"
    ),
    "all capitals": Layout(
        "CLINICAL HISTORY: RULE OUT PNEUMONIA\nFINDINGS:\nNO PNEUMOTHORAX\nSMALL LEFT PLEURAL "
        "EFFUSION\nHEART IS ENLARGED\n"
        "IMPRESSION:\nCARDIOMEGALY WITH EFFUSION",
        tuple(text.upper() for text in FINDINGS),
        (IMPRESSION.upper(),),
        context=("history",),
    ),
    "small letters": Layout(
        "clinical history: cough\nfindings: no pneumothorax\nsmall left pleural effusion\nheart "
        "is enlarged\nimpression: cardiomegaly "
        "with effusion",
        tuple(text.lower() for text in FINDINGS),
        (IMPRESSION.lower(),),
        context=("history",),
    ),
    "one line": Layout(
        f"EXAM: CHEST INDICATION: cough TECHNIQUE: AP FINDINGS: {_BODY} IMPRESSION: "
        f"Cardiomegaly with effusion.",
        context=("examination", "indication", "technique"),
    ),
    "one line, mixed case": Layout(
        f"History: cough, pneumonia? Comparison: none. Findings: {_BODY} Impression: "
        f"Cardiomegaly with effusion. "
        "Electronically signed by Jane Doe, MD",
        context=("history", "comparison"),
        counts=("sections_naming_a_person",),
    ),
    "header within a line": Layout(
        f"Technique: PA.\nFindings: {_BODY} Impression: Cardiomegaly with effusion.\nDictated "
        f"by: Jane Doe",
        context=("technique",),
        counts=("sections_naming_a_person",),
    ),
    "bars": Layout(
        f"History: pneumonia? | Findings: {_BODY} | Impression: Cardiomegaly with effusion.",
        context=("history",)
    ),
    "Markdown": Layout(
        "# Chest radiograph\n\n**Clinical History:** Cough\n\n## Findings\n\n- No "
        "pneumothorax\n- Small left pleural effusion\n"
        "- Heart is enlarged\n\n## Impression\n\n1. Cardiomegaly with effusion\n",
        context=("history",),
        counts=("text_before_first_header",),
    ),
    "Markdown table": Layout(
        f"| Section | Text |\n|---|---|\n| History | Cough |\n| Findings | {_BODY} |\n| "
        f"Impression | Cardiomegaly with effusion |",
        context=("history",),
        counts=("text_before_first_header",),
    ),
    "numbered headers": Layout(
        f"1. TECHNIQUE: PA view\n2. FINDINGS:\n{_BODY}\n3. IMPRESSION:\nCardiomegaly with "
        f"effusion.", context=("technique",)
    ),
    "decorated headers": Layout(
        f"=== INDICATION ===\nPneumonia?\n=== FINDINGS ===\n{_BODY}\n=== IMPRESSION "
        f"===\nCardiomegaly with effusion.",
        context=("indication",),
    ),
    "numbered findings": Layout(
        "FINDINGS:\n1- No pneumothorax\n2- Small left pleural effusion\n3- Heart is "
        "enlarged\nIMPRESSION:\n#1 Cardiomegaly with effusion"
    ),
    "lettered findings": Layout(
        "FINDINGS:\na. No pneumothorax\nb. Small left pleural effusion\nc. Heart is "
        "enlarged\nIMPRESSION:\ni. Cardiomegaly with effusion"
    ),
    "two columns with tabs": Layout(
        f"Clinical History\tPneumonia?\nFindings\t{_BODY}\nImpression\tCardiomegaly with effusion",
        context=("history",)
    ),
    "two columns with blanks": Layout(
        f"Indication        Pneumonia?\nFindings          {_BODY}\nImpression        "
        f"Cardiomegaly with effusion",
        context=("indication",),
    ),
    "dashes for colons": Layout(
        f"History - pneumonia?\nFindings - {_BODY}\nImpression – Cardiomegaly with effusion",
        context=("history",)
    ),
    "no colons": Layout(
        f"TECHNIQUE Two views of the chest.\nFINDINGS {_BODY}\nIMPRESSION Cardiomegaly with "
        f"effusion", context=("technique",)
    ),
    "Windows lines": Layout(
        "Clinical Indication:\r\nPneumonia?\r\n\r\nFindings:\r\n\tNo pneumothorax\r\n\tSmall "
        "left pleural effusion\r\n\tHeart is "
        "enlarged\r\n\r\nImpression:\r\n\tCardiomegaly with effusion\r\n",
        context=("indication",),
    ),
    "no-break blanks": Layout(
        f"\ufeff\u00a0INDICATION:\u00a0Pneumonia?\n\u00a0\u200bFINDINGS\u00a0:\u00a0{_BODY}\n\u2003IMPRESSION:\u00a0Cardiomegaly with "
        "effusion",
        context=("indication",),
    ),
    "HTML": Layout(
        "<p><b>History:</b> Pneumonia?</p><p><b>Findings:</b><br/>No pneumothorax<br>Small left "
        "pleural effusion<br />Heart is "
        "enlarged</p><p><b>Impression:</b> Cardiomegaly with effusion</p>",
        context=("history",),
        counts=("cleaned_texts",),
    ),
    "HTML list": Layout(
        "<div>FINDINGS:</div><ul><li>No pneumothorax</li><li>Small left pleural "
        "effusion</li><li>Heart is enlarged</li></ul>"
        "<div>IMPRESSION: Cardiomegaly with effusion</div>",
        counts=("cleaned_texts",),
    ),
    "escaped line breaks": Layout(
        "FINDINGS:\\nNo pneumothorax\\nSmall left pleural effusion\\r\\nHeart is "
        "enlarged\\n\\nIMPRESSION:\\nCardiomegaly with effusion",
        counts=("cleaned_texts",),
    ),
    "Excel's line breaks": Layout(
        "FINDINGS:_x000D_\nNo pneumothorax_x000D_\nSmall left pleural effusion_x000D_\nHeart is "
        "enlarged_x000D_\n_x000D_\nIMPRESSION:"
        " Cardiomegaly with effusion_x000D_\n",
        counts=("cleaned_texts",),
    ),
    "HL7": Layout(
        "FINDINGS:\\.br\\No pneumothorax\\.br\\Small left pleural effusion\\.br\\Heart is "
        "enlarged\\.br\\IMPRESSION:\\.br\\Cardiomegaly with "
        "effusion",
        counts=("cleaned_texts",),
    ),
    "NUL": Layout(
        f"FINDINGS:\0 {_BODY}\nIMPRESSION: Cardiomegaly\0 with effusion", counts=("cleaned_texts",)
    ),
    "findings that refer to the impression": Layout(
        "FINDINGS: See impression.\nIMPRESSION: Cardiomegaly with effusion.", (),
        counts=("empty_sections",)
    ),
    "impression as above": Layout(f"FINDINGS: {_BODY}\nIMPRESSION: As above.", impression=(),
    counts=("empty_sections",)), "MIMIC": Layout(
        "                                 FINAL REPORT\n EXAMINATION:  CHEST (PA AND LAT)\n\n "
        "INDICATION:  ___F with cough\n  // "
        "pneumonia?\n\n FINDINGS: \n \n No\n pneumothorax. Small left pleural\n effusion.  "
        "Heart is enlarged.\n \n IMPRESSION: \n \n "
        "Cardiomegaly with effusion.",
        context=("examination", "indication"),
    ),
    "signature and status": Layout(
        f"Patient: Jane Doe\nExam Date: 1/2/2015\nFINDINGS: {_BODY}\nIMPRESSION: Cardiomegaly "
        f"with effusion.\nReport Status: Final\n"
        "Attending Radiologist: John Roe\nTechnologist: Jim Poe",
        counts=("sections_naming_a_person", "administrative_sections"),
    ),
    "results called": Layout(
        f"FINDINGS: {_BODY}\nIMPRESSION: Cardiomegaly with effusion.\nFindings discussed with: "
        f"Dr. Roe at 3 pm.",
        context=("notification",),
    ),
    "German": Layout(
        "Klinische Angaben: Husten\nBefund: Kein Pneumothorax.\nBeurteilung: Kardiomegalie.",
        ("Kein Pneumothorax",),
        ("Kardiomegalie",),
        context=("history",),
    ),
    "transcribed with commas": Layout(
        f"EXAM: ,Chest.,INDICATION: ,Pneumonia?,FINDINGS: ,{_BODY},IMPRESSION: ,Cardiomegaly "
        f"with effusion.",
        context=("examination", "indication"),
    ),
}  # fmt: skip

NO_TEXT_CELLS = (
    "None", "none", "nan", "NaN", "N/A", "n/a", "#N/A", "NULL", "<NA>", "--", "-", ".", "", " ",
    "\u00a0", "Not available",
)  # fmt: skip
POINTING_CELLS = (
    "See impression.", "see impression", "As above.", "as above", "See above", "See below.",
    "Please see impression below.", "As per impression", "See findings and impression.",
    "Refer to impression.", "Described above.", "Same as above", "Findings as above.", "See report",
    "SEE FULL REPORT.", "Impression: see above", "See separate report.", "As described above.",
)  # fmt: skip
CLEANED_CELLS = {
    "Lungs &amp; pleura clear": "Lungs & pleura clear",
    "Nodule &lt; 5 mm": "Nodule < 5 mm",
    "Nodule <5 mm and >3 mm": "Nodule <5 mm and >3 mm",
    "Radiologist&#39;s view": "Radiologist's view",
    "Fran&ccedil;ois &amp;lt; 3": "François < 3",
    "Clear.\\nNo effusion": "Clear.\nNo effusion",
    "Clear.\\r\\nNo effusion": "Clear.\nNo effusion",
    "Clear_x000D_\nNo effusion": "Clear\nNo effusion",
    "Cle\0ar": "Clear",
    "Clear<br>No effusion": "Clear\nNo effusion",
    "<p>Clear</p>": "Clear",
    "\u200bClear\u00a0lungs": "Clear lungs",
    "None seen.": "None seen.",
    "As above, no effusion": "As above, no effusion",
    "Normal": "Normal",
}
