"""ImageCLEF VQA-Med 2019. Layout, scoring and counts: `data_cards/vqa-med.md`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.annotations.questions import Question, inferred_type, plan_questions, safe_name, text_of
from medvl.data.corpora.common.tables import Plan, open_text
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "vqa-med"
COUNTS: Mapping[str, int] = {"train": 3_200, "validate": 500, "test": 500}
"""Images of the full release: what `medvl verify --full` compares with."""
CATEGORIES = ("modality", "plane", "organ", "abnormality")

_PARTS = {"train": "train", "validate": "val"}
_REFERENCE = "VQAMed2019_Test_Questions_w_Ref_Answers.txt"
_FOLDERS = {"train": "train_images", "validate": "val_images", "test": "vqamed2019_test_images"}


def plan(root: Path, deid: Deidentifier) -> Plan:
    """Every image with its questions; no image is opened.

    Args:
        root: folder below which the unpacked archives lie, however deep; a split whose files are not there is absent.
        deid: hashes the image names.

    Raises:
        CorpusError: no split is there, a folder of images is missing, or a line has not the fields it should have.
    """
    root = Path(root)
    noticed: Counter[str] = Counter()
    asked: list[tuple[str, Question]] = []
    images: dict[str, Path] = {}
    for split in _FOLDERS:
        rows = list(_test_rows(root) if split == "test" else _category_rows(root, _PARTS[split]))
        if not rows:
            continue
        folder = _folder(root, split)
        for number, (path, image, category, text, answer) in enumerate(rows, 1):
            name = f"{safe_name(path, image)}.jpg"
            images[name] = folder / name
            question = Question(
                id=f"{split}-{number}",  # the release has no ids; its order is fixed
                question=text,
                answer=answer,
                answer_type=inferred_type(answer),
                kind=category,
                split=split,
            )
            noticed.update({"several_answers": 1} if "#" in answer else {}, no_answer=int(not answer))
            asked.append((name, question))
    if not asked:
        raise CorpusError(
            f"{root} holds neither C1_Modality_train.txt and the like nor {_REFERENCE}: see the data card"
        )
    return plan_questions(NAME, deid, images, asked, +noticed)


def iter_samples(root: Path, *, deid: Deidentifier) -> Iterator[Sample]:
    """Samples with their questions. Raises CorpusError."""
    for record in plan(root, deid).records:
        yield record.sample


def _category_rows(root: Path, part: str) -> Iterator[tuple[Path, str, str, str, str]]:
    """(file, image, category, question, answer) of training or validation: `img|question|answer`, a file a category."""
    for number, category in enumerate(CATEGORIES, 1):
        for path in sorted(root.rglob(f"C{number}_*_{part}.txt")):
            for image, question, answer in _lines(path, 3):
                yield path, image, category, question, answer


def _test_rows(root: Path) -> Iterator[tuple[Path, str, str, str, str]]:
    """As `_category_rows`, of the reference file of the test: `img|category|question|answer`."""
    for path in sorted(root.rglob(_REFERENCE)):
        for image, category, question, answer in _lines(path, 4):
            if category not in CATEGORIES:
                raise CorpusError(f"{path}: a category is none of {', '.join(CATEGORIES)}")
            yield path, image, category, question, answer


def _lines(path: Path, fields: int) -> Iterator[list[str]]:
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                parts = [text_of(part) for part in line.split("|", fields - 1)]
                if line.strip() and len(parts) != fields:
                    raise CorpusError(f"{path}, line {number} has {len(parts)} fields and not {fields}")
                if line.strip():
                    yield parts
    except UnicodeDecodeError:
        raise CorpusError(f"{path} is no text in UTF-8: copy it again") from None


def _folder(root: Path, split: str) -> Path:
    """Folders of images are written with capitals that differ from archive to archive."""
    found = [path for path in sorted(root.rglob("*_[iI]mages")) if path.name.lower() == _FOLDERS[split]]
    if not found:
        raise CorpusError(f"{root} holds no folder {_FOLDERS[split]}: unpack the images beside the questions")
    return found[0]
