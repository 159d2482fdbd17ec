"""Sentences of the tests: statements about findings, their denials, and paraphrases of both."""

import hashlib
import re
from collections.abc import Mapping, Sequence

from medvl.common.label_names import match_labels, spoken_name
from medvl.eval.classification.label_policy import NO_FINDING
from medvl.eval.zero_shot_classification.prompts import ClassPrompts, PromptSet, load_prompts

PARAPHRASES: Mapping[str, tuple[str, str]] = {
    "seen": ("{} can be seen.", "No {} can be seen."),
    "evidence": ("Evidence of {}.", "No evidence of {}."),
    "consistent": ("Findings are consistent with {}.", "Findings are not consistent with {}."),
    "patient": ("The patient has {}.", "The patient does not have {}."),
    "shows": ("The radiograph shows {}.", "The radiograph shows no {}."),
    "name alone": ("{}", "no {}"),
}
"""Name -> a statement and its denial, with {} for the finding."""


def statements(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return class -> "There is X." and "There is no X.", without No Finding, whose denial asserts a finding."""
    known = load_prompts("chexpert_pairs").classes
    known_as = {name: finding for finding, name in match_labels(list(known), names).items()}
    pairs = {}
    for name in names:
        if name in known_as:
            pairs[name] = known[known_as[name]].positive[0], known[known_as[name]].negative[0]
        else:
            noun = spoken_name(name)
            pairs[name] = _fill("There is {}.", noun), _fill("There is no {}.", noun)
    return {name: pair for name, pair in pairs.items() if name != NO_FINDING}


def paraphrases(names: Sequence[str]) -> list[PromptSet]:
    """Return a prompt set of `statements` and of each of `PARAPHRASES`, scored by the margin of the two sentences."""
    pairs = statements(names)
    nouns = {name: re.sub(r"^There (is|are) no |\.$", "", denial) for name, (_, denial) in pairs.items()}
    wordings = {"there is": pairs}
    for name, templates in PARAPHRASES.items():
        wordings[name] = {
            label: (_fill(templates[0], noun), _fill(templates[1], noun)) for label, noun in nouns.items()
        }
    sets = []
    for name, sentences in wordings.items():
        classes = {label: ClassPrompts(positive=(one,), negative=(other,)) for label, (one, other) in sentences.items()}
        prompts = PromptSet(
            name=name,
            version=1,
            description="",
            scoring="margin",
            temperature=1.0,
            ensemble="similarity_mean",
            classes=classes,
            sha256=hashlib.sha256(repr(classes).encode()).hexdigest(),
        )
        sets.append(prompts)
    return sets


def _fill(template: str, noun: str) -> str:
    filled = template.format(noun)
    return filled[:1].upper() + filled[1:] if template.endswith(".") else filled
