"""The phantom's questions with four options in the layouts of ReXVQA and PMC-VQA."""

import csv
import dataclasses
import hashlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medvl.errors import ConfigError
from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.tables import REX_FILES, REX_SPLITS, write_rexgradient_patient
from medvl.phantom.layouts.writer import (
    Form,
    Options,
    PatientRows,
    truth_row,
    write_file,
    write_release,
    write_view,
)
from medvl.phantom.population.findings import truth_labels
from medvl.phantom.population.world import Patient, View
from medvl.phantom.rendering.scene import encode_jpeg

CANDIDATES = "phantom_choices.jsonl"
"""Questions before balancing, one JSON object a line."""
_TASKS = {
    "presence": ("presence_assessment", "Presence Assessment"),
    "laterality": ("location_and_distribution_assessment", "Location"),
    "severity": ("geometric_information_assessment", "Severity"),
}
"""Kind of a question -> task and category of ReXVQA."""


def write_rexvqa(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.1, 0.1),
    workers: int | None = None,
    forms: int = 1,
) -> Path:
    """Write a phantom ReXVQA: questions with four options in `metadata/`, beside the images and the
    metadata of `write_rexgradient` with the same arguments.

    A question lists all images of its study. Each split has a question whose answer is no letter.
    With several `forms`, at most six, each question is asked in one of as many wordings; images,
    options and answers are the same. Returns the folder.

    Raises ConfigError for another number of forms.
    """
    if not 1 <= forms <= MOST_FORMS:
        message = f"expected 1 to {MOST_FORMS} forms, got {forms}"
        raise ConfigError(message, "out_of_range", field="forms")
    options = Options(
        corpus="rexvqa", patients=patients, seed=seed, size=size, split=split, reports=True
    )
    files = {**REX_FILES, CANDIDATES: Form.LINES}
    root = write_release(Path(out), options, _write_patient, files, workers)
    candidates = [(row["split"], row["name"], row["question"]) for row in read_candidates(root)]
    entries: dict[str, dict[str, Any]] = {name: {} for name in REX_SPLITS}
    rows = list(read_candidates(root))
    for number, asked in enumerate(balanced_choices(candidates)):
        row = rows[asked.place]
        entry = _entry(row, asked.options, asked.right)
        entry["question"] = wording(row["question"], row["name"], forms)
        entries[row["split"]][f"q{number:06d}"] = entry
    for name, of_split in entries.items():
        first = next(iter(of_split.values()), None)
        if first is not None:
            of_split["q_malformed"] = {**first, "correct_answer": "E"}
        content = (json.dumps(of_split, indent=1) + "\n").encode()
        path = root / f"metadata/{name}_vqa_data.json"
        if not path.is_file() or path.read_bytes() != content:
            write_file(path, content)
    return root


