"""Phrases for the CheXpert findings, and cues of negation and uncertainty: the tables of `medvl.data.reports.labeler`.

Each entry is a regular expression for a lower-case sentence with single blanks. It begins and ends at a word boundary;
`*` after a letter matches the rest of the word, and `..` up to five words between two others (in `NORMAL`, any except
"not").
"""

Table = tuple[str, ...]

MENTIONS: dict[str, Table] = {
    "Atelectasis": (
        "atelecta*",
        "collapse of the .. (?:lobes?|lingula|segments?|base|(?:left|right) lung)",
        "(?:lobes?|lobar|lingular|segmental|base) collapse",
    ),
    "Cardiomegaly": (
        "cardiomegaly",
        "(?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour) .. (?:enlarg*|increased)",
        "(?:enlarge*|increased) .. (?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour)",
        "(?:heart|cardiac silhouette|cardiac size) .. (?:is|appears|remains|mildly|slightly|moderately) large",
        "borderline (?:enlarged )?(?:heart|cardiac)",
        "cardiac enlargement",
    ),
    "Consolidation": ("consolidat*",),
    "Edema": ("o?edema", "(?:vascular|pulmonary|venous) congestion", "(?:heart|cardiac) failure", "chf"),
    "Enlarged Cardiomediastinum": (
        "(?:cardio)?mediastin* .. (?:widen*|enlarg*|prominen*)",
        "(?:widen*|enlarg*|prominen*) .. (?:cardio)?mediastin*",
    ),
    "Fracture": ("fractur*",),
    "Lung Lesion": (
        "nodul*",
        "mass(?:es|-?like)?",
        "(?:lung|pulmonary|cavitary|metastatic) lesions?",
        "(?:neoplas*|carcinoma|tumou?rs?|metastas[ei]s)",
    ),
    "Lung Opacity": ("opaci*", "infiltrat*", "air ?space", "air-space"),
    "Pleural Effusion": ("(?<!pericardial )effusions?", "pleural fluid", "(?:hydro|hemo)(?:pneumo)?thorax"),
    "Pleural Other": (
        "pleural .. (?:thickening|scar*|plaques?|caps?|reaction|calcifications?)",
        "pleural-parenchymal scar*",
        "(?:thickening|scar*|calcification) of the .. pleura",
        "fibrothorax",
    ),
    "Pneumonia": ("(?:broncho)?pneumonias?", "(?<!granulomatous )infection", "infectious"),
    "Pneumothorax": ("(?:hydro|hemo)?pneumothora*",),
    "Support Devices": (
        "(?:tubes?|catheters?|drains?|cannula*)",
        "(?:picc|port-a-cath|portacath|mediport|swan-ganz)",
        "(?:central|jugular|subclavian|arterial|venous) .. lines?",
        "(?:pacemakers?|pacers?|pac(?:ing|er) (?:device|leads?|wires?)|icd|aicd|defibrillators?|stimulators?)",
        "(?:sternotomy|sternal|cerclage) .. wires?",
        "(?:stents?|prosthe*|hardware|lvad|balloon pump)",
    ),
}
"""Finding -> its phrases."""

NORMAL: dict[Table, Table] = {
    ("Cardiomegaly",): (
        "(?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour) .. "
        "(?<!limits )(?<!limits of )(?:normal|unremarkable)",
        "(?<!limits of )normal .. (?:heart|cardiac silhouette|cardiac size)",
    ),
    ("Enlarged Cardiomediastinum",): ("mediastin* .. (?:normal|unremarkable)", "normal .. mediastin*"),
    ("Cardiomegaly", "Enlarged Cardiomediastinum"): (
        "cardiomediastin* .. (?:normal|unremarkable)",
        "cardiac, mediastin* .. (?:normal|unremarkable)",
        "(?:cardiac|heart) .. mediastin* .. (?:normal|unremarkable)",
        "normal .. cardiomediastin*",
    ),
    ("Lung Opacity",): ("lungs .. clear", "clear lungs", "lungs? fields? .. clear", "lung* .. clear"),
    ("Pleural Effusion",): ("(?:costophrenic|cp) (?:angles?|sulci|sulcus) .. (?:sharp|clear)",),
    ("Fracture",): ("(?:osseous|bony|skeletal) .. intact", "bones? .. intact"),
}
"""Findings -> phrases for their absence that do not name them."""

PSEUDO_CUES: Table = (
    "(?:no|without|not) .. (?:changed?|progression|improvement|increase)(?: in| of)?",
    "no longer enlarging",
    "no prior",
    "to (?:suggest|indicate)",
)
"""Phrases that look like a cue but are none: "no change in", "no line to suggest"."""

NEGATIVE_BEFORE: Table = (
    "no", "not", "nor", "neither", "without", "negative for", "free of", "clear of",
    "(?:absence|resolution|removal|clearing) of", "resolved", "rather than",
)  # fmt: skip
"""Cues that negate the following phrases."""

NEGATIVE_AFTER: Table = (
    "(?:not|no longer) .. (?:seen|present|identified|visible|visualized|demonstrated|apparent|noted)",
    "(?:has|have|had) .. (?:resolved|cleared)",
    "(?:has|have) been removed",
    "(?:is|are) absent",
)
"""Cues that negate the preceding phrase."""

UNCERTAIN_BEFORE: Table = (
    "(?:may|might|could|would) .. (?:represent*|reflect*|be|indicate*|relate*)", "(?:may|might|could)",
    "(?:possible|possibly|possibility of|potential|potentially)", "(?:questionable|question of|equivocal)",
    "(?:probable|probably|likely)",
    "(?:suspicious|suspicion|suspected|suspect|concerning|concern|worrisome) (?:for|of)", "(?:suspected|suspect)",
    "suggest*", "(?:cannot|can not|not|difficult to|to) (?:entirely |completely |fully )?(?:exclude|rule out)",
    "(?:correlat*|evaluat*|assess*) .. for", "question",
)  # fmt: skip
"""Cues that make the following phrases uncertain."""

UNCERTAIN_AFTER: Table = (
    "(?:cannot|can not) be (?:entirely |completely |fully )?(?:excluded|ruled out)",
    "(?:is|are) not (?:entirely |completely |fully )?(?:excluded|ruled out)",
    "(?:is|are|be) difficult to (?:exclude|rule out)",
    "(?:is|are) (?:possible|questionable|suspected|likely|a possibility|a consideration)",
    "(?:should|could|may) be considered",
)
"""Cues that make the preceding phrase uncertain."""

UNCERTAIN_AROUND: Table = ("(?:versus|vs)",)
"""Cues that make phrases on both sides uncertain."""

CLAUSE_ENDS: Table = (
    "but", "however", "although", "though", "except", "aside from", "apart from", "other than",
    "and (?:there|the|a|an)", "with the exception of",
)  # fmt: skip
"""Words that end the scope of a cue, as semicolons and colons do."""

ITEM_OPENERS: Table = (
    "(?:and )?(?:there|the|a|an|with|again|stable|unchanged|persistent|new|residual)",
    "(?:and )?(?:tiny|small|mild|moderate|large|severe|minimal|trace|left|right|bilateral|bibasilar)",
)
"""Words that start a new clause after a comma, unless a later "or" or slash makes it a list."""
