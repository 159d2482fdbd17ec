"""Phrases for the CheXpert findings, and normal findings: tables of `medvl.data.reports.labeler`.

Each entry is a regular expression for a lower-case sentence with single blanks. It begins and ends
at a word boundary; `*` after a letter matches the rest of the word, and `..` up to five words
between two others (in `NORMAL`, any except "not").
"""

import dataclasses
from typing import Literal

from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

# Cues of negation and doubt for `medvl.data.reports.labeler`, by kind, and the words that end
# their scope.
#
# Each entry is a regular expression for a lower-case sentence with single blanks. It begins and
# ends at a word boundary (unless it begins with a backslash); `*` after a letter matches the rest
# of the word, `..` up to five words, and `~` up to four `QUALIFIERS`.

Table = tuple[str, ...]
Kind = Literal["plain", "borderline", "probable", "alternative", "other alternative"]

QUALIFIERS = (
    r"\w{1,20}ly|a|the|its|any|be|been|in|of|size|evidence|sign|significant|interval|acute"
    r"|appreciable|substantial|definite|further|overall|complete|full|near|new|yet|large|focal"
    r"|convincing|radiographic|clear|for|to|obvious|visible|gross|marked|major|noticeable"
    r"|discernible|detectable|measurable|meaningful|important|recent|possible"
)
"""Words that qualify a cue without being its object."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CueTable:
    """Cues with the same effect on the phrases in their scope."""

    value: int | None
    """1 positive, 0 negative, -1 uncertain; None if the phrases do not describe the image."""
    side: Literal["before", "after", "either", "between"]
    """Where the cue is: before its phrases, after them, before them if a phrase follows and else
    after them, or between two of them.
    """
    entries: Table
    yields: bool = False
    """Whether a negation that reaches the cue applies instead: "no opacity suspicious for
    pneumonia".
    """
    after_events: bool = False
    """Whether `EVENTS` end its scope: "pneumothorax | after chest tube removal"."""
    kind: Kind = "plain"
    """Kind of doubt, which `Conventions` of the labeler may count as present."""


_PROBABLY = "probably|likely|presumabl[ey]|presumed"
_PERHAPS = f"maybe|possibly|potential(?:ly)?|perhaps|{_PROBABLY}"
_REMOVED = "resolved|cleared|disappeared|vanished|removed|gone|excluded|ruled[ -]out|r/o'?d|absent"
SEEN = (
    "(?:seen|present|identified|visible|visuali[sz]ed|demonstrated|apparent|noted|appreciated"
    "|evident|detected|found|observed|shown|recogni[sz]ed)"
)
NEGATIVE_OF = (
    "(?:(?:absence|resolution|removal|clearing|exclusion|lack|free|clear|cleared|devoid) of"
    "|neg(?:ative)?\\.? for)"
)
"""Words with an object that make it negative."""

PSEUDO_CUES: Table = (
    "(?:no|not|without|(?:lack|absence) of) ~ (?:chang*|progress*|improv*|worse*|decreas*|grow*)",
    "(?:no|not|without) ~ (?:better|different|larger|bigger|smaller)",
    "(?:no|without) ~ (?:increase|growth|displacement|resolution|clearing|enlargement(?! of the "
    "(?:heart|cardiac)))",
    "(?:no|without) ~ "
    "(?:reduc*|regress*|alter*|differen*|deteriorat*|extension|expansion|evolution|response)",
    "(?:no|without) ~ (?:migrat*|kink*|dislodg*|malposition*|retract*|complications? "
    "(?:of|from|with))",
    "(?:fail*|yet|continue* not) to (?:resolve|clear|improve|change|respond|decrease)",
    "never (?:resolved|cleared)", "not ~ (?:without|absent|gone|(?:free|clear) of)",
    "nothing (?:more|less|other) than",
    "not ~ (?:increas*|enlarging|resolv*|clear(?:ed|ing)|disappear*)",
    "no longer (?:enlarging|growing|worsening)", "(?:no|not) (?:more|less|greater) than",
    "(?:no|without) doubt", "not (?:only|as|just|merely)", "no prior",
    f"not (?:well|clearly|fully|optimally|adequately) (?:{SEEN}|evaluated|assessed|defined|imaged)",
    f"not ~ {SEEN} (?:previously|before|(?:on|in) .. (?:prior|previous|earlier))",
    f"(?:,|which (?:is|are|was|were)) not ~ {SEEN} (?:on|in) the (?:lateral|frontal|other|ap|pa)",
    "(?:nearly|almost|largely|mostly|partly|partially|incompletely) ~ (?:resolved|cleared|clear)",
    "(?:near|nearly|almost|near-complete|partial|incomplete|slow|some|ongoing) ~ "
    "(?:resolution|clearing)",
    "(?:document(?:ing)?|ensure|confirm(?:ing)?|verify|monitor|follow*|until|for|to|show) ~ "
    "(?:resolution|clearing)",
)  # fmt: skip
"""Phrases that resemble a cue without being one: "no change in the effusion", "nearly resolved"."""

_NONE = f"(?:(?:none|nil|no evidence)(?: {SEEN})?|not {SEEN}|no|neg(?:ative)?|{_REMOVED}|n/a|nad)"
_VALUE_END = (
    r"(?= *(?:[.,;)\]|/]|[-\u2013\u2014] |\.\.|$)| (?:[\w/]+ ){0,2}[\w/]+ ?[:=]"
    r"| (?:on|in|at) (?:the |either )?(?:left|right|both|either)?(?: sides?)? *(?:[.;]|$))"
)
"""Behind a value in a template: "effusion: no | pneumothorax: yes"."""
_MARK = r"(?:[:;=?|(\[]|\.{2,}|[,\u2026\u2013\u2014]|-+)"

CUES: tuple[CueTable, ...] = (
    CueTable(
        value=NEGATIVE,
        side="after",
        entries=(
            rf"\b ?{_MARK} ?(?:-+ )?(?:(?:now|there (?:is|are)) )?{_NONE}{_VALUE_END}",
            rf"\b ?[:=(|] ?(?:n|0|false){_VALUE_END}", rf"\b ?{_MARK}? ?-ve{_VALUE_END}",
            rf"\b (?:(?:none|nil)(?: {SEEN})?|neg(?:ative)?){_VALUE_END}",
            r"\b no(?= *(?:[.,;)]|$))", r"\b-free\b",
        ),
    ),
    CueTable(
        value=POSITIVE,
        side="after",
        entries=(
            rf"\b ?{_MARK} ?(?:yes|y|1|true|present|pos(?:itive)?|\+(?:ve)?){_VALUE_END}",
        ),
    ),
    CueTable(
        value=UNCERTAIN,
        side="between",
        kind="alternative",
        entries=("(?:versus|vs)",
        "(?:(?:is|are) )?(?:felt )?(?:to be )?(?:favou?red over|more likely than)"),
    ),
    CueTable(
        value=UNCERTAIN,
        side="after",
        entries=(
            "(?:can ?not|can't|could not) ~ (?:excluded|ruled out|assessed|evaluated|determined)",
            "not ~ (?:excluded|ruled out|assessed|evaluated|favou?red|likely)",
            rf"\b ?{_MARK} "
            rf"?(?:indeterminate|uncertain|unclear|unknown|maybe|perhaps|possibly){_VALUE_END}",
            r"\b(?: ?[:=(\[] ?)?\?|\b \?(?= *(?:[.,;)]|$))",
            "(?:should|could|may|might) be (?:considered|present|missed|obscured)",
            "a (?:possibility|consideration)", "in the differential", "less likely than",
            "(?:could|may|might|would) (?:explain|account for)", ", if (?:any|present)",
        ),
    ),
    CueTable(
        value=NEGATIVE,
        side="after",
        entries=(
            rf"(?:not|no longer|never) ~ (?:\w+ )?{SEEN}", "now ~ clear",
            "(?:not|no longer) ~ suspected",
            f"(?:is|are|was|were|now|since|can be|has|have|had) ~ (?:{_REMOVED})",
            "(?:is|are|was|were) ~ (?:negative|nil|none)",
        ),
    ),
    CueTable(value=NEGATIVE, side="after", after_events=True,
    entries=("(?<!high-)(?:removal|resolution)(?! of)",)), CueTable(
        value=UNCERTAIN,
        side="before",
        entries=(
            "(?:may|might|could|would) .. (?:represent*|reflect*|be|indicate*|relate*)",
            "(?:may|might|could)", "(?:im|not )possible to (?:exclude|rule out)", "c/f", "ddx",
            "(?:cannot|can not|can't|could not|not|unable to) ~ (?:exclude|rule out)",
            "(?:rule|ruling) out", "r/o(?!')",
            "(?:possibility|question) of", "(?:question|query)", r"equiv(?:ocal)?\.?",
            "symptoms of", "either", r"\B\?+", r"\bsusp\.?(?= )",
            "(?:correlat*|evaluat*|assess*) .. for",
            "consider(?! (?:ct|chest|follow|further|repeat))",
            "(?:differential|considerations?) (?:diagnosis |considerations? )?(?:would "
            ")?(?:includes?|is)", f"(?:{_PERHAPS}) "
                                  f"(?:due|related|secondary|from|an?|represent*|reflect*"
                                  f"|positional|projectional|technical*)",
        ),
    ),
    CueTable(value=UNCERTAIN, side="before", kind="borderline", entries=("borderline",)),
    CueTable(
        value=UNCERTAIN,
        side="before",
        yields=True,
        entries=(
            "(?:suspicious|suspicion|worrisome) (?:for|of)",
            "concern(?:ing|s)? (?:is |was )?(?:for|of)", "suggest(?:s|ing|ive|ion)?",
        ),
    ),
    CueTable(value=NEGATIVE, side="before", entries=("(?:no|without) ~ suspected",)),
    CueTable(
        value=UNCERTAIN,
        side="either",
        entries=(
            "(?:possible|poss|less "
            "likely|unlikely|conceivable|suspected|questioned|doubtful|equivocal)",
            "(?:difficult|hard) to ~ (?:exclude|rule out)",
            "in the (?:appropriate|proper|correct|right) clinical (?:setting|context),?",
            "if (?:any|present)",
        ),
    ),
    CueTable(
        value=UNCERTAIN,
        side="either",
        kind="probable",
        entries=("(?:probab(?:le|ly)|prob|likely|presumabl[ey]|favou?red)",),
    ),
    CueTable(
        value=UNCERTAIN,
        side="before",
        kind="probable",
        entries=(f"(?:{_PROBABLY}|favou?r(?:s|ing)?)",),
    ),
    CueTable(
        value=UNCERTAIN,
        side="before",
        entries=(f"(?:{_PERHAPS}|questionabl[ey]|suspect|doubt)", "(?:exclude|to ~ rule out)"),
    ),
    CueTable(value=NEGATIVE, side="either", entries=(f"(?:{_REMOVED})",)),
    CueTable(
        value=POSITIVE,
        side="before",
        entries=("pos(?:itive)?\\.? for", r"\B\(?\+\)?ve(?: for)?\b"),
    ),
    CueTable(
        value=NEGATIVE,
        side="before",
        entries=(
            r"\B\(?-\)?ve(?: for)?\b", r"\Ave(?: for)?\b", "neg(?:ative)?(?= \\w+[.,;]?$)",
            "(?:no|not|nor|neither|without|w/o|w/out|never|nothing|nil|zero|sans|\u00f8)",
            NEGATIVE_OF, "(?:free|clear|cleared) from", "(?:pertinent )?negatives",
            "(?:rather than|instead of|as opposed to)", "excludes",
            "fail* to (?:show|demonstrate|reveal)", "(?:denie[sd]|deny(?:ing)?)",
        ),
    ),
    CueTable(
        value=None,
        side="before",
        entries=(
            "history of", "h/o", "(?:treatment|treated|therapy) (?:for|of)",
            "(?:prior|previous|old|remote|healed|sequela* of)(?= (?:\\w+ ){0,2}infecti)",
            "(?:(?:consistent|compatible) with|due to|from|(?:related|secondary) to|sequela* of) "
            "(?:an? )?(?:prior|previous|old|remote|healed)(?= (?:\\w+ ){0,3}pneumonia)",
        ),
    ),
)  # fmt: skip
"""Cues in the order in which they are matched; words of one match are not matched again."""

CLAUSE_ENDS: Table = (
    "but", "however", "although", "though", "while", "whereas", "except(?:ing)?",
    "aside from", "apart from", "other than", "with the exception of",
    "albeit", "nevertheless", "nonetheless", "besides", "beyond",
    "barring", "save(?: for)?",
    "yet(?! to)", r"(?<=\w )there(?= (?:is|are|was|were|has|have)\b)",
)  # fmt: skip
"""Words that end the scope of every cue, as semicolons, colons and parentheses do."""

_SIZES = "tiny|small|mild|moderate|large|severe|minimal|trace|mildly|moderately|severely"
_CHANGES = "worsen(?:ing|ed)|increas(?:ing|ed)|improv(?:ing|ed)"
CLAUSE_OPENERS: Table = (
    "(?:there|the|a|an|with|again|still|only|just|instead|stable|unchanged|persistent|new|residual"
    "|interval|placement|insertion)",
    f"(?:{_SIZES}|left|right|bilateral|bibasilar|[lr][uml]l|patchy|streaky|{_CHANGES})",
)
"""Words that open a clause after a comma, unless an "or" makes it a list."""

EXTENTS = f"{_SIZES}|{_CHANGES}|stable|unchanged|persistent|new|residual"
"""Words before the side of a finding that is there."""

AND_OPENERS: Table = (
    "(?:there|the|a|an|with|stable|unchanged|persistent|new|placement)",
    f"(?:{_SIZES})",
)
"""Words that open a clause after "and"; those of the second entry only if a finding is named
before it.
"""

PREDICATE_ENDS: Table = (
    "(?:in|at|on|by|given|and|or|but|with|within|than|as|here|clinically|based|from|for|present"
    "|this|although|because)",
)
"""Words after a predicate such as "possible"; before other words it belongs to a noun."""

PREDICATES: Table = (
    f"(?:is|are|was|were)(?! {SEEN})", f"not {SEEN}", f"(?:{_REMOVED})",
    "(?:has|have|had|remains?|persists?|appears?|shows?|can|cannot|may|might|could|should|unlikely"
    "|possible|suspected)",
)  # fmt: skip
"""Words that make a clause of a part of a sentence, after a comma or "and" in a sentence that
has some already.
"""

PERSISTENCE: Table = (
    "(?:persists?|remains?)", "(?:has|have) ~ (?:increased|worsened|progressed|developed)",
    "(?:is|are) ~ (?:unchanged|stable|increased|worse|persistent)",
)  # fmt: skip
"""Predicates of a finding, and not of its removal: "resolution of edema and | atelectasis
persists".
"""

LINKS: Table = (
    "(?:represent*|reflect*|suggest*|indicat*|consistent|compatible|concerning|suspicious|due)",
)
"""Words between a sign and its explanation: a doubt behind them is about the explanation."""

EVENTS: Table = ("after", "following(?!:| findings)", "status post", "s/p")
"""Words before an event such as the removal of a tube."""

SCOPE_ENDS: Table = (
    *EVENTS, "in addition to", "superimposed (?:up)?on", "(?:adjacent|next) to",
    "(?<!consistent )(?<!compatible )(?<!associated )(?<!keeping )with", "despite", "given",
    "in (?:a|this|the) (?:patient|setting|context|presence)", "on a background of", "in place",
)  # fmt: skip
"""Words that end the scope of a negation: "no effusion with an enlarged heart"."""


CONGESTION = "(?:vascular|pulmonary|venous) congestion"
HEART_FAILURE = "(?:(?:heart|cardiac) failure|chf)"
INFECTION = "infecti(?:on|ous)"
PNEUMONITIS = "pneumonitis"
"""Words near those of a finding, which conventions count in different ways."""

MENTIONS: dict[str, Table] = {
    "Atelectasis": (
        "atelecta*",
        "collapse of .. (?:lobes?|lingula|segments?|base|(?:left|right) lung)",
        "(?:lobes?|lobar|lingular|segmental|base|(?:left|right) lung) collapse",
        "collapsed .. (?:lobes?|lingula|segments?|(?:left|right) lung)",
        "(?:lobes?|lingula|segments?|(?:left|right) lung) (?:is|are|remains?|appears?) .. "
        "collapsed",
    ),
    "Cardiomegaly": (
        "cardiomegaly",
        "(?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour) .. "
        "(?:enlarg*|increased)",
        "(?:heart|cardiac silhouette) (?:is|appears|remains) (?:mildly |slightly )?prominent",
        "increase in (?:heart|cardiac) size",
        "(?:enlarge*|increased) .. (?:heart|cardiac silhouette|cardiac size|cardiac "
        "shadow|cardiac contour)",
        "(?:heart|cardiac silhouette|cardiac size) .. "
        "(?:is|appears|remains|mildly|slightly|moderately) large",
        "borderline (?:enlarged )?(?:heart|cardiac)(?: enlargement)?",
        "(?:heart|cardiac silhouette|cardiac size) .. borderline(?: (?:enlarged|large|prominent))?",
        "cardiac enlargement",
        "(?:heart|cardiac silhouette)(?: size)? ?(?:[:=(]|[-\u2013\u2014]) ?"
        "(?:mildly |moderately )?(?:large|prominent)",
    ),
    "Consolidation": ("consolidat*",),
    "Edema": (
        "(?<!tissue )(?<!subcutaneous )(?<!wall )o?edema",
        HEART_FAILURE,
    ),
    "Enlarged Cardiomediastinum": (
        "(?:cardio)?mediastin* .. (?:widen*|enlarg*|prominen*)",
        "(?:widen*|enlarg*|prominen*) .. (?:cardio)?mediastin*",
    ),
    "Fracture": ("fractur*", "fx"),
    "Lung Lesion": (
        "nodul*",
        "mass(?:es|-?like|(?! effect))",
        "(?:lung|pulmonary|cavitary|metastatic) lesions?",
        "(?:neoplas*|carcinoma|tumou?rs?|metastas[ei]s)",
    ),
    "Lung Opacity": (
        "opaci*",
        "infiltrat*",
        "air ?space",
        "air-space",
        "(?:hazy|patchy|ill-defined|increased|confluent|ground[- ]glass) (?:parenchymal |lung "
        ")?densit*",
    ),
    "Pleural Effusion": (
        "(?<!pericardial )effusions?",
        "pleural fluid",
        "fluid in the .. pleural space",
        "(?:hydro|hemo)(?:pneumo)?thorax",
    ),
    "Pleural Other": (
        "pleural .. (?:thickening|scar*|plaques?|caps?|reaction|calcifications?)",
        "pleural-parenchymal scar*",
        "(?:thickening|scar*|calcification) of the .. pleura",
        "fibrothorax",
    ),
    "Pneumonia": (
        "(?:broncho)?pneumonias?",
        "pna",
        f"(?<!granulomatous ){INFECTION}",
        f"(?<!radiation )(?<!aspiration ){PNEUMONITIS}",
    ),
    "Pneumothorax": ("(?:hydro|hemo)?pneumothora*", "ptx"),
    "Support Devices": (
        "(?:tubes?|catheters?|drains?|cannula*|pigtails?|ett|ngt|ogt|tracheostomy|dob(?:b|)hoff"
        "|introducer|sheath)",
        "(?:picc|port-a-cath|portacath|mediport|ports?|swan-ganz|hickman|broviac|permacath"
        "|vas-?cath|quinton)",
        "(?:central|jugular|ij|subclavian|femoral|arterial|venous|dialysis) .. lines?",
        "(?:pacemakers?|pacers?|pac(?:ing|er) "
        "(?:device|leads?|wires?)|icd|aicd|defibrillators?|stimulators?)",
        "(?:sternotomy|sternal|cerclage) .. wires?",
        "(?:stents?|prosthe*|hardware|lvad|impella|ecmo|iabp|balloon pump|valve "
        "replacement|(?:vp )?shunt catheter)",
    ),
}
"""Finding -> its phrases."""

SIGNS: dict[str, Table] = {
    "Edema": (CONGESTION,),
    "Pleural Effusion": (
        "blunt(?:ed|ing of) .. (?:costophrenic|cp) (?:angles?|sulc(?:i|us))",
        "(?:costophrenic|cp) (?:angles?|sulc(?:i|us)) .. blunt(?:ed|ing)",
    ),
}
"""Finding -> its signs, which count where the sentence does not name the finding."""

NORMAL: dict[Table, Table] = {
    ("Cardiomegaly",): (
        "(?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour) .. "
        "(?<!limits )(?<!limits of )(?<!top )(?<!upper )(?:normal|unremarkable)",
        "(?<!limits of )normal .. (?:heart|cardiac silhouette|cardiac size)",
        "unremarkable (?:heart|cardiac silhouette|cardiac size)",
        "(?:heart|cardiac silhouette|cardiac size) .. (?:wnl|nonenlarged)",
        "nonenlarged (?:heart|cardiac silhouette)",
    ),
    ("Enlarged Cardiomediastinum",): (
        "mediastin* .. (?:normal|unremarkable)",
        "normal .. mediastin*",
        "unremarkable mediastin*",
    ),
    ("Cardiomegaly", "Enlarged Cardiomediastinum"): (
        "cardiomediastin* .. (?:normal|unremarkable)",
        "cardiac, mediastin* .. (?:normal|unremarkable)",
        "heart ?/ ?mediastin* .. (?:normal|unremarkable)",
        "(?:cardiac|heart) .. mediastin* .. (?:normal|unremarkable)",
        "normal .. cardiomediastin*",
        "unremarkable cardiomediastin*",
    ),
    ("Lung Opacity",): ("clear lungs", "lung* .. clear(?! of)"),
    ("Pleural Effusion",): ("(?:costophrenic|cp) (?:angles?|sulci|sulcus) .. (?:sharp|clear)",),
    ("Support Devices",): ("extubated",),
    ("Fracture",): ("(?:osseous|bony|skeletal) .. intact", "bones? .. intact"),
}
"""Findings -> phrases for their absence that do not name them."""
