"""What the literature says about a figure: its caption, and the sentences of the article that refer to it.

Captions name the view and what it shows in noun phrases; the article says the same in the past tense, or refers to the
figure without saying anything about it. Templates as in `phrases`.
"""

from collections.abc import Sequence

import numpy as np

from medvl.phantom.language import lexicon
from medvl.phantom.language.sentences import form_of, pick, say, slots_of
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Study, View

VIEWS = {
    "PA": (
        "[posteroanterior|PA|frontal] chest [radiograph|X-ray]",
        "[chest radiograph|chest X-ray] ([PA|posteroanterior] view)",
        "[chest radiograph|chest X-ray] in the posteroanterior projection",
    ),
    "AP": (
        "[anteroposterior|AP|portable|bedside] chest [radiograph|X-ray]",
        "[chest radiograph|chest X-ray] ([AP|anteroposterior] view)",
        "supine chest [radiograph|X-ray]",
    ),
    "LATERAL": (
        "lateral chest [radiograph|X-ray]",
        "[chest radiograph|chest X-ray] (lateral view)",
        "lateral view of the chest",
    ),
}
"""Position -> what one calls such an image."""

NOUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "Atelectasis": {
        "bands": (
            "{severity} {basal} atelectasis",
            "[linear|band-like|plate-like] atelectasis at the {where}",
            "linear opacities at the {where} in keeping with atelectasis",
        ),
        "collapse": ("collapse of the {where}[| with volume loss]", "complete atelectasis of the {where}"),
    },
    "Cardiomegaly": {
        "any": (
            "{severity} cardiomegaly",
            "a {severity_adverb} enlarged [heart|cardiac silhouette]",
            "{severity} enlargement of the [heart|cardiac silhouette]",
        ),
    },
    "Consolidation": {
        "any": (
            "{severity} consolidation of the {where}",
            "{where} consolidation[| with air bronchograms]",
            "confluent airspace opacification of the {where}",
        ),
    },
    "Edema": {
        "any": (
            "{severity} pulmonary edema",
            "[bilateral|diffuse] perihilar opacities consistent with {severity} pulmonary edema",
            "signs of {severity} pulmonary edema",
        ),
    },
    "Enlarged Cardiomediastinum": {
        "any": (
            "{severity} widening of the [mediastinum|superior mediastinum]",
            "a {severity_adverb} widened mediastinum",
        ),
    },
    "Fracture": {
        "rib": ("a [|displaced ]fracture of the {where}",),
        "ribs": ("[multiple|several] {side} rib fractures", "fractures of [multiple|several] {side} ribs"),
        "clavicle": ("a displaced fracture of the {side} clavicle",),
    },
    "Lung Lesion": {
        "nodule": ("a {cm} cm [|rounded |pulmonary ]nodule in the {where}",),
        "mass": ("a {cm} cm mass in the {where}", "a [large|well-defined] mass of {cm} cm in the {where}"),
        "several": ("[multiple|{count}] pulmonary nodules, the largest of {cm} cm",),
    },
    "Lung Opacity": {
        "any": ("a [hazy|ill-defined|vague] opacity in the {where}", "{severity} ground-glass opacity in the {where}"),
    },
    "Pleural Effusion": {
        "one": ("a {size} {side} pleural effusion", "a {size} {side}-sided pleural effusion"),
        "both": ("{size} bilateral pleural effusions", "bilateral pleural effusions, {larger} greater than {smaller}"),
    },
    "Pleural Other": {
        "thickening": ("{severity} {side} pleural thickening",),
        "apical cap": ("{severity} {side} apical pleural thickening",),
        "plaque": ("calcified {side} pleural plaques",),
    },
    "Pneumonia": {
        "any": ("{where} pneumonia", "patchy opacities in the {where} [consistent with|suggestive of] pneumonia"),
    },
    "Pneumothorax": {
        "any": ("a {size} {side} pneumothorax", "a {size} {side}-sided pneumothorax"),
        "tension": ("a large {side} pneumothorax with mediastinal shift", "a {side} tension pneumothorax"),
    },
    "Support Devices": {
        "endotracheal tube": ("an endotracheal tube {cm} cm above the carina",),
        "enteric tube": ("a [nasogastric|orogastric] tube in the stomach",),
        "central line": ("a {side} {line}",),
        "pacemaker": ("a {side}-sided [pacemaker|ICD]",),
        "chest tube": ("a {side} chest tube",),
        "sternotomy wires": ("[|median ]sternotomy wires",),
    },
}
"""Label -> form -> noun phrases that name it; the forms are those of `lexicon.PRESENT`."""

