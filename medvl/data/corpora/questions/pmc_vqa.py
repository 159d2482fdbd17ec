"""PMC-VQA: multiple-choice questions about figures of articles. Layout, repairs and counts:
`data_cards/pmc-vqa.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, find_file, malformed, read_table, split_training
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError

_TRAIN = ("train_2.csv", "train.csv")
_TEST = ("test_2.csv", "test.csv")
_CLEAN = ("test_clean.csv",)
_FOLDERS = ("figures", "images")
_CHOICES = ("Choice A", "Choice B", "Choice C", "Choice D")
_COLUMNS = ("Figure_path", "Question", *_CHOICES, "Answer")
_ARTICLE = re.compile(r"PMC\d+")


@register_corpus("pmc-vqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PMCVQA(vqa.QuestionCorpus):
    """Convert PMC-VQA: multiple-choice questions about figures of articles."""

    root: Path
    """folder of train_2.csv, test_2.csv (or train.csv, test.csv) and figures/ or images/."""
    clean: bool = False
    """take test_clean.csv, questions that people checked, as test."""
    validate_share: float = 0.05
    """share of the training articles that become validate."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for each figure with questions; no image is opened. Captions are not
        kept, because they answer most questions.

        Training questions about articles of the test are left out. Raises CorpusError when a table
        is missing or does not match the data card.
        """
        allowed = access.folders(self.root)
        folder = next((self.root / n for n in _FOLDERS if (self.root / n).is_dir()), None)
        if folder is None:
            names = " or ".join(_FOLDERS)
            raise CorpusError(f"{self.root} lacks {names}: unpack the archive", "not_found")
        test = find_file(self.root, *(_CLEAN if self.clean else _TEST))
        train = find_file(self.root, *_TRAIN)
        tested = {article for article, _ in _articles(test, allowed)}
        shares = split_training(self.validate_share)
        rows = RowCounts("questions")
        questions: list[tuple[str, Question]] = []
        places: dict[str, vqa.ImagePlace] = {}
        for file in (test, train):
            for number, (article, row) in enumerate(rows.reading(_articles(file, allowed)), 1):
                if file is train and article in tested:
                    rows.exclude("article_in_test")
                    continue
                split = "test" if file is test else hash_split(deid.patient(article), shares)
                question = _question(f"{file.stem}-{number}", row, split)
                if question is None:
                    rows.exclude("malformed_options")
                    continue
                image = vqa.check_image_name(file, row["Figure_path"].strip())
                questions.append((image, question))
                places[image] = vqa.ImagePlace(file=folder / image, patient=article, study=image)
        return vqa.plan_questions(
            self.corpus, deid, places, questions, rows, Counter(), folders=allowed
        )


def _articles(file: Path, allowed: InputFolders) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the article of each row, from the name of its figure, and the row."""
    for row in read_table(file, _COLUMNS, allowed):
        match = _ARTICLE.search(row["Figure_path"])
        if match is None:
            raise malformed(file, "expected a name like PMC1234_fig.jpg", "Figure_path")
        yield match[0], row


def _question(name: str, row: Mapping[str, str], split: str) -> Question | None:
    """Return the question; None where its options are malformed."""
    fields = vqa.choice_fields([row[column] for column in _CHOICES], row["Answer"])
    if fields is None:
        return None
    return Question(id=name, question=vqa.clean_text(row["Question"]), split=split, **fields)
