"""Prompt sets from the texts of a user: names of findings, phrases, pairs of sentences."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.common.label_names import match_labels, spoken_name
from medvl.errors import EvaluationError
from medvl.eval.zero_shot_classification.prompts import COMPETING, ClassPrompts, PromptSet, load_prompts

Texts = Sequence[str | tuple[str, str]] | Mapping[str, tuple[str, str]]
"""Texts to score: names of findings, phrases, pairs of a sentence for and one against; or name -> pair."""
PROMPTS = "chexpert_ensemble"
"""Prompt set of `medvl eval zero-shot`."""
_THERE = re.compile(r"there (?:is|are)\s+(?:an?\s+|the\s+)?", re.IGNORECASE)
_NEGATED = re.compile(r"(?:there (?:is|are) )?no\b|without\b", re.IGNORECASE)


def prompts_for(
    texts: Texts | None, prompts: PromptSet | Path | str = PROMPTS, temperature: float | None = None
) -> PromptSet:
    """Return the prompt set that scores texts.

    Args:
        texts: None for all classes of the set. The name of a class, in any spelling, has the sentences of the set; a
            pair is a sentence for and one against; another phrase X is compared as "There is X." with "There is no X.".
        prompts: a prompt set, its name (`medvl list prompts`) or a JSON file, with the rule and the temperature.
        temperature: divisor of similarities before the softmax; None takes the set's.

    Raises EvaluationError for an unknown or damaged set, one without probabilities, an empty list, an empty, negated
    or repeated text, and a phrase where the classes of the set compete with each other.
    """
    base = prompts if isinstance(prompts, PromptSet) else load_prompts(prompts)
    if not base.gives_probabilities:
        message = (
            f"prompt set {base.name!r} gives no probabilities ({base.scoring}); evaluate it with medvl eval zero-shot"
        )
        raise EvaluationError(message, "unsupported", field="prompts")
    if temperature is not None:
        if not 0 < temperature < float("inf"):
            raise EvaluationError(f"expected temperature > 0, got {temperature}", "out_of_range", field="temperature")
        base = dataclasses.replace(base, temperature=temperature)
    if texts is None:
        return base
    pairs = list(texts.items()) if isinstance(texts, Mapping) else [(text, text) for text in _listed(texts)]
    if not pairs:
        raise EvaluationError("expected at least one text, got none", "empty", field="texts")
    classes: dict[str, ClassPrompts] = {}
    for key, text in pairs:
        name = key if isinstance(key, str) else key[0]
        if name in classes:
            raise EvaluationError(f"duplicate text {name!r}", "conflict", field="texts")
        classes[name] = _sides(text, base)
    if base.scoring in COMPETING and len(classes) < 2:
        message = f"{base.scoring} of {base.name!r} compares at least two classes; give two texts or another set"
        raise EvaluationError(message, "empty", field="texts")
    return dataclasses.replace(base, classes=classes)


def _listed(texts: Sequence[str | tuple[str, str]]) -> Sequence[str | tuple[str, str]]:
    return [texts] if isinstance(texts, str) else texts


def _sides(text: str | tuple[str, str], base: PromptSet) -> ClassPrompts:
    """Return the sentences for and against a text."""
    competing = base.scoring in COMPETING
    if isinstance(text, str):
        known = match_labels(list(base.classes), [text], synonyms=False)
        if known:
            return base.classes[next(iter(known))]
        if not competing:
            return _pair_of(text)
        message = f"prompt set {base.name!r} compares its own classes {', '.join(base.classes)}, got {text!r}"
        raise EvaluationError(message, "unknown_name", field="texts")
    if competing or len(text) != 2 or not all(isinstance(side, str) and side.strip() for side in text):
        message = (
            f"expected a pair of a sentence for and one against, for a set of pairs; got {text!r} for {base.name!r}"
        )
        raise EvaluationError(message, "malformed", field="texts")
    return ClassPrompts(positive=(text[0],), negative=(text[1],))


def _pair_of(text: str) -> ClassPrompts:
    phrase = _THERE.sub("", text.strip(), count=1) if _THERE.match(text.strip()) else text.strip()
    phrase = phrase.rstrip(". ")
    phrase = spoken_name(phrase) if any(sign in phrase for sign in "_=") else phrase
    if not phrase:
        raise EvaluationError("expected a text, got an empty one", "empty", field="texts")
    if _NEGATED.match(text.strip()) or _NEGATED.match(phrase):
        message = f"{text!r} is a negation; name the finding, or give a pair (sentence for, sentence against)"
        raise EvaluationError(message, "unsupported", field="texts")
    if not phrase[1:2].isupper():  # not an abbreviation
        phrase = phrase[0].lower() + phrase[1:]
    return ClassPrompts(positive=(f"There is {phrase}.",), negative=(f"There is no {phrase}.",))
