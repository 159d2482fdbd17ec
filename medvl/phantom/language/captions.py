"""Captions of radiographs in case reports, and the sentences of the article that refer to them.

Captions name the view and its findings in noun phrases. References repeat them in the past tense,
or do not describe the figure at all. Templates have the form of `lexicon`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from medvl.phantom.language import lexicon
from medvl.phantom.language.reports import pick, realize, template_form, template_slots
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.volumes import Slice, sample_slice
from medvl.phantom.population.world import Patient, Study, View, generator

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
"""Position -> names of the image."""

NOUN_PHRASES: dict[str, dict[str, tuple[str, ...]]] = {
    "Atelectasis": {
        "bands": (
            "{severity} {basal} atelectasis",
            "[linear|band-like|plate-like] atelectasis at the {where}",
            "linear opacities at the {where} in keeping with atelectasis",
        ),
        "collapse": (
            "collapse of the {where}[| with volume loss]",
            "complete atelectasis of the {where}",
        ),
    },
    "Cardiomegaly": {
        "any": (
            "{severity} cardiomegaly",
            "a {severity_adverb} enlarged [heart|cardiac silhouette]",
            "{severity} enlargement of the [heart|cardiac silhouette]",
        )
    },
    "Consolidation": {
        "any": (
            "{severity} consolidation of the {where}",
            "{where} consolidation[| with air bronchograms]",
            "confluent airspace opacification of the {where}",
        )
    },
    "Edema": {
        "any": (
            "{severity} pulmonary edema",
            "[bilateral|diffuse] perihilar opacities consistent with {severity} pulmonary edema",
            "signs of {severity} pulmonary edema",
        )
    },
    "Enlarged Cardiomediastinum": {
        "any": (
            "{severity} widening of the [mediastinum|superior mediastinum]",
            "a {severity_adverb} widened mediastinum",
        )
    },
    "Fracture": {
        "rib": ("a [|displaced ]fracture of the {where}",),
        "ribs": (
            "[multiple|several] {side} rib fractures",
            "fractures of [multiple|several] {side} ribs",
        ),
        "clavicle": ("a displaced fracture of the {side} clavicle",),
    },
    "Lung Lesion": {
        "nodule": ("a {cm} cm [|rounded |pulmonary ]nodule in the {where}",),
        "mass": (
            "a {cm} cm mass in the {where}",
            "a [large|well-defined] mass of {cm} cm in the {where}",
        ),
        "several": ("[multiple|{count}] pulmonary nodules, the largest of {cm} cm",),
    },
    "Lung Opacity": {
        "any": (
            "a [hazy|ill-defined|vague] opacity in the {where}",
            "{severity} ground-glass opacity in the {where}",
        )
    },
    "Pleural Effusion": {
        "one": ("a {size} {side} pleural effusion", "a {size} {side}-sided pleural effusion"),
        "both": (
            "{size} bilateral pleural effusions",
            "bilateral pleural effusions, {larger} greater than {smaller}",
        ),
    },
    "Pleural Other": {
        "thickening": ("{severity} {side} pleural thickening",),
        "apical cap": ("{severity} {side} apical pleural thickening",),
        "plaque": ("calcified {side} pleural plaques",),
    },
    "Pneumonia": {
        "any": (
            "{where} pneumonia",
            "patchy opacities in the {where} [consistent with|suggestive of] pneumonia",
        )
    },
    "Pneumothorax": {
        "any": ("a {size} {side} pneumothorax", "a {size} {side}-sided pneumothorax"),
        "tension": (
            "a large {side} pneumothorax with mediastinal shift",
            "a {side} tension pneumothorax",
        ),
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
"""Label -> form -> noun phrases, with the forms of `lexicon.PRESENT`."""

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
UNINFORMATIVE_REFERENCES = (
    "[Laboratory tests|Vital signs] were [unremarkable|stable] and imaging was performed "
    "({figure}).",
    "The patient was [discharged|treated conservatively] on day {day} ({figure}).",
    "({figure}).",
)
"""References that do not describe the image; the last one imitates an error of sentence
splitters.
"""

_NORMAL_NOUN = "no abnormality"
_MAX_FINDINGS = 3  # findings per caption
_MARKS = ("(arrow)", "(arrows)", "(arrowhead)", "(white arrow)", "(asterisk)")


def compose_caption(rng: np.random.Generator, study: Study, view: View) -> str:
    """Return a caption of a view that names its most extensive visible findings and agrees with
    the ground truth.
    """
    shown = _nouns(rng, view)
    if shown and rng.random() < 0.35:
        shown[0] += f" {pick(rng, _MARKS)}"
    slots = {
        "view": _view_name(rng, view),
        "person": _person(study),
        "day": str(rng.integers(2, 15)),
    }
    caption = realize(
        rng, CAPTIONS if shown else NORMAL_CAPTIONS, {**slots, "shown": _enumerate_phrases(shown)}
    )
    negations = lexicon.ABSENT.items()
    absent = [
        templates
        for labels, templates in negations
        if not any(study.labels[label] for label in labels)
    ]
    if absent and rng.random() < 0.12:
        caption += " " + realize(rng, absent[int(rng.integers(len(absent)))])
    return caption


def compose_references(
    rng: np.random.Generator, view: View, number: int, maximum: int = 4
) -> list[str]:
    """Return up to `maximum` sentences of the article that refer to figure `number`."""
    sentences = []
    for _ in range(min(maximum, int(rng.geometric(0.45)) - 1)):
        shown = _nouns(rng, view)
        templates = (
            UNINFORMATIVE_REFERENCES
            if rng.random() < 0.3
            else REFERENCES
            if shown
            else NORMAL_REFERENCES
        )
        figure = pick(rng, [f"Figure {number}", f"Fig. {number}", f"Figure {number} "])
        slots = {"view": _view_name(rng, view), "figure": figure, "day": str(rng.integers(2, 15))}
        sentences.append(realize(rng, templates, {**slots, "shown": _enumerate_phrases(shown)}))
    return sentences


def _nouns(rng: np.random.Generator, view: View) -> list[str]:
    """Return noun phrases of the findings that a caption of this view names, the most extensive
    first.
    """
    visible = [
        finding for finding in view.findings if not (view.lateral and finding.label == "Fracture")
    ]
    devices = [finding for finding in visible if finding.label == "Support Devices"]
    named = sorted(
        (finding for finding in visible if finding not in devices),
        key=lambda finding: -finding.extent,
    )
    nouns = [_noun(rng, finding) for finding in named[:_MAX_FINDINGS]]
    if devices and (not nouns or rng.random() < 0.3):
        nouns.append(_noun(rng, devices[0]))
    return nouns


def _noun(rng: np.random.Generator, finding: Finding) -> str:
    """Return a noun phrase for a finding, for use within a sentence."""
    part = finding.parts[0]
    forms = NOUN_PHRASES[finding.label]
    templates = (
        forms[part.kind] if finding.label == "Support Devices" else forms[template_form(finding)]
    )
    text = realize(rng, templates, template_slots(finding, part))
    return text[0].lower() + text[1:]


def _enumerate_phrases(nouns: Sequence[str]) -> str:
    if len(nouns) < 2:
        return nouns[0] if nouns else _NORMAL_NOUN
    return f"{', '.join(nouns[:-1])} and {nouns[-1]}"


def _view_name(rng: np.random.Generator, view: View) -> str:
    return pick(rng, VIEWS["LATERAL" if view.lateral else view.position])


def _person(study: Study) -> str:
    noun = "[woman|female patient]" if study.sex == "F" else "[man|male patient]"
    age = min(study.age, 90)
    return f"{'an' if age // 10 == 8 or age == 18 else 'a'} {age}-year-old {noun}"


# Captions of CT and MR slices: organ, modality, plane and masses.

_NAMES = {
    "CT": (
        "[axial|transverse] [CT|computed tomography] [scan |image |]of the {organ}",
        "[axial|transverse] {organ} CT",
    ),
    "MRI": (
        "[axial|transverse] [|T2-weighted ][MRI|magnetic resonance image] of the {organ}",
        "[axial|transverse] {organ} MRI",
    ),
}
_MASSES = {
    0: ("no mass", "no focal lesion"),
    1: (
        "a [single |]{cm} cm mass on the {side}",
        "a [single |]mass of {cm} cm on the {side}[| side]",
    ),
    2: ("two {side}-sided masses of {cm} cm", "two masses on the {side}, {cm} cm each"),
    3: ("three {side}-sided masses of {cm} cm", "three masses on the {side}, {cm} cm each"),
}
"""Number of masses -> noun phrases."""
_CAPTIONS = (
    "{name} [showing|demonstrating|revealing] {shown}.",
    "{name} [shows|demonstrates|reveals] {shown}.",
    "{name} [at presentation|on admission|on day {day}], with {shown}.",
)
_REFERENCES = (
    "[On admission, a|A] {name} [revealed|showed] {shown} ({figure}).",
    "{name} as in {figure} [showed|demonstrated] {shown}.",
)


def compose_slice_caption(rng: np.random.Generator, part: Slice) -> str:
    """Return the caption of a slice, which names everything that questions ask about."""
    return realize(rng, _CAPTIONS, _slots(rng, part))


def compose_slice_references(rng: np.random.Generator, part: Slice, number: int) -> list[str]:
    """Return the sentences of the article that refer to figure `number`; none or one."""
    if rng.random() < 0.5:
        return []
    slots = _slots(rng, part)
    slots["figure"] = pick(rng, [f"Figure {number}", f"Fig. {number}"])
    return [realize(rng, _REFERENCES, slots)]


def _slots(rng: np.random.Generator, part: Slice) -> dict[str, str]:
    return {
        "name": pick(rng, _NAMES[part.modality]).format(organ=part.organ),
        "shown": pick(rng, _MASSES[len(part.masses)]).format(
            cm=f"{part.diameter:g}", side=part.side
        ),
        "day": str(rng.integers(2, 15)),
    }


# Case reports about patients: an article per patient, with figures, captions and references.
#
# Besides radiographs there are CT and MR slices, as in the literature. The defects of real figure
# corpora occur as well: blank captions, missing or empty files, duplicated table lines, and
# charts among the images.

_STREAM = 94
# of captions, of lines, of articles
_BLANK_SHARE = 0.02
_DUPLICATED_SHARE = 0.01
_CHART_SHARE = 0.08
_SLICE_SHARE = 0.6  # of studies
# (period, remainder) of article numbers: below the budget of a conversion
_MISSING = (100, 77)
_EMPTY = (200, 133)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of an article: a radiograph (`view`), a slice (`ct_mr_slice`), or a chart if both
    are None.
    """

    number: int
    """Number in the article, from 1."""
    caption: str
    """Caption without "Figure 1."; blank if missing."""
    references: tuple[str, ...]
    study: Study | None = None
    view: View | None = None
    ct_mr_slice: Slice | None = None
    duplicated: bool = False
    """Whether the tables contain its line twice."""
    file: str = "intact"
    """State of its file: intact, missing or empty."""

    @property
    def radiology(self) -> bool:
        """Whether it is an image of a patient, not a chart."""
        return self.view is not None or self.ct_mr_slice is not None


