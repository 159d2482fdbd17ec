"""Headings of reports: the section that each opens, in the words of many hospitals and of the
columns of tables.
"""

import enum
import functools
import re
from typing import NamedTuple

from medvl.data.reports.sentences import words

_ALIASES = {
    "findings": "findings|finding|findings in detail|radiographic findings|report|results"
    "|description|observations"
    "|reference findings|findins|findindgs|findgings|findngs|findnings|finidngs|befund|befunde"
    "|hallazgos|achados|reperti"
    "|radiology report|radiological report|radiologic report|imaging report|x-ray report"
    "|chest x-ray report|report text"
    "|report body|body of report|report details|imaging results|results of examination"
    "|radiology results|observation",
    "impression": "impression|impressions|imp|final impression|conclusion|conclusions|opinion"
    "|summary|diagnosis"
    "|interpretation|findings and impression|findings/impression|impression and findings"
    "|impression/findings"
    "|impression and recommendation|impression and recommendations|impresson|assessment"
    "|assessment and plan"
    "|assessment/plan|imaging diagnosis|radiological diagnosis|radiologic diagnosis"
    "|radiographic diagnosis"
    "|imaging impression|bottom line|key points|final diagnosis|summary of findings"
    "|impression summary"
    "|beurteilung|beurteilungen|zusammenfassung|impresión|impressão|conclusión|conclusão"
    "|conclusioni|conclusiones"
    "|imprression|imoression|impressoin|imprssion|impresion|imperssion|mpression|impession",
    "indication": "indication|reason for exam|reason for examination|reason for study"
    "|reason for the exam|reason for request|reason for this examination|indication for exam"
    "|indication for study|reason for visit|indications|clinical indication"
    "|clinical indications|reason|reasons|chief complaint"
    "|chief complaints|presenting complaint|presenting complaints|presenting problem|idication"
    "|ndication|fragestellung"
    "|indikation|indicación|indicação|quesito clinico|klinische fragestellung|clinical question"
    "|clinical query"
    "|clinical concern|clinical request|clinical suspicion|question|questions"
    "|question to be answered|query|request"
    "|request details|requested information|provisional diagnosis|admitting diagnosis"
    "|admission diagnosis"
    "|working diagnosis|referring diagnosis|suspected diagnosis|clinical diagnosis"
    "|preoperative diagnosis"
    "|pre-operative diagnosis|referral reason|referral diagnosis|referral question|why",
    "history": "history|physical findings|physical exam|physical examination"
    "|examination findings|operative findings|surgical findings|laboratory findings"
    "|lab findings|lab results|laboratory results|laboratory data|biopsy results"
    "|pathology|pathology findings|clinical history|patient history|medical history"
    "|past medical history"
    "|presenting history|pfi|pmh|hpi|hx|clinical hx|clinical data|clinical context"
    "|clinical statement|clinical information"
    "|clinical info|clinical details|clinical notes|clinical note|clinical summary"
    "|clinical background|clinical findings"
    "|clinical features|clinical presentation|clinical picture|clinical scenario"
    "|clinical setting|clinical problem"
    "|clinical problems|clinical course|clinical state|clinical symptoms|clinical signs"
    "|presentation|background"
    "|signs and symptoms|signs/symptoms|symptoms|indication and history|history and indication"
    "|indication/history"
    "|history/indication|patient information|patient background|relevant information|anamnese"
    "|klinische angaben"
    "|klinik|antecedentes|renseignements cliniques|allergies|medications"
    "|history/reason for exam|risk factors",
    "comparison": "comparison|prior findings|previous findings|comparison exam|comparison "
    "study|comparison studies"
    "|comparison film|comparison films|prior studies|prior exams|previous examination"
    "|comparisons|compared to|compared with|comparision|comparisions|comparsion|comparrison"
    "|correlation|reference exam|previous|priors|prior|vergleich|voraufnahmen|comparación"
    "|comparação|comparaison"
    "|confronto",
    "technique": "technique|techniques|technical factors|technical details"
    "|technical information|technical data"
    "|technical note|technical parameters|technical description|procedure|procedure comments"
    "|protocol|protocols|method"
    "|methods|technik|técnica|tecnica|methodology|imaging technique|scan technique"
    "|examination technique",
    "examination": "examination|examinations|exam|exams|study|studies|type of exam"
    "|type of examination|type of study"
    "|exam type|exam description|exam name|examination type|examination name|study type"
    "|study description|study name"
    "|procedure name|procedure description|procedure performed|exam performed"
    "|examination performed|examination requested"
    "|exam requested|exam title|untersuchung|exploración|body part|body part examined|modality"
    "|service performed"
    "|test performed|test name|investigation|investigations|procedures performed",
    "recommendation": "recommendation|recommendations|follow up|follow-up|followup|advice"
    "|suggestion"
    "|suggestions|management|next steps|empfehlung|further management|follow up recommendations"
    "|follow-up recommendations|recommended follow-up|recommended follow up|suggested follow-up",
    "notification": "notification|notifications|communication|communications|notice"
    "|notification of results"
    "|critical result|critical results|critical value|critical values|critical communication"
    "|critical test result"
    "|critical result communication|results communication|communication of results"
    "|discussed with|communicated to"
    "|called to|reported to|verbal report|verbal report given to",
    "wet_read": "wet read|wetread|preliminary report|preliminary read",
    "addendum": "addendum|addenda|final addendum",
}
"""Section -> its headings. Misspellings are those of `section_parser.py` in MIT-LCP/mimic-cxr,
except that it takes "ndication" (one report) for the impression.
"""
_SECTION_OF = {
    alias: section for section, aliases in _ALIASES.items() for alias in aliases.split("|")
}