def read_candidates(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `CANDIDATES`; "question" is a `ChoiceQuestion`."""
    with (root / CANDIDATES).open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            question = row["question"]
            yield {
                **row,
                "question": ChoiceQuestion(**{**question, "options": tuple(question["options"])}),
            }


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows = write_rexgradient_patient(root, patient, options)
    split = REX_SPLITS[options.split_index(patient.index)]
    table = rows.tables[f"metadata/{split}_metadata_view_position.json"]
    lines: list[list[object]] = []
    for (name, entry), study in zip(table, patient.studies, strict=True):
        question_of = {each.question: each for view in study.views[:1]
                       for each in choice_questions(view)}  # fmt: skip
        record = json.loads(str(entry))
        for text, question in question_of.items():
            row = {
                "split": split,
                "name": f"{name} {text}",
                "study": record,
                "question": dataclasses.asdict(question),
            }
            lines.append([json.dumps(row)])
    return dataclasses.replace(rows, tables={**rows.tables, CANDIDATES: lines})


def _entry(row: dict[str, Any], options: tuple[str, ...], right: int) -> dict[str, Any]:
    study = row["study"]
    task, category = _TASKS[row["question"].kind]
    kept = ("ImagePath", "ImageViewPosition", "Indication", "Comparison", "Findings", "Impression",
            "PatientSex", "PatientAge")  # fmt: skip
    return {
        "question": row["question"].question,
        "options": [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)],
        "correct_answer": LETTERS[right],
        "correct_answer_explanation": study["Impression"],
        "task_name": task,
        "category": category,
        "study_id": f"{study['PatientID']}_{study['AccessionNumber']}",
        **{name: study[name] for name in kept},
    }


# The phantom in the layout of PMC-VQA: each patient is an article.

PMC_TABLES = {"train": "train_2.csv", "test": "test_2.csv"}
_PMC_COLUMNS = (
    "index", "Figure_path", "Caption", "Question", "Choice A", "Choice B", "Choice C", "Choice D",
    "Answer", "split",
)  # fmt: skip
_PMC_NUMBER = 7_000_000


def write_pmc_vqa(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.0, 0.2),
    workers: int | None = None,
) -> Path:
    """Write a phantom PMC-VQA: `train_2.csv`, `test_2.csv` and `figures/`.

    Each patient is an article, whose figures are its frontal radiographs. The first question of the
    test is in train as well. `split` has the shares of patients in train, validation and test; the
    layout has no validation split. Returns the folder.
    """
    options = Options(
        corpus="pmc-vqa", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    root = write_release(Path(out), options, _write_article, {CANDIDATES: Form.LINES}, workers)
    rows = list(read_candidates(root))
    tables: dict[str, list[list[object]]] = {name: [] for name in PMC_TABLES}
    for asked in balanced_choices([(row["split"], row["name"], row["question"]) for row in rows]):
        row = rows[asked.place]
        cells = [
            f" {letter}:{option} " for letter, option in zip(LETTERS, asked.options, strict=True)
        ]
        answer = LETTERS[asked.right]
        of_split = tables[row["split"]]
        of_split.append(
            [len(of_split), row["figure"], row["caption"], f" {row['question'].question} ", *cells,
             answer, row["split"]]
        )  # fmt: skip
    tables["train"] += tables["test"][:1]
    for name, file in PMC_TABLES.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([_PMC_COLUMNS, *tables[name]])
        content = text.getvalue().encode()
        if not (root / file).is_file() or (root / file).read_bytes() != content:
            write_file(root / file, content)
    return root


def _write_article(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) == 2 else "train"
    lines: list[list[object]] = []
    truth = []
    for number, study in enumerate(patient.studies):
        view = study.frontal
        questions = list(choice_questions(view))
        figure = f"PMC{_PMC_NUMBER + patient.index}_fig{number}.jpg"
        for question in questions:
            row = {
                "split": split,
                "name": f"{figure} {question.question}",
                "figure": figure,
                "caption": compose_report(study).impression,
                "question": dataclasses.asdict(question),
            }
            lines.append([json.dumps(row)])
        if questions:
            path = Path("figures", figure)
            write_view(root / path, view, options.size, encode_jpeg)
            truth.append(truth_row(view, study, options.size, path=path.as_posix(), split=split))
    return PatientRows(patient.index, {CANDIDATES: lines}, truth)


LETTERS = "ABCD"


_VISIBLE_EXTENT = 0.34  # extent from which a finding is clearly visible: moderate and severe


_FINDINGS = {
    "Pleural Effusion": "pleural effusion",
    "Pneumothorax": "pneumothorax",
    "Cardiomegaly": "enlarged heart",
    "Edema": "pulmonary edema",
}


_SIDES = ("right", "left", "bilateral")


_SEVERITIES = ("mild", "moderate", "severe")


_GRADED = ("Pleural Effusion", "Cardiomegaly")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceQuestion:
    """A question with four options."""

    question: str
    options: tuple[str, ...]
    """In the same order for all questions of the same form."""
    right: int
    kind: str
    """presence, laterality or severity."""


_FORMS = {
    "presence": (
        "Which of these findings does the radiograph show?",
        "What does this film demonstrate?",
        "Choose the finding that is seen here.",
        "Which abnormality is present in the image?",
        "Name the finding of this study.",
        "Which answer describes the chest?",
    ),
    "laterality": (
        "Where is the {} on this radiograph, if there is any?",
        "On which side is the {}, if it is present?",
        "Is {} seen in the image, and on which side?",
        "Which answer describes the place of the {}?",
        "Name the side of the {}.",
        "Does this film demonstrate {}, left or right?",
    ),
    "severity": (
        "How severe is the {} on this radiograph, if there is any?",
        "To which degree is the {} present?",
        "Is {} seen in the image, and how much of it?",
        "Which answer describes the size of the {}?",
        "Grade the {}.",
        "Does this film demonstrate {}, small or large?",
    ),
}
"""Kind of a question -> its wordings, with {} for the finding. The first is the usual one."""
MOST_FORMS = 6
"""Number of wordings of each kind."""


def choice_questions(view: View) -> Iterator[ChoiceQuestion]:
    """Yield the questions about a frontal view; none about a lateral one.

    Which of four findings is shown, where exactly one of them is clearly visible and no other is
    present; on which side the effusion is; how severe effusion and cardiomegaly are.
    """
    if view.lateral:
        return
    truth = truth_labels(view.findings)
    finding_of = {finding.label: finding for finding in view.findings}
    shown = [label for label in _FINDINGS if truth[label]]
    if len(shown) == 1 and finding_of[shown[0]].extent >= _VISIBLE_EXTENT:
        yield ChoiceQuestion(
            question=_FORMS["presence"][0],
            options=tuple(_FINDINGS.values()),
            right=list(_FINDINGS).index(shown[0]),
            kind="presence",
        )
    effusion = finding_of.get("Pleural Effusion")
    if effusion is None or effusion.extent >= _VISIBLE_EXTENT:
        side = None if effusion is None else effusion.side
        yield _graded(side, "Pleural Effusion", _SIDES, "laterality")
    for label in _GRADED:
        finding = finding_of.get(label)
        severity = None if finding is None else finding.severity
        yield _graded(severity, label, _SEVERITIES, "severity")


def _graded(value: str | None, label: str, words: tuple[str, ...], kind: str) -> ChoiceQuestion:
    """Return the question which of a finding's degrees or sides is right; None: it is absent."""
    name = NAMES[label]
    return ChoiceQuestion(
        question=_FORMS[kind][0].format(name),
        options=(*(f"{word} {name}" for word in words), f"no {name}"),
        right=len(words) if value is None else words.index(value),
        kind=kind,
    )


def wording(question: ChoiceQuestion, name: str, forms: int) -> str:
    """Return the text of a question in one of its first wordings, drawn by a hash of its name."""
    wordings = _FORMS[question.kind][:forms]
    finding = question.options[-1].removeprefix("no ")  # of presence, a finding that is not named
    return wordings[_hash(f"{name} form")[0] % len(wordings)].format(finding)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AskedChoice:
    """A question that is kept, with its options in the order of their letters."""

    place: int
    """Place of the candidate."""
    options: tuple[str, ...]
    right: int


def balanced_choices(
    candidates: Sequence[tuple[str, str, ChoiceQuestion]],
) -> Iterator[AskedChoice]:
    """Yield the candidates (split, name, question) that are kept, with the places of their options.

    For each form within a split, every option is right as often as the rarest, and letters take
    turns; in a small corpus, a form that lacks an answer keeps one question of each. Candidates are
    kept in the order of a hash of their name, so that the result does not depend on their order.
    """
    forms: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (split, _, question) in enumerate(candidates):
        forms[split, question.question].append(place)
    for places in forms.values():
        right = Counter(candidates[place][2].right for place in places)
        limit = min(right[option] for option in range(len(LETTERS))) or 1
        used: Counter[int] = Counter()
        for place in sorted(places, key=lambda place: _hash(candidates[place][1])):
            _, name, question = candidates[place]
            number = used[question.right]
            used[question.right] += 1
            if number >= limit:
                continue
            letter = (number + question.right) % len(LETTERS)
            others = [n for n in range(len(LETTERS)) if n != question.right]
            others.sort(key=lambda option: _hash(f"{name} {option}"))
            others.insert(letter, question.right)
            options = tuple(question.options[option] for option in others)
            yield AskedChoice(place=place, options=options, right=letter)


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