CAPTIONS = (
    "{view} [showing|demonstrating|revealing] {shown}.",
    "{view} of {person} [showing|demonstrating|with] {shown}.",
    "{view} [on admission|at presentation|on day {day}] [shows|demonstrates|reveals] {shown}.",
    "{view} [shows|demonstrates] {shown}.",
    "{person}: {view} with {shown}.",
)
NORMAL_CAPTIONS = (
    "Normal {view}.",
    "{view} of {person} without [pathological findings|any abnormality].",
    "{view} [showing|with] [clear lungs and a normal heart|no abnormality].",
)
REFERENCES = (
    "[On admission, a|A] {view} [revealed|showed|demonstrated] {shown} ({figure}).",
    "The {view} obtained on day {day} [showed|revealed] {shown} ({figure}).",
    "As [shown|depicted|seen] in {figure}, imaging [revealed|showed] {shown}.",
    "Imaging was notable for {shown} ({figure}).",
)
NORMAL_REFERENCES = (
    "The {view} [was unremarkable|showed no abnormality] ({figure}).",
    "No abnormality was seen on the {view} ({figure}).",
)
ASIDES = (
    "[Laboratory tests|Vital signs] were [unremarkable|stable] and imaging was performed ({figure}).",
    "The patient was [discharged|treated conservatively] on day {day} ({figure}).",
    "({figure}).",
)
"""References that say nothing about the image; the last one is what sentence splitters leave."""

_NORMAL_NOUN = "no abnormality"
_MOST = 3  # findings that a caption names
_MARKS = ("(arrow)", "(arrows)", "(arrowhead)", "(white arrow)", "(asterisk)")


def compose_caption(rng: np.random.Generator, study: Study, view: View) -> str:
    """The caption of a view: never contradicts the truth, names the worst findings that this view can show."""
    shown = _nouns(rng, view)
    if shown and rng.random() < 0.35:
        shown[0] += f" {pick(rng, _MARKS)}"
    slots = {"view": _name(rng, view), "person": _person(study), "day": str(rng.integers(2, 15))}
    caption = say(rng, CAPTIONS if shown else NORMAL_CAPTIONS, {**slots, "shown": _listed(shown)})
    absent = [templates for labels, templates in lexicon.ABSENT if not any(study.labels[label] for label in labels)]
    if absent and rng.random() < 0.12:
        caption += " " + say(rng, absent[int(rng.integers(len(absent)))])
    return caption


def compose_references(rng: np.random.Generator, view: View, number: int, most: int = 4) -> list[str]:
    """Sentences of the article that refer to figure `number`, none to `most` of them."""
    sentences = []
    for _ in range(min(most, int(rng.geometric(0.45)) - 1)):
        shown = _nouns(rng, view)
        templates = ASIDES if rng.random() < 0.3 else REFERENCES if shown else NORMAL_REFERENCES
        figure = pick(rng, [f"Figure {number}", f"Fig. {number}", f"Figure {number} "])
        slots = {"view": _name(rng, view), "figure": figure, "day": str(rng.integers(2, 15))}
        sentences.append(say(rng, templates, {**slots, "shown": _listed(shown)}))
    return sentences


def _nouns(rng: np.random.Generator, view: View) -> list[str]:
    """Noun phrases of what a caption of this view would name, the worst first."""
    visible = [finding for finding in view.findings if not (view.lateral and finding.label == "Fracture")]
    devices = [finding for finding in visible if finding.label == "Support Devices"]
    named = sorted((finding for finding in visible if finding not in devices), key=lambda finding: -finding.extent)
    nouns = [_noun(rng, finding) for finding in named[:_MOST]]
    if devices and (not nouns or rng.random() < 0.3):
        nouns.append(_noun(rng, devices[0]))
    return nouns


def _noun(rng: np.random.Generator, finding: Finding) -> str:
    """A finding as a noun phrase within a sentence."""
    part = finding.parts[0]
    forms = NOUNS[finding.label]
    templates = forms[part.kind] if finding.label == "Support Devices" else forms[form_of(finding)]
    text = say(rng, templates, slots_of(finding, part))
    return text[0].lower() + text[1:]


def _listed(nouns: Sequence[str]) -> str:
    if len(nouns) < 2:
        return nouns[0] if nouns else _NORMAL_NOUN
    return f"{', '.join(nouns[:-1])} and {nouns[-1]}"


def _name(rng: np.random.Generator, view: View) -> str:
    return pick(rng, VIEWS["LATERAL" if view.lateral else view.position])


def _person(study: Study) -> str:
    noun = "[woman|female patient]" if study.sex == "F" else "[man|male patient]"
    age = min(study.age, 90)
    return f"{'an' if age // 10 == 8 or age == 18 else 'a'} {age}-year-old {noun}"
