"""Studies as samples: one image of each study, together with the other images of it."""

import dataclasses
import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from medvl.data.annotations import LETTERS, Question, frontal_or_lateral, questions_of
from medvl.data.loading.sources import Source, SourceView, Subset, has_volumes
from medvl.data.shards.regions import Regions
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

_log = logging.getLogger(__name__)

Read = TypeVar("Read")
"""Image as a loader reads it."""


class StudySource(Subset):
    """Source with one sample per study: its first image, and the other images of it. Reads all
    samples once.

    Images are ordered by `extra["image_number"]` where the corpus has one, then frontal views
    before lateral ones, then as in the source. Of the other images, those of the other projection
    (frontal or lateral) come first.
    """

    def __init__(self, source: Source) -> None:
        studies: defaultdict[tuple[str, str], list[tuple[int, bool, int]]] = defaultdict(list)
        for position in range(len(source)):
            sample = source.sample(position)
            number = sample.extra.get("image_number", 0)
            lateral = frontal_or_lateral(sample.view) == "lateral"
            order = (number if isinstance(number, int) else 0, lateral, position)
            studies[sample.patient, sample.study].append(order)
        rows = sorted(_first_and_others(sorted(images)) for images in studies.values())
        super().__init__(source, [first for first, *_ in rows])
        self._images = np.array([place for images in rows for place in images], np.int64)
        self._ends = np.cumsum([len(images) for images in rows])

    def images_of(
        self,
        position: int,
        read: Callable[[int], Read | None],
        limit: int,
        rng: np.random.Generator | None = None,
    ) -> list[Read]:
        """Return at most `limit` images of a study: the first ones, or with `rng` any.

        `read` returns the image at a position of the source, None where it has none; samples
        without an image are passed over.
        """
        places = self._images[self._ends[position - 1] if position else 0 : self._ends[position]]
        if rng is not None:
            places = rng.permutation(places)
        images = (image for place in places if (image := read(int(place))) is not None)
        return list(itertools.islice(images, limit))

    def beyond(self, limit: int) -> tuple[int, int]:
        """Return how many studies have more than `limit` images, and the number of these images."""
        more_N = np.maximum(np.diff(self._ends, prepend=0) - limit, 0)
        return int((more_N > 0).sum()), int(more_N.sum())

    def warn_beyond(self, limit: int) -> None:
        """Log a warning where studies have more than `limit` images."""
        studies, images = self.beyond(limit)
        if studies:
            _log.warning(
                "%d of %d studies have more than %d images; %d of their images are not read",
                *(studies, len(self), limit, images),
            )


def by_study(source: Source) -> StudySource:
    """Return a source of studies. Raises ConfigError where rows have weights or share images."""
    weights = getattr(source, "weights", None)
    if weights is not None or getattr(source, "image_keys", None) is not None:
        message = (
            "studies are read once each: leave weights out, and take a source with one "
            "row for each image"
        )
        raise ConfigError(message, "conflict", field="other_views")
    return StudySource(source)


def _first_and_others(images: list[tuple[int, bool, int]]) -> list[int]:
    """Return the positions of a study's images, those of the other projection second."""
    (_, lateral, first), *others = images
    others.sort(key=lambda image: image[1] == lateral)
    return [first, *(place for *_, place in others)]


class ScanSource(SourceView):
    """Source with one sample per scan, drawn in each epoch from its reconstructions, which share
    their report (HLIP). Reads all samples once.
    """

    def __init__(self, source: Source) -> None:
        scans: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for position in range(len(source)):
            sample = source.sample(position)
            scans[sample.patient, sample.study].append(position)
        self._positions = list(scans.values())
        super().__init__(source, f"{source.fingerprint} one a scan".encode())

    def __len__(self) -> int:
        return len(self._positions)

    def source_position(self, position: int) -> int:
        return self._positions[position][0]

    def drawn(self, epoch: int, position: int, seed: int) -> int:
        """Return the position in the source of the reconstruction of an epoch."""
        positions = self._positions[position]
        rng = np.random.default_rng((seed, epoch, position))
        return positions[int(rng.integers(len(positions)))]


def one_a_scan(source: Source) -> Source:
    """Return a source of scans (`ScanSource`) where scans have several volumes, else the same one.

    Reconstructions of a scan share its report; in one batch, each would be a negative of the
    others.

    Raises ConfigError where rows have weights, which scans would lose.
    """
    if not has_volumes(source):
        return source
    scans = ScanSource(source)
    if len(scans) == len(source):
        return source
    if getattr(source, "weights", None) is not None:
        raise ConfigError(
            "weights are of volumes, and scans have several, of which an epoch draws one: leave "
            "weights out, or convert one reconstruction of each scan",
            "conflict",
            field="data.weights",
        )
    return scans


# The previous image of each sample's patient, for systems that compare an image with an earlier
# one.

NO_PRIOR = -1
_FRONTAL = ("AP", "PA", "FRONTAL")


