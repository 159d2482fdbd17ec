"""Sentences about change: the prompts of `medvl.eval.change.evaluate`."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from medvl.common.label_names import spoken_name
from medvl.common.text_files import read_text
from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError
from medvl.schema import CHANGES

_DEFAULT = {
    "improving": ("{finding} is improving.", "{finding} has improved.", "{finding}, decreased since the prior study."),
    "stable": ("{finding} is stable.", "{finding} is unchanged.", "{finding}, unchanged since the prior study."),
    "worsening": ("{finding} is worsening.", "{finding} has worsened.", "{finding}, increased since the prior study."),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ChangePrompts:
    """Templates of each class in `CHANGES`; `{finding}` is replaced by the finding's name in lower case."""

    name: str
    templates: Mapping[str, tuple[str, ...]]

    @property
    def sha256(self) -> str:
        """Hash of the templates."""
        return hashlib.sha256(json.dumps(self.templates, sort_keys=True).encode()).hexdigest()

    def sentences(self, finding: str) -> list[list[str]]:
        """Return the sentences of each class about one finding, each starting with a capital letter."""
        filled = [[t.replace("{finding}", spoken_name(finding)) for t in self.templates[change]] for change in CHANGES]
        return [[text[:1].upper() + text[1:] for text in texts] for texts in filled]


def load_change_prompts(path: Path | str | None = None) -> ChangePrompts:
    """Return the default templates, or those of a JSON file: {"improving": [...], "stable": [...], "worsening": [...]}.

    Raises EvaluationError, naming the file, unless each class has templates with `{finding}`.
    """
    if path is None:
        return ChangePrompts("default", _DEFAULT)
    path = Path(path)
    try:
        data = parse_json(read_text(path, EvaluationError, field="prompts", what="a JSON file of prompts"))
    except ValueError as error:
        message = f"{path} is not valid JSON: {error}"
        raise EvaluationError(message, "malformed", field="prompts") from error
    valid = isinstance(data, dict) and set(data) == set(CHANGES)
    if not valid or not all(_are_templates(templates) for templates in data.values()):
        message = f"{path}: expected an object with lists of sentences with {{finding}} for {', '.join(CHANGES)}"
        raise EvaluationError(message, "malformed", field="prompts")
    return ChangePrompts(path.name, {change: tuple(data[change]) for change in CHANGES})


def _are_templates(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, str) and "{finding}" in t for t in value)
