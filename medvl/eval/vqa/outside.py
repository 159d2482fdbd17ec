"""Answers of outside models: files of other harnesses, free text as an option, and questions in the
form that these harnesses read.

| file | form |
|---|---|
| JSON lines | medvl's: `id` and `answer`, optionally `answer_type` and `score` |
| samples of lmms-eval | JSON lines with `doc_id` and `filtered_resps` or `resps` |
| `results.json` of MedEvalKit | JSON list with `response` |

Rows of harnesses belong to the question that their field `question_id` names, in the row or in
`doc`; without one, to the question at their place in `export_questions`.

A parser maps free text to an option of the question, or to none:

* `medvl-1`: the text inside the last \\boxed{} or <answer>, else behind the last "answer is" or
  "answer:", else all of it. It is the option with that text, the option of that letter ("B", "(B)",
  "B. ..."), or the only option that the text has as whole words and does not deny ("not ..."). Else
  it is no answer.
* `medevalkit`: the rule of MedEvalKit with its fault: a text without an option is the option with
  the most similar letters, so that every text is an answer, and "not B" is B.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from medvl.common.config_io import check_choice
from medvl.common.files import write_atomic
from medvl.common.text_files import read_json_objects
from medvl.common.untrusted import read_json
from medvl.data.annotations import DIFFERENCE, LETTERS, Question
from medvl.data.images.codecs import encode_png
from medvl.errors import EvaluationError
from medvl.eval.vqa.predictions import Prediction, Predictions, read_predictions
from medvl.eval.vqa.protocol import normalize_answer

Parser = Callable[[str, Sequence[str]], int | None]
"""Function from a text and the options of a question to the index of an option; None: no answer."""

_MAX_BYTES = 1 << 30
_FINAL = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"answer(?: is|:)[\s:*]*([^\n]+)", re.IGNORECASE),
)
_LETTER = re.compile(r"\(?([A-Z])(?:\)|[.:](?=\s|$)|$)")
_DENIED = re.compile(r"\b(?:not|no|without|rather than|instead of)\s+(?:an? |the )?$")
_KIT_MARKS = ("answer is", "answer:", "**answer**")
_ROWS = 64


def read_answers(path: str | Path, questions: Sequence[Question]) -> Predictions:
    """Read the answers of a file in any of the forms of this module, by question id.

    Args:
        path: the file.
        questions: the evaluated questions in the order of `export_questions`.

    Raises EvaluationError where the file is missing or malformed, answers a question twice, or has
    rows without a `question_id` and another number of rows than questions.
    """
    path = Path(path)
    if path.suffix == ".json":
        rows = _kit_rows(path)
    elif _is_lmms(path):
        rows = _lmms_rows(path)
    else:
        return read_predictions(path)
    answers: dict[str, Prediction] = {}
    entries = list(rows)
    for where, row, text in entries:
        name = _question_id(row)
        if name is None:
            place = row.get("doc_id", len(answers))
            is_place = isinstance(place, int) and 0 <= place < len(entries)
            if not is_place or len(entries) != len(questions):
                message = f"{where}: expected question_id, or a row for each of the questions"
                raise EvaluationError(message, "missing", field="question_id")
            name = questions[place].id
        if name in answers:
            message = f"{where}: question {name} has a second answer"
            raise EvaluationError(message, "conflict", field="question_id")
        answers[name] = Prediction(text)
    return answers


def _question_id(row: Mapping[str, Any]) -> str | None:
    doc = row.get("doc")
    for part in (row, doc if isinstance(doc, Mapping) else {}):
        for field in ("question_id", "qid"):
            if field in part:
                return str(part[field])
    return None


def _is_lmms(path: Path) -> bool:
    _, row = next(read_json_objects(path, EvaluationError, (), field="predictions"), ("", {}))
    return "filtered_resps" in row or "resps" in row


def _lmms_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    for where, row in read_json_objects(path, EvaluationError, ("doc_id",), field="predictions"):
        text = row.get("filtered_resps", row.get("resps"))
        while isinstance(text, list) and text:
            text = text[0]
        if not isinstance(text, str):
            message = f"{where}: expected a text in filtered_resps or resps"
            raise EvaluationError(message, "wrong_type", field="filtered_resps")
        yield where, row, text


def _kit_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    try:
        content = read_json(path, EvaluationError, limit=_MAX_BYTES)
    except FileNotFoundError:
        message = f"{path} does not exist"
        raise EvaluationError(message, "not_found", field="predictions") from None
    for number, row in enumerate(content if isinstance(content, list) else [None], 1):
        where = f"{path}, entry {number}"
        if not isinstance(row, dict) or not isinstance(row.get("response"), str):
            message = f"{where}: expected an object with the text response"
            raise EvaluationError(message, "malformed", field="predictions")
        yield where, row, row["response"]


# Parsers of free text.


def final_answer(text: str) -> str:
    """Return the part of a text that states its answer: boxed, tagged, or behind "answer is"."""
    for pattern in _FINAL:
        if matches := pattern.findall(text):
            return str(matches[-1]).strip()
    return text.strip()


def parse_option(text: str, options: Sequence[str]) -> int | None:
    """Return the option of a text by the rule `medvl-1`."""
    final = final_answer(text)
    known = [normalize_answer(option) for option in options]
    given = normalize_answer(final)
    if given in known:
        return known.index(given)
    letter = _LETTER.match(final.strip(" *"))
    if letter is not None and letter[1] in LETTERS[: len(options)]:
        return LETTERS.index(letter[1])
    places = [place for place, option in enumerate(known) if _is_stated(option, given)]
    longest = [
        place
        for place in places
        if not any(known[place] != known[n] and known[place] in known[n] for n in places)
    ]
    return longest[0] if len(longest) == 1 else None


def _is_stated(option: str, text: str) -> bool:
    """Return whether a text has an option as whole words, at least once not denied."""
    matches = re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", text) if option else iter(())
    return any(_DENIED.search(text[: match.start()]) is None for match in matches)


def parse_medevalkit(text: str, options: Sequence[str]) -> int | None:
    """Return the option of a text by the rule `medevalkit`."""
    text = text.lower()
    for mark in _KIT_MARKS:
        text = text.rpartition(mark)[2]
    text = text.strip().partition(".")[0].rpartition(":")[2].strip()
    letters = LETTERS[: len(options)].lower()
    if len(text) == 1 and text in letters:
        return letters.index(text)
    known = [option.lower() for option in options]
    ratios = [difflib.SequenceMatcher(None, text, option).ratio() for option in known]
    return known.index(text) if text in known else ratios.index(max(ratios))


PARSERS: Mapping[str, Parser] = {"medvl-1": parse_option, "medevalkit": parse_medevalkit}


def with_options(
    predictions: Predictions, questions: Sequence[Question], parser: str
) -> Predictions:
    """Return predictions whose answers to questions with options are options; "" for none.

    Raises EvaluationError for an unknown parser.
    """
    check_choice(parser, PARSERS, "parser", error=EvaluationError)
    parsed = dict(predictions)
    for question in questions:
        if question.options and question.id in predictions:
            given = predictions[question.id]
            place = PARSERS[parser](given.answer, question.options)
            answer = "" if place is None else question.options[place]
            parsed[question.id] = dataclasses.replace(given, answer=answer)
    return parsed


# Questions in the form of data sets of the hub, as lmms-eval and MedEvalKit read them.

_TASK = """dataset_path: {folder}
task: {name}
test_split: {split}
output_type: generate_until
doc_to_visual: !function utils.doc_to_visual
doc_to_text: !function utils.doc_to_text
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 64
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
_UTILS = '''"""Images and prompts of the questions that medvl exported, for lmms-eval."""


def doc_to_visual(doc):
    images = [doc.get("earlier_image"), doc["image"]]
    return [image.convert("RGB") for image in images if image is not None]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["prompt"]
'''
_TWO_IMAGES = "The first image is the earlier one, the reference image."
_TEXTS = (
    "question_id", "question", "answer", "answer_type", "kind", "category", "prompt"
)  # fmt: skip