def prior_positions(source: Source) -> np.ndarray:
    """Return the position of each sample's prior image: (N,) int64, -1 where there is none. Reads
    all samples once.

    `extra["prior"]` of a sample, the key of another one, decides where it exists. Otherwise the
    prior image is of the patient's latest earlier study (`Sample.order`) with an image of the same
    projection (frontal or not), of the same view if that study has one. Samples without an order,
    and keys that are not in the source, have none.
    """
    positions: dict[str, int] = {}
    explicit: dict[int, str] = {}
    studies: defaultdict[tuple[str, bool], defaultdict[int, list[tuple[int, str | None]]]]
    studies = defaultdict(lambda: defaultdict(list))
    for position in range(len(source)):
        sample = source.sample(position)
        positions[sample.key] = position
        if "prior" in sample.extra:
            explicit[position] = str(sample.extra["prior"])
        elif sample.order is not None:
            projection = (sample.patient, sample.view is None or sample.view.startswith(_FRONTAL))
            studies[projection][sample.order].append((position, sample.view))
    prior_N = np.full(len(source), NO_PRIOR, np.int64)
    for by_order in studies.values():
        orders = sorted(by_order)
        for earlier, later in itertools.pairwise(orders):
            of_view = {view: position for position, view in reversed(by_order[earlier])}
            first = by_order[earlier][0][0]
            for position, view in by_order[later]:
                prior_N[position] = of_view.get(view, first)
    for position, key in explicit.items():
        prior_N[position] = positions.get(key, NO_PRIOR)
    return prior_N


# VQA shards as a source with one sample per question.


class ImageQuestion(NamedTuple):
    """A question and the position of its image."""

    image: int
    """Position of the sample in the folder of shards."""
    question: Question


