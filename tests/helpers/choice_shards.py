"""Shards of questions with four options, whose answer is the brightness of the image."""

import atexit
import functools
import tempfile
from collections import Counter
from pathlib import Path

import cv2
import numpy as np

from medvl.data.annotations import Question
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.questions import plan_questions
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.privacy import Deidentifier

LEVELS = ("black", "dark", "grey", "bright")
VALUES = (20, 90, 160, 240)
"""Pixel value of each level."""


@functools.cache
def choice_shards(patients: int = 16, side: int = 32) -> Path:
    """Return a folder of shards, removed at exit, with a folder for each split, of a patient's image
    each.

    Levels and right letters are balanced in each split; the last question has no options.
    """
    temporary = tempfile.TemporaryDirectory(prefix="medvl-choices-")
    atexit.register(temporary.cleanup)
    folder = Path(temporary.name)
    deid = Deidentifier(b"0123456789abcdef")
    questions = []
    images = {}
    for split in ("train", "test"):
        for number in range(patients):
            name = f"{split}{number}"
            level, letter = number % 4, number // 4 % 4
            images[name] = folder / f"{name}.png"
            pixels = np.full((side, side), VALUES[level], np.uint8)
            pixels[0, 0] = number  # no two images are equal
            cv2.imwrite(str(images[name]), pixels)
            order = [(level + place - letter) % 4 for place in range(4)]
            options = tuple(f"{LEVELS[place]} image" for place in order)
            question = Question(
                id=name, question="Which image is it?", answer=options[letter], split=split,
                answer_type="closed", kind="level", options=options, right=(letter,),
            )  # fmt: skip
            questions.append((name, question))
        plain = Question(id=f"{split}plain", question="Is it an image?", answer="yes",
            answer_type="closed", split=split)  # fmt: skip
        questions.append((f"{split}0", plain))
    rows = RowCounts("questions")
    questions = list(rows.reading(questions))
    plan = plan_questions("choices", deid, images, questions, rows, Counter())
    write_shards(plan, deid, ShardRun(out=folder / "shards", workers=1),
                 ShardOptions(short_side=side, keep_textless=True))  # fmt: skip
    return folder / "shards"
