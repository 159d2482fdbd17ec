"""Forms in which reports contain identifiers, and phrases of reports that look like them and are
none.

python tests/data/odd/odd_texts.py    # prints how many of each are found
"""

import sys

IDENTIFIERS = (
    # names
    "Mr. Smith was seen.", "Mrs Jones has a cough.", "Ms. Garcia-Lopez", "Miss O'Neil",
    "MRS. BROWN", "John Smith, MD", "Jane A. Doe, M.D.", "JOHN SMITH, MD", "Peter Lee MD",
    "Anna Berg, PhD", "R. Patel, MBBS", "Maria Lopez, RN", "Dr Smith", "Dr. J. Smith", "dr. Miller",
    "DR. MILLER", "Drs. Smith and Jones", "Doctor Miller", "Prof. Weber",
    "discussed with Dr. Chen at 3:45 PM", "Findings were discussed with Emily Carter by phone.",
    "Dictated by: JS", "Dictated by John Smith", "Signed by: Adams",
    "Electronically signed by Susan Wong", "cc: Peter Adams", "CC: Smith", "Transcribed by AB",
    "Read by: M. Weber", "Attending: Jones", "Referring physician: Adams", "Reported by: KL",
    "Clear lungs.\nSmith, John", "Clear lungs.\nJS/ab", "KLM:xy", "SMITH^JOHN", "Doe^Jane^A",
    "Patient name: Smith", "Patient John Smith presents with cough.", "nurse Johnson was notified",
    "Notified to RN Miller", "Radiologist: K. Adams", "her daughter Mary", "resident Thompson",
    "Communicated to Sarah Miller on the phone", "Technologist: AM", "Frau Meier",
    # dates
    "3/14/2015", "03/14/15", "14.03.2015", "2015-03-14", "2015/03/14", "20150314", "14-Mar-2015",
    "14 Mar 2015", "14Mar2015", "March 14th", "March 14", "Mar 14, 2015", "14th of March",
    "14 March", "March 2015", "Mar '15", "03/2015", "compared to 3/14", "on 3/4", "since 03/04",
    "MARCH 14, 2015", "14-MAR-15", "Sept. 3rd, 2014", "2015-03-14T15:45:00", "December 24 2019",
    "dated 5/6", "20150314154500", "Comparison: 12/31", "March-14-2015", "Jul 4th",
    # phones, mail, web
    "617-555-1234", "(617) 555-1234", "(617)555-1234", "617.555.1234", "+1 617 555 1234",
    "+49 89 1234567", "0161 496 0000", "pager 12345", "Pager #4567", "ext. 4321", "x54321",
    "beeper: 91234", "tel 555-1234", "555-1234", "fax: 617 5551234", "js@hospital.org",
    "john.smith@mail.example.com", "https://hospital.org/patient/7", "www.hospital.org", "10.1.2.3",
    # numbers
    "MRN 1234567", "MRN: 12-34-56", "MRN# 00123", "Medical record number 445566", "123-45-6789",
    "SSN 123 45 6789", "Acc# 998877",
    "Accession number: CR15-00123", "accession 1234567", "Account: 55443", "Patient ID: 40012",
    "patient no. 7712", "S15-12345", "Serial number 12345", "S/N AB-1234", "serial no: 77X123",
    "1.2.840.113619.2.55.3.12345", "A12345678", "Exam #12345",
    "Case number 2015-123", "NHS number 943 476 5919", "policy no 77123", "Lot #A1234",
    "license 12345", "health plan id: 8812345", "Order number: 71234", "device ID: 00123",
    "Encounter 771234",
    # ages above 89
    "97 year old", "97-year-old woman", "97 y/o", "97yo", "97 YO M", "age 97", "aged 93",
    "103 years old", "97 y.o.", "97F", "ninety-seven year old", "90 yr old", "Age: 101",
    # places and addresses
    "12 Main Street", "12 N. Oak Ave.", "221B Baker Street", "1600 Pennsylvania Avenue",
    "PO Box 123", "P.O. Box 77", "Apt. 4B", "Suite 200", "Boston, MA 02139", "MA 02139-4307",
    "zip 02139", "SW1A 1AA", "Massachusetts General Hospital", "Saint Mary's Hospital",
    "St. Jude Children's Hospital", "Mayo Clinic", "Springfield Medical Center", "Ward 7B",
    "Room 312", "room 5", "Bed 12", "Lives in Springfield", "University of Virginia",
    "transferred from Springfield General.", "Oak Wing", "Johns Hopkins Hospital",
    # forms that were added after the first list was found
    "Pt: Smith", "/S/ John Smith", "Reported to Dr.Smith", "Mr.Smith", "Rm. 312", "Room: 312",
    "acc no 12345", "john smith, md", "SMITH JOHN MD", "Tech: Maria", "Initials: JS",
    "Hosp no: A1234", "SN: 8821XK", "Seen by Smith", "Smith J, MD", "95-y-o", "Job #: 123456",
    "5-Jan", "Mr. and Mrs. Smith", "Dr Van der Berg", "MR SMITH", "Thank you, John Smith",
    "ref: AB/123/45", "4th floor", "the Brigham", "Elm Street 12, Springfield",
    "interpreted by SMITH",
)  # fmt: skip
"""At least one identifier in each."""