def article_id(patient: Patient) -> str:
    """Return an article id in the form of PubMed Central, unrelated to real articles."""
    return f"PMC{patient.subject_id}"


def article_figures(patient: Patient) -> list[Figure]:
    """Return the figures of a patient's case report: views and slices study by study, then
    possibly a chart.
    """
    figures: list[Figure] = []
    for study in patient.studies:
        for view in study.views:
            rng = generator(*view.key, _STREAM)
            number = len(figures) + 1
            figure = Figure(
                number=number,
                caption=compose_caption(rng, study, view),
                references=tuple(compose_references(rng, view, number)),
                study=study,
                view=view,
                duplicated=rng.random() < _DUPLICATED_SHARE,
                file=_file_state(patient.index, number),
            )
            figures.append(
                dataclasses.replace(figure, caption="") if rng.random() < _BLANK_SHARE else figure
            )
        rng = generator(*study.key, _STREAM, 1)
        if rng.random() < _SLICE_SHARE:
            figures.append(_slice(rng, study, len(figures) + 1))
    rng = generator(*patient.studies[0].key, _STREAM)
    if rng.random() < _CHART_SHARE:
        number = len(figures) + 1
        figures.append(
            Figure(
                number=number,
                caption=pick(
                    rng,
                    [
                        "Course of body temperature during the hospital stay.",
                        "Serum levels over time.",
                    ],
                ),
                references=(f"The course is shown in Figure {number}.",),
            )
        )
    return figures


def _slice(rng: np.random.Generator, study: Study, number: int) -> Figure:
    part = sample_slice((*study.key, _STREAM, 2))
    return Figure(
        number=number,
        caption="" if rng.random() < _BLANK_SHARE else compose_slice_caption(rng, part),
        references=tuple(compose_slice_references(rng, part, number)),
        study=study,
        ct_mr_slice=part,
    )


def _file_state(article: int, number: int) -> str:
    if number == 1 and article % _MISSING[0] == _MISSING[1]:
        return "missing"
    return "empty" if number == 1 and article % _EMPTY[0] == _EMPTY[1] else "intact"