_KIND_OF_HISTORY = (
    r"(?:(?:relevant|pertinent|brief|short|patient|patient'?s|past|previous|present|current"
    r"|clinical|medical|surgical|social|family|smoking|occupational|oncologic(?:al)?|presenting"
    r"|additional|other|significant|interval|known|case|hospital|and) )+"
)
_PRIOR = r"(?:relevant |available |most )?(?:prior|previous|old|earlier|recent|last|comparison)"
_STUDIES = (
    r"(?:exams?|examinations?|stud(?:y|ies)|imaging|films?|images?|radiographs?|reports?|x-?rays?"
    r"|cxrs?|cts?|radiology|chest x-?rays?|chest radiographs?|chest films?|investigations?)"
)
_PATTERNS = {
    "history": rf"{_KIND_OF_HISTORY}(?:history|hx|histories)(?: .*)?|history of .*|history and .*",
    "indication": r"(?:clinical )?reasons? for .*|indications? (?:for|of) .*"
    r"|.*\b(?:chief|presenting) complaint"
    r"|(?:clinical )?(?:indications?|reasons?|questions?)/.*"
    r"|(?:exam|study|examination|order) (?:indications?|reasons?)",
    "comparison": rf"comparisons? {_STUDIES}|{_PRIOR} {_STUDIES}|comparisons? "
    rf"(?:to|with|is|are|made) .*"
    rf"|compar(?:ed|ison) (?:to|with) .*|dates? of comparison.*|comparison dates?"
    rf"|comparisons?/.*|correlat\w+ {_STUDIES}",
    "technique": r"(?:exam(?:ination)?|study|imaging|scan|scanning|acquisition|radiographic"
    "|radiological|chest|ct|x-?ray|mri?)"
    r" (?:techniques?|protocols?|parameters|methods?)|techniques?(?: and |/).*|technique of .*",
    "notification": r"(?:critical |these |the |significant )?(?:findings?|results?"
    "|impression|report)(?: was| were| have been)?"
    r" (?:discussed|communicated|called|reported|telephoned|conveyed|paged"
    r"|relayed|notified|phoned)\b.*"
    r"|(?:discussed|communicated|telephoned|notified|relayed|conveyed) (?:to|with|by|at|on)\b.*",
    "addendum": r"addend(?:um|a) .*|(?:report|final|preliminary) addend(?:um|a)",
    "recommendation": r"(?:further |management |imaging |clinical )?(?:recommendations?"
    "|advice|suggestions?)(?: for .*)?"
    r"|recommend(?:ed|ations?)(?: .*)?",
}
_PATTERN_OF = {section: re.compile(pattern) for section, pattern in _PATTERNS.items()}

_OPENS_ONLY_BEFORE = {
    "technique": r"views?(?: obtained| submitted| acquired| taken| provided)?|number of views"
    r"|projections?|limitations?"
    r"|contrast(?: .*)?|(?:image|study|exam|film|technical) (?:quality|adequacy)|equipment"
    r"|scanner|sedation|an(?:a)?esthesia",
    "recommendation": r"plan",
}
"""Headings that are part of the findings and the impression there."""
_OPENER_OF = {section: re.compile(pattern) for section, pattern in _OPENS_ONLY_BEFORE.items()}

