"""`medvl shards` for VQA corpora: a sample is an image with its list of questions."""

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert


def vqa_rad(
    root: Path, shared: Flat[ConversionOptions], *, split: Literal["official", "image-disjoint"] = "official"
) -> str:
    """Convert VQA-RAD, from the original release or from MEVF's split files.

    Args:
        root: folder of the questions (VQA_RAD Dataset Public.json, or trainset.json and testset.json) and the images.
        shared: output, resources and storage format.
        split: official divides the questions, so that every test image is also in train; the output is one folder
            "mixed", and each question has its own split. image-disjoint divides the images by a fixed hash.
    """
    from medvl.data.corpora.questions import vqa_rad as corpus

    return _convert(corpus, root, shared, split=split)


def slake(root: Path, shared: Flat[ConversionOptions], *, language: Literal["en", "zh"] = "en") -> str:
    """Convert SLAKE, with the questions of one language.

    Args:
        root: folder of train.json, validate.json, test.json and imgs/.
        shared: output, resources and storage format.
        language: language of the questions.
    """
    from medvl.data.corpora.questions import slake as corpus

    return _convert(corpus, root, shared, language=language)


def vqa_med(
    root: Path,
    shared: Flat[ConversionOptions],
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
        shared: output, resources and storage format.
        categories: keep only the questions of these; modality plane organ, as M3AE does.
    """
    from medvl.data.corpora.questions import vqa_med as corpus

    return _convert(corpus, root, shared, categories=categories)


def path_vqa(root: Path, shared: Flat[ConversionOptions]) -> str:
    """Convert PathVQA, always in colour, for the stains of pathology.

    Args:
        root: folder of qas/ and images/.
        shared: output, resources and storage format.
    """
    from medvl.data.corpora.questions import path_vqa as corpus

    return _convert(corpus, root, shared.replace(color=True))


def _convert(corpus: ModuleType, root: Path, shared: ConversionOptions, **choices: Any) -> str:
    from medvl.data.annotations.questions import questions_of

    deid = shared.deidentifier()
    plan = corpus.plan(root, deid, **choices, follow_links=shared.options.follow_links)
    summary = convert(plan, deid, shared.textless())
    counts = Counter(question.split for record in plan.records for question in questions_of(record.sample))
    return "\n".join([", ".join(f"{count} questions in {split}" for split, count in counts.items()), summary])