class QuestionSource:
    """The questions of one split, each with its image. Label columns are the answers of a
    vocabulary.

    A sample's key combines the image key and a hash of the question id, its text is the section
    "question", and its only label is the answer. A question whose answer is not in the vocabulary
    has no label, and still counts in every denominator. Patient, study and corpus are those of the
    image.

    Args:
        source: shards of a VQA corpus.
        split: split of the questions, which may differ from that of their images
            (`medvl.data.annotations.MIXED`).
        vocabulary: normalized answers.
        normalize: answer normalizer; must be picklable (a module-level function) for the loader's
            workers.
        earlier: find the prior image of each sample (`prior_positions`), for questions about a
            difference.

    Attributes:
        questions: the questions with the positions of their images.
        reads_earlier: whether it finds earlier images.
        image_keys: image key of each question; questions about one image are adjacent.

    Raises:
        CorpusError: the shards hold no question of that split.
        ConfigError: `earlier`, and no image has a prior one.
    """

    def __init__(
        self,
        source: ShardSource,
        split: str,
        vocabulary: Sequence[str],
        normalize: Callable[[str], str],
        *,
        earlier: bool = False,
    ) -> None:
        self.source = source
        self.reads_earlier = earlier
        self._prior_N = prior_positions(source) if earlier else None
        if self._prior_N is not None and (self._prior_N == NO_PRIOR).all():
            message = (
                f"{source.folder}: no image has an earlier one; leave earlier_image, or prior of a "
                f"writer, out"
            )
            raise ConfigError(message, "unsupported", field="earlier_image")
        self.split = split
        self.normalize = normalize
        self.label_names = tuple(vocabulary)
        self.region_manifest = source.region_manifest
        self._known = frozenset(vocabulary)
        self.questions = questions_in_split(source, split)
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        content = "\n".join([source.fingerprint, split, *self.label_names, *["earlier"] * earlier])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.questions)

    def key(self, position: int) -> str:
        """Return the image key with a hash of the question id, which may contain any character."""
        image, question = self.questions[position]
        return f"{self.source.key(image)}-{hashlib.sha256(question.id.encode()).hexdigest()[:8]}"

    def sample(self, position: int) -> Sample:
        """Return the question at `position` as a sample. Raises ShardError."""
        image_position, question = self.questions[position]
        image = self.source.sample(image_position)
        answer = self.normalize(question.answer)
        return Sample(
            key=self.key(position),
            corpus=image.corpus,
            split=question.split,
            patient=image.patient,
            study=image.study,
            sections={"question": question.question},
            labels={answer: 1} if answer in self._known else {},
            view=image.view,
            sex=image.sex,
            age=image.age,
        )

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image of the question at `position`. Raises ImageError or
        ShardError.
        """
        return self.source.pixels(self.questions[position].image, color)

    def image_bytes(self, position: int) -> bytes:
        """Return the encoded image of the question at `position`."""
        return self.source.image_bytes(self.questions[position].image)

    def prior_pixels(self, position: int, color: bool | None = None) -> np.ndarray | None:
        """Return the decoded image before that of the question at `position`, None where there is
        none or it is not needed. Raises ImageError or ShardError.
        """
        return self.prior_of_image(self.questions[position].image, color)

    def prior_of_image(self, image: int, color: bool | None = None) -> np.ndarray | None:
        """Return the decoded image before that at a position of the shards, as `prior_pixels`."""
        prior = NO_PRIOR if self._prior_N is None else int(self._prior_N[image])
        return None if prior == NO_PRIOR else self.source.pixels(prior, color)

    def regions(self, position: int) -> Regions:
        """Return the regions of the image of the question at `position`. Raises ImageError or
        ShardError.
        """
        return self.source.regions(self.questions[position].image)


class OptionSource(QuestionSource):
    """The questions of one split with several options and one right one, for systems that score
    options. The section "question" of a sample is its question, that of a letter the question with
    this option; labels are 1 for the right letter and 0 for the others of a question.

    Args:
        source: shards of a VQA corpus.
        split: split of the questions.

    Raises CorpusError without such a question of that split.
    """

    def __init__(self, source: ShardSource, split: str) -> None:
        super().__init__(source, split, (), _as_written)
        self.questions = _with_one_right(self.questions, source, split)
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        most = max(len(question.options) for _, question in self.questions)
        self.label_names = tuple(LETTERS[:most])
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} options".encode()).hexdigest()

    def sample(self, position: int) -> Sample:
        """Return the question at `position` as a sample. Raises ShardError."""
        question = self.questions[position].question
        letters = LETTERS[: len(question.options)]
        texts = map(question.with_option, question.options)
        return dataclasses.replace(
            super().sample(position),
            sections={"question": question.question, **dict(zip(letters, texts, strict=True))},
            labels={letter: int(n in question.right) for n, letter in enumerate(letters)},
        )


class AnswerSource(QuestionSource):
    """The questions of one split with their answers as texts, for writers of answers: sections
    "question" and "answer", and no labels.

    Args:
        source: shards of a VQA corpus.
        split: split of the questions.
        letters: list the options in the question, and answer with the letter of the right one. Each
            question is a sample in every cyclic order of its options, so that all letters are right
            equally often. Questions without options, or with several right ones, are left out.
        earlier: see `QuestionSource`.

    Raises CorpusError without a question of that split, ConfigError as `QuestionSource`.
    """

    def __init__(
        self, source: ShardSource, split: str, *, letters: bool = False, earlier: bool = False
    ) -> None:
        super().__init__(source, split, (), _as_written, earlier=earlier)
        self._letters = letters
        if not letters:
            return
        self.questions = tuple(
            ImageQuestion(image, each)
            for image, question in _with_one_right(self.questions, source, split)
            for each in _cyclic_orders(question)
        )
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} letters".encode()).hexdigest()

    def sample(self, position: int) -> Sample:
        """Return the question at `position` as a sample. Raises ShardError."""
        sample = super().sample(position)
        question = self.questions[position].question
        sections = {"question": question.question, "answer": question.answer}
        if self._letters:
            sections = {"question": question.with_letters(), "answer": LETTERS[question.right[0]]}
        return dataclasses.replace(sample, sections=sections)


def _with_one_right(
    questions: Sequence[ImageQuestion], source: ShardSource, split: str
) -> tuple[ImageQuestion, ...]:
    """Return the questions with several options and one right one. Raises CorpusError where there
    is none.
    """
    chosen = tuple(
        each
        for each in questions
        if len(each.question.options) > 1 and len(each.question.right) == 1
    )
    if not chosen:
        message = f"{source.folder}: no question of {split} has options and one right one"
        raise CorpusError(message, "empty", field="questions")
    return chosen


def _cyclic_orders(question: Question) -> Iterator[Question]:
    """Yield a question with one right option once for each place of that option."""
    count = len(question.options)
    for turn in range(count):
        yield dataclasses.replace(
            question,
            id=f"{question.id}/{turn}",
            options=(*question.options[turn:], *question.options[:turn]),
            right=((question.right[0] - turn) % count,),
        )


def question_texts(source: Source) -> Iterator[str]:
    """Yield each question, with its options behind letters where it has some, and its answer."""
    for position in range(len(source)):
        for question in questions_of(source.sample(position)):
            yield question.with_letters() if question.options else question.question
            yield question.answer


def _as_written(answer: str) -> str:
    return answer


def questions_in_split(source: ShardSource, split: str) -> tuple[ImageQuestion, ...]:
    """Return the questions of a split, in the order of the shards. Raises CorpusError when there
    are none.
    """
    everything = [
        ImageQuestion(position, question)
        for position in range(len(source))
        for question in questions_of(source.sample(position))
    ]
    questions = tuple(each for each in everything if each.question.split == split)
    if not questions:
        splits = ", ".join(sorted({each.question.split for each in everything})) or "no questions"
        message = f"{source.folder}: no question has the split {split!r}; found {splits}"
        raise CorpusError(message, "unknown_name", field="split")
    return questions
