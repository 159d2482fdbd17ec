"""Texts of relations: forms of the two mentions in the input of an encoder (Gu et al. 2021, Table 14).

* "dummies": each mention is replaced by its type, such as `@DRUG$`; overlapping ones by one word.
* "markers": `<e1>`, `</e1>`, `<e2>`, `</e2>` around the mentions.
* "original": the sentence as it is. Read through the first token alone, several pairs of one sentence are one input.
"""

from typing import Literal

from medvl.data.text_tasks.tasks import TextExample, TextTask
from medvl.errors import CorpusError

RelationText = Literal["dummies", "markers", "original"]
Spans = tuple[tuple[int, int], tuple[int, int]]


def relation_text(example: TextExample, task: TextTask, form: RelationText) -> tuple[str, Spans | None]:
    """Return the text of a relation, and the spans of its mentions in it where they are known.

    Raises CorpusError where a set has dummies only and another form is requested, or spans exceed the text.
    """
    text, spans = example.texts[0], example.spans
    if spans is None:
        if form != "dummies":
            message = f"{task.name} has texts with dummies only; it cannot be read as {form!r}"
            raise CorpusError(message, "unsupported", field="relation_form")
        return text, None
    (a, b), (c, d) = spans
    if not (0 <= a < b <= len(text) and 0 <= c < d <= len(text) and a <= c):
        message = f"{task.name}: the mentions of {example.key} leave its text or are out of order: {spans}"
        raise CorpusError(message, "out_of_range", field="data")
    if form == "original":
        return text, spans
    overlap = c < b
    if form == "markers":
        return _marked(text, spans) if not overlap else (_around(text, a, max(b, d), "<e1><e2>", "</e2></e1>"))
    first, second, both = task.dummies
    if overlap:
        end = max(b, d)
        return text[:a] + both + text[end:], ((a, a + len(both)), (a, a + len(both)))
    shown = text[:a] + first + text[b:c] + second + text[d:]
    start = a + len(first) + (c - b)
    return shown, ((a, a + len(first)), (start, start + len(second)))


def _marked(text: str, spans: Spans) -> tuple[str, Spans]:
    (a, b), (c, d) = spans
    pieces = (text[:a], "<e1>", text[a:b], "</e1>", text[b:c], "<e2>", text[c:d], "</e2>", text[d:])
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return "".join(pieces), ((starts[1], starts[4]), (starts[5], starts[8]))


def _around(text: str, start: int, end: int, before: str, after: str) -> tuple[str, Spans]:
    stop = end + len(before) + len(after)
    return text[:start] + before + text[start:end] + after + text[end:], ((start, stop), (start, stop))
