"""Screen for identifiers in report texts: names, dates, numbers, addresses, places, ages over 89.

A screen for warnings, with misses and false alarms: it finds the forms in which people write identifiers (`Mr. Smith`,
`14-Mar-2015`), not the names themselves. Eponyms (`Kerley B`, `Swan-Ganz`), vertebrae, sizes and fractions are none.
All patterns have bounded repetitions, so that the time is linear in the length of the text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

CODES = frozenset({"cuis", "label_cuis", "localization_cuis", "masks", "prior", "generator", "kind"})
"""Extra fields of the converters that hold no free text."""

_MASK = re.compile(r"X{3,}|_{2,}")
_BETWEEN = r"[\s\-–]{1,3}"

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_MONTHS_IN_CAPITALS = (
    r"(?:Jan(?:uary)?|JAN(?:UARY)?|Feb(?:ruary)?|FEB(?:RUARY)?|Mar(?:ch)?|MAR(?:CH)?|Apr(?:il)?|APR(?:IL)?|May|MAY"
    r"|June?|JUNE?|July?|JULY?|Aug(?:ust)?|AUG(?:UST)?|Sept?(?:ember)?|SEPT?(?:EMBER)?|Oct(?:ober)?|OCT(?:OBER)?"
    r"|Nov(?:ember)?|NOV(?:EMBER)?|Dec(?:ember)?|DEC(?:EMBER)?)"
)
_DATES = (
    r"(?<![\d.])\b\d{1,2}(?P<between>[/.-])\d{1,2}(?P=between)(?:\d{4}|\d{2})(?!\.?\d)\b",  # 3/14/2015, 14.03.15
    r"\b\d{4}[/.-]\d{1,2}[/.-]\d{1,2}(?!\d)",  # 2015-03-14
    r"\b(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4,6})?\b",  # 20150314
    rf"(?i:\b{_MONTH}\.?,?[\s\-/]{{1,3}}\d{{1,2}}(?:st|nd|rd|th)?,?[\s\-/]{{1,3}}(?:\d{{4}}|'?\d{{2}})\b)",
    rf"(?i:\b{_DAY}(?:st|nd|rd|th)?(?:\s+of)?[\s\-/.]{{0,3}}{_MONTH}\.?,?[\s\-/]{{0,3}}(?:(?:19|20)\d{{2}}|'\d{{2}})\b)",
    rf"(?i:\b{_DAY}[\-/]{_MONTH}[\-/]\d{{2}}\b)",
    rf"(?i:\b{_MONTH}\.?,?(?:\s+of)?[\s\-/]{{1,3}}(?:(?:19|20)\d{{2}}|'\d{{2}})\b)",  # March 2015
    rf"\b{_MONTHS_IN_CAPITALS}\.?\s+{_DAY}(?:st|nd|rd|th)?\b(?!\s*(?:mm|cm|MM|CM|x\b|%))",  # March 14th
    rf"\b{_DAY}(?:st|nd|rd|th)?(?:\s+of)?[\s\-]+{_MONTHS_IN_CAPITALS}\b",  # 14th of March
    r"(?<![\d/.\w])(?:0?[1-9]|1[0-2])/(?:19|20)\d{2}\b",  # 03/2015
    r"(?<![\d/.\w])(?:0?[1-9]|1[0-2])/(?:1[3-9]|2\d|3[01])(?![\d/.%]|\s*(?:inch|in\b|\"))",  # 3/14
    r"(?<![\d/.\w])(?:0[1-9]/[0-3]\d|[01]\d/0[1-9])(?![\d/%])",  # 03/04
    r"(?i:\b(?:on|since|dated|from|until)\s+\d{1,2}[/-]\d{1,2}(?![\d/.%-])(?!\s*(?:mm|cm|of|views?|images?|lobes?|ribs?)\b))",
)
_PHONES = (
    r"(?<![\w-])(?:\+?1[ .-]?)?(?:\(\d{3}\)\s{0,2}|\d{3}[ .-])\d{3}[ .-]\d{4}\b",
    r"(?<!\w)\+\d{1,3}(?:[ .-]?\(?\d{1,4}\)?){2,5}\b",
    r"(?<![\w-])0\d{2,4}[ -]\d{3,4}[ -]?\d{3,4}\b",
    r"(?<![\w.-])[2-9]\d{2}-\d{4}(?![\w-])",
    r"(?i:\b(?:pager|beeper|bleep|tel|telephone|phone|fax|mobile|cell|ext|extension)\b\.?(?:\s*(?:no|number|id))?[\s:.#]{0,4}"
    r"\d[\d .-]{2,15}\d)",
    r"(?<![\w.]\s)(?<![\w.])x\d{4,5}\b",
)
_IDS = r"(?=[\w-]{0,20}\d)[\w-]{3,30}"
_NUMBERS = (
    r"(?<![\w-])\d{3}[- ]\d{2}[- ]\d{4}(?![\w-])",  # SSN
    r"(?i:\b(?:MRN|medical record|med rec|accession|account|acct|CSN|DEA|NPI|serial|S/?N:?|VIN|passport|chart|SSN"
    r"|social security|hosp|acc|policy|license|licence|encounter|NHS|hospital|unit record|member|insurance|specimen|UID"
    r"|barcode|MR#)"
    rf"(?:\s{{1,3}}(?:number|num|no|nr|id|ID))?[\s:.#=]{{0,4}}(?=[\w-]{{0,20}}\d\d){_IDS})",
    r"(?i:\b(?:record|patient|pt|study|exam|case|order|visit|device|lot|ref|reference|film|x-?ray|request|file|id)"
    rf"\s{{0,3}}(?:(?:number|num|no|nr|id)\b[\s:.#=]{{0,4}}|#[\s:]{{0,3}}|:\s{{0,3}})(?=[\w-]{{0,20}}\d\d\d){_IDS})",
    r"(?<![\w.])\d{1,10}(?:\.\d{1,25}){5,}",  # UID
    r"(?<![\w.])\d{6,}(?!\w|\.\d)",
    r"\b[A-Z]{1,4}-?\d{5,12}\b",
    r"\b[A-Z]{1,4}-?\d{2,4}-\d{3,10}\b",
)
_AGE = (
    r"(?i:(?<![\d.])(?:9\d|1[01]\d)[\s-]{0,2}(?:years?|yrs?|y)[\s./-]{0,2}(?:old|o\b|of age))",
    r"(?i:\b(?:age|aged)(?:\s+of)?[\s:]{0,3}(?:9\d|1[01]\d)\b)",
    r"(?<![\d.])(?:9\d|10\d)\s?(?:[MF]|yo|YO|y/o)\b(?!\s*(?:Hz|r))",
    r"(?i:\bninety(?:[ -]\w{3,5})?[ -](?:years?|yrs?)\b)",
)
_NAME = r"(?!The\b|THE\b)[A-Z][\w'’-]{1,30}"
_TITLE = r"(?!The\b)[A-Z][a-z'’-]{1,30}"
_DOCTORS = (
    rf"\b(?:Drs?|DRS?|dr|Doctor|doctor|Prof|Professor)\b(?:\.\s{{0,3}}|\s{{1,3}})(?:[A-Z]\.?\s{{1,2}})?{_NAME}",
)
_CREDENTIALS = r"(?:M\.?D\.?|D\.?O\.?|Ph\.?D\.?|MBBS|MBBCh|FRCR|FRCPC|FACR|R\.?N\.?|PA-C|NP|APRN|CRNP|RT)"
_NOT_NAMES = (
    r"(?!(?:Chest|CHEST|Abdomen|ABDOMEN|Ordering|Referring|Attending|Reading|Requesting|Primary|ORDERING|REFERRING|ATTENDING"
    r"|The|THE|Treating|Covering|Responsible)\b)"
)
_TEAMS = (
    r"(?!\w{2,30}\s{1,2}(?:Department|Team|Radiolog|Medicine|Service|Surg|Unit|Room|Cent|Care|Physician|Staff|Nurs)|Radiolog|Chest"
    r"|Clinical|Interventional|Emergency|Primary|Nursing|Surgery|Medicine|History|Prior|Patient)"
)
_ROLES = (
    r"(?:nurse|resident|intern|technologist|attending|radiologist|physician|surgeon|clinician|practitioner|oncologist"
    r"|cardiologist)"
)
_NAMES = (
    rf"\b(?:Mr|Mrs|MRS|Ms|Miss|Mx|Herr|Frau|Mme|Senor|Señora?)\b(?:\.\s{{0,3}}|\s{{1,3}})(?:[A-Z]\.?\s{{1,2}})?{_NAME}",
    r"\bMR\.\s{1,3}[A-Z][\w'’-]{1,30}",
    r"\b[A-Z][\w'-]{1,30}\^[A-Z][\w'-]{0,30}",  # SMITH^JOHN
    rf"\b{_NOT_NAMES}{_NAME}(?:\s{{1,2}}[A-Z]\.?)?(?:\s{{1,2}}{_NAME}){{0,2}},\s{{0,3}}{_CREDENTIALS}(?![\w])",
    rf"\b{_NOT_NAMES}{_TITLE}\s{{1,2}}(?:[A-Z]\.?\s{{1,2}})?{_NOT_NAMES}{_TITLE}\s{{1,2}}{_CREDENTIALS}(?![\w])",
    r"(?i:\b(?:dictated|transcribed|signed|read|reported|interpreted|verified|approved|authenticated|typed|attending|radiologist"
    r"|resident|technologist|physician|name|author|reader|signature|provider|initials|tech)"
    r"(?:\s{1,3}(?:by|physician|radiologist|of record|name))?"
    r"\s{0,2}:\s{0,3}[A-Za-z])",
    r"(?<!\w)/[Ss]/\s{0,3}[A-Z]",
    r"\b[Pp]t\s{0,2}:\s{0,3}[A-Z][a-z]",
    r"(?i:\b[a-z'-]{2,30}\s{1,2}[a-z'-]{2,30},\s{0,2}M\.?D\b)",
    rf"\b{_NOT_NAMES}(?!NOTIFIED|CALL)[A-Z]{{2,30}}\s{{1,2}}{_NOT_NAMES}[A-Z]{{2,30}}\s{{1,2}}M\.?D\b",
    r"(?im:^\s{0,10}cc\s{0,2}:\s{0,3}[A-Za-z])",
    rf"(?:[Dd]ictated|[Tt]ranscribed|[Ss]igned|[Rr]ead|[Rr]eported|[Ii]nterpreted|[Rr]eviewed|[Vv]erified|[Aa]pproved|[Tt]yped"
    rf"|[Pp]erformed|[Oo]rdered|[Rr]equested|[Rr]eferred|[Aa]uthenticated|[Dd]iscussed|[Cc]ommunicated|[Cc]onveyed|[Tt]elephoned"
    rf"|[Rr]elayed|[Ss]poke|[Cc]alled|[Nn]otified)\s{{1,3}}(?:in person\s{{1,2}}|electronically\s{{1,2}})?"
    r"(?:(?:by|with|to)\s{1,3})"
    rf"(?:(?:[A-Z]\.\s{{0,2}}){{1,2}}{_TITLE}|{_NOT_NAMES}{_TEAMS}{_TITLE}\s{{1,2}}(?:[A-Z]\.?\s{{1,2}})?{_TITLE})",
    rf"(?:[Ss]een|[Rr]eviewed|[Ii]nterpreted|[Rr]ead|[Rr]eported|[Aa]pproved|[Vv]erified)\s{{1,2}}by\s{{1,2}}{_TEAMS}{_TITLE}",
    r"(?:(?:[Dd]ictated|[Tt]ranscribed|[Ss]igned|[Tt]yped)\s{1,2}by\s{1,2}[A-Z][\w'’-]{1,30})",
    rf"\b{_ROLES}\s{{1,2}}(?!Radiolog|Physician|Surgeon|Nurse|(?:Drs?|Mrs?|Ms)\b){_TITLE}(?:\s{{1,2}}{_TITLE})?",
    rf"\b(?:RN|NP)\s{{1,2}}{_TITLE}",
    rf"\b(?:[Pp]atient|[Pp]t)\.?,?\s{{1,2}}(?:name\s{{1,2}}is\s{{1,2}})?{_TITLE}\s{{1,2}}{_TITLE}",
    rf"\b(?:wife|husband|mother|father|daughter|son|sister|brother|spouse|partner),?\s{{1,2}}(?:named\s{{1,2}})?{_TITLE}",
    r"(?m:^\s{0,10}(?!(?:Chest|CHEST|Abdomen|Portable|Upright|Frontal|Ribs?)\b)[A-Z][A-Za-z'’-]{1,30},\s{1,2}[A-Z][A-Za-z'’-]{1,30}"
    r"(?:\s{1,2}[A-Z]\.?)?\s{0,3}$)",  # Smith, John
    r"(?<![\w/])(?!PA|AP|LL|RL|LAT)[A-Z]{2,3}[/:][a-zA-Z]{2,3}\s{0,3}\Z",  # JS/ab
)
_ROAD = (
    r"(?:Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|Lane|Ln|Drive|Dr|Court|Ct|Way|Place|Pl|Square|Sq|Terrace|Highway|Hwy|Parkway"
    r"|Pkwy|Circle|STREET|AVENUE|ROAD|DRIVE|LANE|BOULEVARD|Close|Crescent)"
)
_ADDRESSES = (
    rf"\b\d{{1,5}}[A-Za-z]?,?\s{{1,2}}(?:[NSEW]\.?\s{{1,2}})?(?:[A-Z0-9][\w'’-]{{0,30}}\.?\s{{1,2}}){{1,3}}{_ROAD}\b",
    r"(?i:\bP\.?\s?O\.?\s{0,2}Box\s{1,2}\d+)",
    r"(?i:\b(?:apt|apartment|suite|ste)\b\.?\s{0,2}#?\s{0,1}\d{1,5}[A-Z]?\b)",
    r"\b[A-Z]{2},?\s{1,2}\d{5}(?:-\d{4})?\b",
    r"\b\d{5}-\d{4}\b",
    r"(?i:\b(?:zip|zip ?code|postcode|postal code)[\s:]{0,3}(?=\w{0,3}\d)[\w-]{4,10})",
    r"\b[A-Z]{1,2}\d[A-Z\d]?\s\d[ABD-HJLNP-UW-Z]{2}\b",
    rf"(?i:\b(?:lives|living|resides|residing|resident)\s(?:in|at|of))\s{_TITLE}",
)
_PLACE_END = (
    r"(?:Hospital|HOSPITAL|Medical Cent(?:er|re)|MEDICAL CENTER|Infirmary|Health Cent(?:er|re)|Healthcare|Health System"
    r"|Nursing Home|Hospice|Clinic|Rehabilitation Cent(?:er|re)|Surgery Center|Imaging Center|Radiology Associates)"
)
_PLACES = (
    rf"\b(?!(?:The|This|Our|Outside|Local|In|At|Same|Another|Previous|Prior)\s{{1,2}}{_PLACE_END})(?:[A-Z][\w'’.&-]{{1,30}}\s{{1,2}}"
    rf"(?:of\s{{1,2}})?){{1,4}}{_PLACE_END}\b",
    r"(?i:\b(?:ward|room|rm|floor|bed|bay)\b[\s.:#]{0,3}(?:number|no\.)?\s{0,2}(?=[A-Z]?-?\d)[A-Z]?-?\d{1,5}[A-Z]?\b(?!\s*(?:cm|mm)))",
    rf"(?i:\b(?:transferred|referred|admitted)\s(?:from|to))\s{_TITLE}(?=\s{_TITLE}|[.,])",
    rf"\b(?:{_TITLE}\s{{1,2}}){{1,2}}(?:Ward|Pavilion|Wing|Unit)\b",
    r"\b(?:Ward|Pavilion|Wing)\s{1,2}[A-Z][a-z]{2,30}\b",
    r"\bUniversity of [A-Z][a-z]{1,30}\b",
)
_EMAILS = (r"\b[\w.+-]{1,64}@[\w-]{1,64}\.\w",)
_URLS = (r"(?i:\b(?:https?://|ftp://|www\.)[^\s]{1,300})", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")

_SCREENS = {
    kind: re.compile("|".join(patterns))
    for kind, patterns in {
        "email": _EMAILS,
        "url": _URLS,
        "date": _DATES,
        "phone": _PHONES,
        "age": _AGE,
        "number": _NUMBERS,
        "doctor": _DOCTORS,
        "name": _NAMES,
        "place": _PLACES,
        "address": _ADDRESSES,
    }.items()
}


def find_identifiers(text: str) -> dict[str, int]:
    """Count likely identifiers in a text by kind.

    Kinds: email, url (also IP addresses), date (more precise than a year), phone, age (above 89), number (of a record,
    an account, a device), doctor, name, place (hospital, ward, room) and address. Masks (`___`, `XXXX`) are not
    counted. Kinds that do not occur are absent, and the text itself is never returned.
    """
    text = _MASK.sub("___", text)
    counts: dict[str, int] = {}
    for kind, pattern in _SCREENS.items():
        text, count = pattern.subn(" ", text)  # do not count a match again as another kind
        if count:
            counts[kind] = count
    return counts


def free_texts(value: object) -> Iterator[str]:
    """Yield the texts and whole numbers in the extra fields of a sample that may have identifiers.

    Fields of medvl's own converters with codes (`CODES`) are left out: hashes, concept ids and masks look like numbers
    of records.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in CODES:
                yield from free_texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from free_texts(part)