MISSED = (
    "MR SMITH", "Thank you, John Smith", "ref: AB/123/45", "4th floor", "the Brigham",
    "Elm Street 12, Springfield", "interpreted by SMITH",
)  # fmt: skip
"""Those of `IDENTIFIERS` that the screen does not find."""

PHRASES = (
    "Kerley B lines", "Swan-Ganz catheter", "Swan Ganz catheter tip", "Dobhoff tube", "Port-A-Cath",
    "St. Jude valve", "Hill-Sachs deformity", "Bochdalek hernia", "Morgagni hernia", "Mach effect",
    "Hampton hump", "Westermark sign", "Ghon complex", "Pancoast tumor", "Hickman catheter",
    "Broviac", "PICC", "Harrington rods", "Schmorl nodes", "Wegener's", "Hodgkin lymphoma",
    "Chilaiditi syndrome", "Marfan syndrome", "Ewing sarcoma", "Langerhans cell",
    "Bird's nest filter", "T8", "L1", "T12/L1", "C7-T1", "3/4", "1/2 of the lung", "2 cm", "5-6 mm",
    "3.2 x 1.5 cm", "12 x 14 mm", "2/3 of the hemithorax", "ribs 5-8", "the 5th to 8th ribs",
    "grade 2/6 murmur", "5/5", "BP 120/80", "saturation 88-92%", "ETT 4.5 cm above the carina",
    "68 year old man", "68-year-old", "aged 45", "89 yo", "last Tuesday", "yesterday", "at 3:45 PM",
    "in 2015", "since 2009", "2 views of the chest", "PA and lateral", "PA/lateral", "AP/PA",
    "Chest, PA and lateral", "CT chest", "MR abdomen", "a mass may represent", "2 may be artifacts",
    "decreased 3 mm", "marked 14 percent", "Chest X-ray", "x 2 days", "512 x 512",
    "Please notify the ordering physician.", "discussed with the referring physician",
    "findings were called to the floor", "The radiologist recommends CT.",
    "Dr. ___ was called at 3:45 PM on ___.", "Dr. XXXX", "Mr. XXXX", "XXXX Hospital", "read by ___",
    "compared with XXXX", "the patient is rotated", "patient position is supine",
    "nurse practitioner", "No. 5 French catheter", "8 French sheath", "size 7.5 tube", "1.2 cm",
    "16.2/24", "0.5", "98.6 F", "90 degrees", "100%", "93 percent", "95% confidence",
    "cobb angle of 92 degrees", "hospital", "outside hospital", "the clinic", "in clinic",
    "Impression: clear.", "Bed rest", "bedside", "the room air saturation", "HU of 100-120",
    "10 mm nodule", "Level 3 nodes", "T2N1M0", "COVID-19", "SARS-CoV-2", "H1N1", "B12", "FEV1",
    "S1Q3T3", "March fracture", "Port in place", "20/20", "24/7", "reviewed with Clinical Team",
    "performed by Interventional Radiology", "communicated to Emergency Department",
    "discussed with the ED", "signed by the attending", "seen by Radiology",
    "read by Emergency Medicine", "called to ER",
    "discussed with the referring physician Dr. ___ by telephone",
    "telephoned to the nurse Mrs. ___", "resident Dr. XXXX",
)  # fmt: skip
"""No identifier in any."""


def main() -> None:
    """Print how many forms are found, and how many phrases are taken for one."""
    from medvl.data.privacy import find_identifiers

    found = [text for text in IDENTIFIERS if find_identifiers(text)]
    mistaken = [text for text in PHRASES if find_identifiers(text)]
    lines = [
        f"{len(found)} of {len(IDENTIFIERS)} forms of identifiers found",
        f"{len(mistaken)} of {len(PHRASES)} phrases without one mistaken",
        *(f"missed: {text!r}" for text in IDENTIFIERS if text not in found),
        *(f"mistaken: {text!r} {find_identifiers(text)}" for text in mistaken),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
