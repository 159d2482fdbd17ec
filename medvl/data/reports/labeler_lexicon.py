"""Phrases for the CheXpert findings, and normal findings: tables of `medvl.data.reports.labeler`.

Each entry is a regular expression for a lower-case sentence with single blanks. It begins and ends at a word boundary;
`*` after a letter matches the rest of the word, and `..` up to five words between two others (in `NORMAL`, any except
"not").
"""

from medvl.data.reports.labeler_cues import Table

CONGESTION = "(?:vascular|pulmonary|venous) congestion"
"""A sign of edema, which conventions count in different ways."""

MENTIONS: dict[str, Table] = {
    "Atelectasis": (
        "atelecta*",
        "collapse of .. (?:lobes?|lingula|segments?|base|(?:left|right) lung)",
        "(?:lobes?|lobar|lingular|segmental|base|(?:left|right) lung) collapse",
        "collapsed .. (?:lobes?|lingula|segments?|(?:left|right) lung)",
        "(?:lobes?|lingula|segments?|(?:left|right) lung) (?:is|are|remains?|appears?) .. collapsed",
    ),
    "Cardiomegaly": (
        "cardiomegaly",
        "(?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour) .. (?:enlarg*|increased)",
        "(?:heart|cardiac silhouette) (?:is|appears|remains) (?:mildly |slightly )?prominent",
        "increase in (?:heart|cardiac) size",
        "(?:enlarge*|increased) .. (?:heart|cardiac silhouette|cardiac size|cardiac shadow|cardiac contour)",
        "(?:heart|cardiac silhouette|cardiac size) .. (?:is|appears|remains|mildly|slightly|moderately) large",
        "borderline (?:enlarged )?(?:heart|cardiac)(?: enlargement)?",
        "(?:heart|cardiac silhouette|cardiac size) .. borderline(?: (?:enlarged|large|prominent))?",
        "cardiac enlargement",
        "(?:heart|cardiac silhouette)(?: size)? ?(?:[:=(]|[-\u2013\u2014]) ?"
        "(?:mildly |moderately )?(?:large|prominent)",
    ),
    "Consolidation": ("consolidat*",),
    "Edema": (
        "(?<!tissue )(?<!subcutaneous )(?<!wall )o?edema",
        "(?:heart|cardiac) failure",
        "chf",
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
        "(?:hazy|patchy|ill-defined|increased|confluent|ground[- ]glass) (?:parenchymal |lung )?densit*",
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
    "Pneumonia": ("(?:broncho)?pneumonias?", "pna", "(?<!granulomatous )infection", "infectious"),
    "Pneumothorax": ("(?:hydro|hemo)?pneumothora*", "ptx"),
    "Support Devices": (
        "(?:tubes?|catheters?|drains?|cannula*|pigtails?|ett|ngt|ogt|tracheostomy|dob(?:b|)hoff|introducer|sheath)",
        "(?:picc|port-a-cath|portacath|mediport|ports?|swan-ganz|hickman|broviac|permacath|vas-?cath|quinton)",
        "(?:central|jugular|ij|subclavian|femoral|arterial|venous|dialysis) .. lines?",
        "(?:pacemakers?|pacers?|pac(?:ing|er) (?:device|leads?|wires?)|icd|aicd|defibrillators?|stimulators?)",
        "(?:sternotomy|sternal|cerclage) .. wires?",
        "(?:stents?|prosthe*|hardware|lvad|impella|ecmo|iabp|balloon pump|valve replacement|(?:vp )?shunt catheter)",
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