_QUALIFIER = re.compile(
    r"radiolog(?:y|ic|ical|ist|ists|ist's|ists')|radiographic(?:al)?|roentgen|imaging|image"
    r"|chest|cxr|thora(?:x|cic)|x-?rays?"
    r"|xr|ct|cta|hrct|mri?|us|ultrasound|scan|films?|study|exam(?:ination)?|report|final"
    r"|preliminary|initial|overall|main"
    r"|key|pertinent|relevant|important|significant|other|additional|further|incidental"
    r"|associated|secondary|ancillary"
    r"|general|detailed|specific|current|interval|new|positive|negative|abnormal|principal"
    r"|major|pa|ap|lat|lateral"
    r"|frontal|with|and|of|on|in|for|the|by|this|these|detail|details|views?|one|two|three|four"
    r"|single|\d{1,2}|portable|upright|supine|erect|bedside|semi-?upright|physician|physician's"
    r"|doctor's|attending|attending's|resident's|reading|reader's|clinician's|narrative|structured"
    r"|section|text|body|diagnostic|official|brief|short|summary|recommendations?|plan|advice"
    r"|comments?|conclusions?|discussion|see|below|only|translated|english|list|report's|today's"
    r"|diagnosis|radiographs?|are|as|follows?|following|abdomen|abdominal|neck|head|pelvis|bone|-+"
    r"|–|—"
)
_FINDINGS = re.compile(r"findings?|observations|reports?|narrative|comments?")
_IMPRESSION = re.compile(r"(?:impressions?|conclusions?|interpretation|opinion|assessment)")
_PART_OF_SECTION = re.compile(
    r"\b(?:other|additional|further|incidental|associated|secondary|ancillary|significant|important"
    r"|key|critical|positive|negative|abnormal|specific|interval|new|pertinent|relevant|main|major"
    r"|principal|general)\b"
)
"""Words of sub-headings such as "Other findings", which stay in the section that they are in."""
_SECTIONS_WITHIN = ("impression", "findings", "history", "comparison", "addendum")
"""Words that assign an unlisted heading in capitals to a section, tried in this order (as in
`section_parser.py`).
"""
_EXAMINATION_NAME = re.compile(
    r"\b(?:chest|thorax|cxr|views?|radiographs?|x-?rays?|films?|portable|bone window|ribs"
    r"|frontal (?:and|upright|semi-upright)|(?:pa|ap|lateral) and (?:pa|ap|lat|lateral))\b"
)
_ORGAN = re.compile(
    r"lungs?|pulmonary|pleurae?|pleural|hearts?"
    r"|cardi(?:ac|um|ovascular|omediastin\w+|opulmonary)|pericardi\w+"
    r"|mediastin\w+|hil(?:a|ar|um)|airways?|trachea\w*|bronch\w+|bones?|bony|osseous"
    r"|skelet(?:on|al)|musculoskeletal|msk"
    r"|spine|vertebra\w*|(?:hemi)?diaphragms?|abdom(?:en|inal)|vessels?|vascular|vasculature"
    r"|aorta|aortic|costophrenic|cp"
    r"|parenchyma\w*|interstiti\w+|lymph\w*|thyroid|devices?|hardware|tubes?|lines?|catheters?"
    r"|ribs|shoulders?"
    r"|clavicles?|breasts?|tissues?|wall"
)
_WITH_ORGAN = re.compile(
    r"and|or|of|the|in|left|right|upper|lower|mid|bilateral|both|size|silhouette|contours?"
    r"|structures|spaces?|cavity|cavities"
    r"|soft|fields?|zones?|volumes?|shadow|borders?|angles?|regions?|system|visuali[sz]ed"
    r"|partially|included|other|support"
    r"|great|thoracic|chest|cage|thorax|apices|bases|markings|nodes|surfaces?|medical|life"
    r"|monitoring|implanted|visible|base|findings?"
)
"""Words of a template's headings of the parts of the findings, `LUNGS AND PLEURA`, and those
that go with them.
"""
_ADMINISTRATIVE = re.compile(
    r"(?:report |document |result |exam |study )?status|priority|cc|copies to|copy to"
    r"|distribution|(?:referring )?facility"
    r"|hospital|institution|department|ward|clinic|location of exam"
    r"|(?:order|requisition|request|episode|visit|encounter"
    r"|case|hospital|nhs|film|file|x-?ray|exam|study|report|reference|ref|id|insurance"
    r"|policy)[ .]*(?:number|no|id|nr|#)"
    r"|insurance(?: .*)?|billing(?: .*)?|cpt(?: .*)?|icd(?: ?-?\d+)?(?: .*)?"
    r"|(?:procedure|exam|diagnosis|billing) codes?|codes?"
    r"|(?:exam|examination|study|report|reported|dictation|dictated|transcription|transcribed"
    r"|signature|signed|finali[sz]ed|finali[sz]ation|service|collection|order|ordered|result"
    r"|performed|admission|visit|procedure|sign|print(?:ed)?|received|requested|verified|approved"
    r"|electronic(?:ally)? signed) (?:date|time|on|at|date and time|date/time|datetime|dt)|dates?"
    r"|time|dates? (?:of|and) .*|time of .*|date/time|page|page \d+|disclaimer|attestation(?: .*)?"
    r"|teaching physician.*|electronic signature|electronically signed|signature|signed|dictated"
    r"|transcribed|typed|verified|approved|finalized|authors?|authori[sz]ed by|read(?:er| by)"
    r"|reported|reporter|reporting|technologists?|technicians?|tech|radiographers?|(?:ordering "
    r"|referring |requesting |attending |primary |primary care |interpreting |reading |responsible "
    r"|consulting )?"
    r"(?:providers?|clinicians?|physicians?|doctors?|consultants?|surgeons?|gp|dr|practitioners?"
    r"|radiologists?|fellows?|residents?|specialists?|attendings?|interpreter|registrar|readers?)"
    r"(?: (?:names?|signature|id|initials|of record|on call|in charge))?|requested by|ordered by"
    r"|performed by"
    r"|patient(?:'s)?(?: "
    r"(?:name|id|age|sex|gender|dob|class|type|location|status|demographics|data|no|number))?"
    r"|pt(?: name| id)?|name|full name|surname|first name|last name|age|sex|gender|age/sex"
    r"|sex/age|age and sex|race|ethnicity"
    r"|dob|demographics|address|phone|tel|telephone|fax|email|contact|room|bed|workstation|signer"
    r"|.*\b(?:dictated|signed|read|transcribed|interpreted|verified|reviewed|approved|typed"
    r"|reported|performed) by"
    r"|report(?:ed)? (?:by|on)|reviewed by|checked by|confirmed by|validated by|unterschrift"
    r"|patientin|geburtsdatum"
)
"""Headings of people, numbers, dates and the handling of a report."""

