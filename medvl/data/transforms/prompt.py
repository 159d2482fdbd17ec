"""Prompts of report generators: what is known about a study before its report, as token ids."""

import dataclasses
from collections.abc import Mapping

from medvl.data.tokenizer.tokenizer import Tokenizer

_PRIOR = "prior "
"""Begin of the names of sections of the prior report."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A `medvl.schema.WritesPrompts`: a heading and the tokens of each section that exists, between
    fixed tokens, of which one is the image's marker.
    """

    tokenizer: Tokenizer
    before: tuple[int, ...] = ()
    """Ids at the start."""
    headings: Mapping[str, tuple[int, ...]]
    """Section -> ids of its heading, in the order of the prompt. "prior findings" are the findings
    of the prior report.
    """
    after: tuple[int, ...] = ()
    """Ids at the end."""
    answer: tuple[int, ...] = ()
    """Ids at the end in place of `after`, where the section "question" exists."""
    max_tokens: int
    """Maximum number of tokens of each section but a question."""

    @property
    def reads_prior(self) -> bool:
        """Whether the prior report is read."""
        return any(name.startswith(_PRIOR) for name in self.headings)

    def __call__(
        self, sections: Mapping[str, str], prior: Mapping[str, str] | None
    ) -> tuple[int, ...]:
        """Return the ids of a prompt."""
        ids = [*self.before]
        for name, heading in self.headings.items():
            is_prior = name.startswith(_PRIOR)
            known = (prior or {}) if is_prior else sections
            text = known.get(name.removeprefix(_PRIOR), "")
            if text.strip():
                end = None if name == "question" else self.max_tokens
                ids += [*heading, *text_ids(self.tokenizer, text)[:end]]
        return *ids, *(self.answer if sections.get("question", "").strip() else self.after)


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a text without its first and last token."""
    ids_1T, _ = tokenizer([text])
    ids: list[int] = ids_1T[0].tolist()
    if ids and ids[-1] == tokenizer.sep_id:
        ids.pop()
    return tuple(ids[1:] if ids and ids[0] == tokenizer.cls_id else ids)