def prompt_of(question: Question, text: str) -> str:
    """Return the prompt of a question: with lettered options, the letter is asked for."""
    if not question.options:
        return f"{text}\nAnswer with a single word or phrase."
    lines = [f"{letter}. {o}" for letter, o in zip(LETTERS, question.options, strict=False)]
    return "\n".join([text, *lines, "Answer with the letter of the right option."])


def export_questions(sources: Mapping[str, Any], folder: Path, name: str) -> None:
    """Write questions with their images as a data set of the hub, and a task of lmms-eval for each
    split.

    Of sources that read earlier images, questions about a difference have `earlier_image` as well,
    which is shown first.

    Args:
        sources: split -> `QuestionSource` or `ControlledQuestions`: test, and its controls.
        folder: output: `data/SPLIT-00000-of-00001.parquet`, `utils.py`, `NAME_SPLIT.yaml`.
        name: name of the tasks.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, source in sources.items():
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        schema = _schema(earlier=source.reads_earlier)
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for start in range(0, len(source), _ROWS):
                stop = min(start + _ROWS, len(source))
                rows = [_row(source, place) for place in range(start, stop)]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        task = f"{name}_{split}"
        text = _TASK.format(folder=json.dumps(str(folder.absolute())), name=task, split=split)
        write_atomic(folder / f"{task}.yaml", text.encode())
    write_atomic(folder / "utils.py", _UTILS.encode())


def _row(source: Any, place: int) -> dict[str, Any]:
    question: Question = source.questions[place].question
    text = source.sample(place).sections["question"]
    prompt = prompt_of(question, text)
    earlier = None
    if source.reads_earlier and question.kind == DIFFERENCE:
        earlier = source.prior_pixels(place, True)
    if earlier is not None:
        prompt = f"{_TWO_IMAGES}\n{prompt}"
    return {
        "image": _image(source.pixels(place, True)),
        "earlier_image": None if earlier is None else _image(earlier),
        "question_id": question.id,
        "question": text,
        "answer": question.answer,
        "answer_type": question.answer_type,
        "kind": question.kind,
        "category": question.category,
        "options": list(question.options),
        "prompt": prompt,
    }


def _image(pixels: Any) -> dict[str, Any]:
    return {"bytes": encode_png(pixels), "path": None}


def _schema(*, earlier: bool) -> Any:
    """Return the schema, whose metadata make `datasets` decode the images."""
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = ("image", "earlier_image") if earlier else ("image",)
    fields = [(name, image) for name in images] + [(text, pyarrow.string()) for text in _TEXTS]
    fields.append(("options", pyarrow.list_(pyarrow.string())))
    value = {"dtype": "string", "_type": "Value"}
    features: dict[str, Any] = {name: {"_type": "Image"} for name in images}
    features |= dict.fromkeys(_TEXTS, value)
    features["options"] = {"feature": value, "_type": "Sequence"}
    content = json.dumps({"info": {"features": features}})
    return pyarrow.schema(fields, metadata={"huggingface": content})
