"""`medvl shards` for VQA corpora: a sample is an image with its list of questions."""

import dataclasses
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from medvl.cli.shards.corpora import Flat, convert, deidentifier
from medvl.data.convert.options import ShardOptions, ShardRun


def vqa_rad(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    split: Literal["official", "image-disjoint"] = "official",
) -> str:
    """Convert VQA-RAD, from the original release or from MEVF's split files.

    Args:
        root: folder of the questions (VQA_RAD Dataset Public.json, or trainset.json and testset.json) and the images.
        run: output folder, budget, workers.
        options: storage format of the images.
        split: official divides the questions, so that every test image is also in train; the output is one folder
            "mixed", and each question has its own split. image-disjoint divides the images by a fixed hash.
    """
    from medvl.data.corpora.questions import vqa_rad as corpus

    return _convert(corpus, root, run, options, split=split)


def slake(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions], *, language: Literal["en", "zh"] = "en") -> str:
    """Convert SLAKE, with the questions of one language.

    Args:
        root: folder of train.json, validate.json, test.json and imgs/.
        run: output folder, budget, workers.
        options: storage format of the images.
        language: language of the questions.
    """
    from medvl.data.corpora.questions import slake as corpus

    return _convert(corpus, root, run, options, language=language)


def vqa_med(
    root: Path,
    run: Flat[ShardRun],
    options: Flat[ShardOptions],
    *,
    categories: tuple[Literal["modality", "plane", "organ", "abnormality"], ...] = (
        "modality",
        "plane",
        "organ",
        "abnormality",
    ),
) -> str:
    """Convert ImageCLEF VQA-Med 2019.

    Args:
        root: folder that contains the unpacked archives.
        run: output folder, budget, workers.
        options: storage format of the images.
        categories: keep only the questions of these; modality plane organ, as M3AE does.
    """
    from medvl.data.corpora.questions import vqa_med as corpus

    return _convert(corpus, root, run, options, categories=categories)


def path_vqa(root: Path, run: Flat[ShardRun], options: Flat[ShardOptions]) -> str:
    """Convert PathVQA, in colour.

    Args:
        root: folder of qas/ and images/.
        run: output folder, budget, workers.
        options: storage format of the images; colour is always kept, for the stains of pathology.
    """
    from medvl.data.corpora.questions import path_vqa as corpus

    return _convert(corpus, root, run, dataclasses.replace(options, color=True))


def _convert(corpus: ModuleType, root: Path, run: ShardRun, options: ShardOptions, **choices: Any) -> str:
    from medvl.data.annotations.questions import questions_of

    deid = deidentifier(run.salt_file, new_salt=run.new_salt)
    plan = corpus.plan(root, deid, **choices, follow_links=options.follow_links)
    summary = convert(plan, deid, run, dataclasses.replace(options, keep_textless=True))
    counts = Counter(question.split for record in plan.records for question in questions_of(record.sample))
    return "\n".join([", ".join(f"{count} questions in {split}" for split, count in counts.items()), summary])