_BEFORE_FINDINGS = frozenset(("indication", "history", "comparison", "technique", "examination"))
CONTEXT_SECTIONS = _BEFORE_FINDINGS | {"notification", "recommendation", "wet_read", "addendum"}
"""Sections that do not describe the image, such as the question that it was taken for."""
DESCRIPTIVE_SECTIONS = ("findings", "impression", "last_paragraph")
"""Sections that describe the image."""
BEFORE_FINDINGS = _BEFORE_FINDINGS
"""Context that a description without a heading may follow."""
COMMON_SECTIONS = frozenset(
    (
        "findings",
        "impression",
        "indication",
        "history",
        "comparison",
        "technique",
        "recommendation",
        "notification",
        "addendum",
    )
)
"""Sections whose headings are also recognised within a line."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COLUMN_WORDS = re.compile(
    r"^(?:(?:section|sections|sec|report|rad|radiology|text|txt|raw|clean|cleaned|parsed|x"
    r"|full|deid|original|processed) )+"
    r"|(?: (?:section|sections|sec|text|txt|raw|clean|cleaned|parsed|full|en|eng|english|deid"
    r"|original|processed|string|str"
    r"|content|x|y|0|1|\d))+$"
)
_OWN_NAMES = words(
    "report results result description observation observations summary diagnosis reason study "
    "studies exam exams procedure method methods notice question questions answer plan "
    "presentation previous prior priors query request why background communication modality "
    "opinion assessment management advice symptoms medications allergies imp investigation "
    "report-text report-body body-of-report radiology-report imaging-report report-details"
)
"""Columns that keep their name: their text may be of another kind than the section of that name."""

_NEED_COLON = words(
    "why query previous prior priors background symptoms presentation advice management "
    "allergies medications "
    "correlation question questions request modality communication followup follow-up "
    "follow-ups why suggestion plan "
    "suggestions klinik imp hx previous notice method methods procedure observation assessment"
)
"""Aliases that are words of a sentence as well."""


class Kind(enum.Enum):
    """What a heading opens."""

    SECTION = "section"
    """A section; `Heading.section` is its name."""
    PART = "part"
    """A part of the section that it is in, as "Other findings"; elsewhere, the section."""
    ORGAN = "organ"
    """A part of the findings, such as `HEART`."""
    ADMINISTRATIVE = "administrative"
    """A person, number or date, or the handling of the report."""


class Heading(NamedTuple):
    """A heading that is known."""

    kind: Kind
    section: str


def plain_heading(label: str) -> str:
    """Return a heading in lower case, with single blanks, `and` for `&`, and no blanks around
    slashes.
    """
    plain = (
        label.lower().replace("’", "'").replace("_", " ").replace("&", " and ").replace("(s)", "s")
    )
    return re.sub(r" ?/ ?", "/", " ".join(plain.split()))


@functools.lru_cache(maxsize=4096)
def known_heading(plain: str) -> Heading | None:
    """Return what a heading opens, from `plain_heading`; None where it is not known."""
    section = _SECTION_OF.get(plain)
    if section is not None:
        return Heading(Kind.SECTION, section)
    for section, pattern in _PATTERN_OF.items():
        if pattern.fullmatch(plain):
            return Heading(Kind.SECTION, section)
    described = _described(plain)
    if described is not None:
        kind = Kind.PART if _PART_OF_SECTION.search(plain) else Kind.SECTION
        return Heading(kind, described)
    if _ADMINISTRATIVE.fullmatch(plain):
        return Heading(Kind.ADMINISTRATIVE, plain)
    for section, pattern in _OPENER_OF.items():
        if pattern.fullmatch(plain):
            return Heading(Kind.PART, section)
    words = re.sub(r"[(),:/&-]", " ", plain).split()
    organs = [word for word in words if _ORGAN.fullmatch(word)]
    if organs and all(word in organs or _WITH_ORGAN.fullmatch(word) for word in words):
        return Heading(Kind.ORGAN, "findings")
    return None


def _described(plain: str) -> str | None:
    """Return impression or findings for a heading of one of these words and words such as
    "radiological".
    """
    words = re.sub(r"[][(),:/]", " ", plain).split() or [""]
    if words[0] in (
        "the",
        "and",
        "of",
        "on",
        "in",
        "for",
        "by",
        "with",
        "are",
        "as",
        "this",
        "these",
    ):
        return None  # the middle of a sentence
    if len(words) == 1 and words[0] in ("comment", "comments", "narrative"):
        return None
    if any(map(_IMPRESSION.fullmatch, words)):
        section = "impression"
        words = [word for word in words if not _FINDINGS.fullmatch(word)]
    elif any(map(_FINDINGS.fullmatch, words)):
        section = "findings"
    else:
        return None
    own = _IMPRESSION if section == "impression" else _FINDINGS
    is_qualified = all(own.fullmatch(word) or _QUALIFIER.fullmatch(word) for word in words)
    return section if is_qualified else None


def is_alias(plain: str, *, common: bool = False) -> bool:
    """Return whether a heading is listed word by word; with `common`, also that it means nothing
    else in a sentence.
    """
    return plain in _SECTION_OF and not (common and plain.replace(" ", "-") in _OWN_NAMES)


def may_stand_alone(plain: str) -> bool:
    """Return whether a heading is recognised without a colon."""
    if "report" in plain.split() and plain != "report":
        return False  # the title of a report
    words_of = known_heading(plain)
    is_described = words_of is not None and words_of.section in DESCRIPTIVE_SECTIONS
    return (plain in _SECTION_OF and plain.replace(" ", "-") not in _NEED_COLON) or is_described


def unlisted_heading(plain: str, name: str) -> str:
    """Return the section of a heading in capitals that is not known; `name` where it has none."""
    within = next((section for section in _SECTIONS_WITHIN if section in plain), None)
    return within or ("findings" if _EXAMINATION_NAME.search(plain) else name)


def section_name(header: str) -> str:
    """Return the section of a heading or a column (`REASON_FOR_EXAM`, `section_findings`), else
    the header itself.
    """
    plain = plain_heading(_CAMEL.sub(" ", header).replace(".", " ").replace("-", " "))
    for candidate in dict.fromkeys(
        (plain_heading(header), plain, _COLUMN_WORDS.sub("", _COLUMN_WORDS.sub("", plain)))
    ):
        heading = known_heading(candidate)
        if heading is not None and heading.kind in (Kind.SECTION, Kind.PART):
            return heading.section
    return header


def column_section(column: str) -> str:
    """Return the section that the texts of a column are stored as: `findings` for
    `section_findings`, else the column.

    Columns such as `report` or `description`, whose texts may be of any kind, keep their names.
    """
    return column if plain_heading(column).replace(" ", "-") in _OWN_NAMES else section_name(column)
