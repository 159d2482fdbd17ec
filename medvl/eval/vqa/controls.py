"""Controls of an evaluation of questions: whether the answers need the image.

* "text_only": the image is the mean of up to 256 training images, so that the question alone
  decides.
* "noise": the image is uniform noise.
* "image_swapped": the image is that of another patient, of the same view and sex where there is
  one; a seeded circle over the images.
* "question_reworded": the question is asked in other words (`reword_question`).
* "earlier_removed": the patient's earlier image is missing, of models that read it.
* "earlier_swapped": the earlier image is another patient's, chosen as for "image_swapped".

A model that reads images loses in all of them but "question_reworded". Differences between two
images need both.

Shape letters: N questions, I images.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.common.config_io import check_choice
from medvl.data.loading.studies import ImageQuestion, QuestionSource, questions_in_split
from medvl.data.shards.regions import RegionManifest, Regions
from medvl.data.shards.source import ShardSource
from medvl.errors import CorpusError, ImageError
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics
from medvl.schema import Sample

TEXT_ONLY = "text_only"
NOISE = "noise"
SWAPPED = "image_swapped"
REWORDED = "question_reworded"
EARLIER_REMOVED = "earlier_removed"
EARLIER_SWAPPED = "earlier_swapped"
CONTROLS = (TEXT_ONLY, NOISE, SWAPPED, REWORDED, EARLIER_REMOVED, EARLIER_SWAPPED)
"""Names of the controls, in the order of tables."""
NO_CONTROLS = "none"
"""Name, alone, for an evaluation without controls."""
TITLES: Mapping[str, str] = {
    TEXT_ONLY: "Text only: mean image",
    NOISE: "Noise for an image",
    SWAPPED: "Image of another patient",
    REWORDED: "Question in other words",
    EARLIER_REMOVED: "Without the earlier image",
    EARLIER_SWAPPED: "Earlier image of another patient",
}
GAIN_OVER_TEXT_ONLY = "gain_over_text_only"
"""Metric: accuracy less that of the text only, paired; the headline of an evaluation."""
GAIN_OVER_ONE_IMAGE = "gain_over_one_image"
"""Metric: accuracy less that without the earlier image, paired."""
GAINS: Mapping[str, str] = {
    TEXT_ONLY: GAIN_OVER_TEXT_ONLY,
    EARLIER_REMOVED: GAIN_OVER_ONE_IMAGE,
}
"""Control -> metric of the gain over it."""

_SIDE = 256
_MOST_IMAGES = 256

Pixels = NDArray[np.uint8]


def control_of(name: str) -> str:
    """Return the subgroup of the rows of a control."""
    return f"control: {name}"


class ControlledQuestions:
    """The questions of a source, each with another image or in other words.

    Args:
        questions: the questions.
        pixels: one image for all questions; None: those of the source.
        image_of: position of the image of each image of the source; None: its own.
        earlier_of: position of the image whose earlier image each image of the source has; None:
            that of `image_of`.
        without_earlier: leave the earlier images out.
        reword: writer of a question in other words; None: as they are.
    """

    def __init__(
        self,
        questions: QuestionSource,
        *,
        pixels: Pixels | None = None,
        image_of: Sequence[int] | None = None,
        earlier_of: Sequence[int] | None = None,
        without_earlier: bool = False,
        reword: Callable[[str], str] | None = None,
    ) -> None:
        self.source = questions.source
        self.questions = questions.questions
        self.label_names = questions.label_names
        self.fingerprint = questions.fingerprint
        self.reads_earlier = questions.reads_earlier
        self.region_manifest: RegionManifest | None = questions.region_manifest
        self._questions = questions
        self._pixels = pixels
        self._image_of = image_of
        self._earlier_of = image_of if earlier_of is None else earlier_of
        self._without_earlier = without_earlier
        self._reword = reword
        self.image_keys = tuple(self._image_key(position) for position in range(len(self)))

    def __len__(self) -> int:
        return len(self.questions)

    def key(self, position: int) -> str:
        """Return the key of the question."""
        return self._questions.key(position)

    def sample(self, position: int) -> Sample:
        """Return the question at `position` as a sample. Raises ShardError."""
        sample = self._questions.sample(position)
        if self._reword is None:
            return sample
        question = self._reword(sample.sections["question"])
        return dataclasses.replace(sample, sections={"question": question})

    def pixels(self, position: int, color: bool | None = None) -> Pixels:
        """Return the image of the control. Raises ImageError or ShardError."""
        if self._pixels is None:
            return self.source.pixels(self._image(position), color)
        if color and self._pixels.ndim == 2:
            return np.repeat(self._pixels[:, :, None], 3, axis=2)
        return self._pixels

    def prior_pixels(self, position: int, color: bool | None = None) -> Pixels | None:
        """Return the earlier image of the control, None where it has none. Raises ImageError or
        ShardError.
        """
        if self._pixels is not None or self._without_earlier:
            return None
        image = self.questions[position].image
        place = image if self._earlier_of is None else int(self._earlier_of[image])
        return self._questions.prior_of_image(place, color)

    def regions(self, position: int) -> Regions:
        """Return the regions of the image of the control. Raises ImageError or ShardError."""
        return self.source.regions(self._image(position))

    def _image(self, position: int) -> int:
        image = self.questions[position].image
        return image if self._image_of is None else int(self._image_of[image])

    def _image_key(self, position: int) -> str:
        return "one" if self._pixels is not None else self.source.key(self._image(position))


def check_controls(names: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen controls in the order of tables; none for "none" alone. Raises ConfigError
    for another name, and for "none" beside one.
    """
    if tuple(names) == (NO_CONTROLS,):
        return ()
    for name in names:
        check_choice(name, CONTROLS, "controls")
    return tuple(name for name in CONTROLS if name in names)


def control_sources(
    questions: QuestionSource,
    train: ShardSource,
    *,
    color: bool,
    seed: int = 0,
    names: Sequence[str] = CONTROLS,
) -> dict[str, ControlledQuestions]:
    """Return the chosen controls that a source of questions allows, by name.

    A source with the regions of a detector has neither a mean image nor noise; one patient alone
    has no other patient's image. The controls of earlier images are of sources that read these.

    Args:
        questions: the evaluated questions.
        train: shards whose images of train, else all of whose images, give the mean image.
        color: whether the model reads RGB images.
        seed: seed of noise and swaps.
        names: chosen controls.
    """
    sources = {}
    if TEXT_ONLY in names and questions.region_manifest is None:
        mean = mean_image(train, color=color)
        sources[TEXT_ONLY] = ControlledQuestions(questions, pixels=mean)
    if NOISE in names and questions.region_manifest is None:
        rng = np.random.default_rng(seed)
        noise = rng.integers(0, 256, (_SIDE, _SIDE), dtype=np.uint8)
        sources[NOISE] = ControlledQuestions(questions, pixels=noise)
    swapped = None
    if SWAPPED in names or EARLIER_SWAPPED in names:
        swapped = swapped_images(questions.source, questions.questions, seed)
    if SWAPPED in names and swapped is not None:
        sources[SWAPPED] = ControlledQuestions(questions, image_of=swapped)
    if REWORDED in names:
        sources[REWORDED] = ControlledQuestions(questions, reword=reword_question)
    if EARLIER_REMOVED in names and questions.reads_earlier:
        sources[EARLIER_REMOVED] = ControlledQuestions(questions, without_earlier=True)
    if EARLIER_SWAPPED in names and questions.reads_earlier and swapped is not None:
        sources[EARLIER_SWAPPED] = ControlledQuestions(questions, earlier_of=swapped)
    return sources


def mean_image(source: ShardSource, *, color: bool, split: str = "train") -> Pixels:
    """Return the mean of up to 256 images, evenly spaced, as uint8 of 256 x 256 pixels.

    Images are those with a question of the split, else those whose sample has this split, else all.
    Unreadable ones are left out. Raises CorpusError if no image is readable.
    """
    places = _training_images(source, split)
    sample = [
        places[int(n)] for n in np.linspace(0, len(places) - 1, min(len(places), _MOST_IMAGES))
    ]
    total = np.zeros((_SIDE, _SIDE, 3) if color else (_SIDE, _SIDE), np.float64)
    count = 0
    for place in sample:
        try:
            pixels = source.pixels(place, color)
        except ImageError:
            continue
        total += cv2.resize(pixels, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA)
        count += 1
    if not count:
        raise CorpusError(f"{source.folder}: expected a readable image, got none", "empty")
    return np.round(total / count).astype(np.uint8)


def _training_images(source: ShardSource, split: str) -> list[int]:
    try:
        return sorted({each.image for each in questions_in_split(source, split)})
    except CorpusError:
        every = range(len(source))
        return [place for place in every if source.sample(place).split == split] or [*every]


def swapped_images(
    source: ShardSource, questions: Sequence[ImageQuestion], seed: int = 0
) -> list[int] | None:
    """Return for each image of the source the position of another patient's image; None where all
    questions are about one patient.

    Images of questions are ordered at random; each takes the next one, in a circle, of another
    patient with the same view and sex, else with the same view, else of any other patient. Images
    without a question keep their own.
    """
    images = sorted({each.image for each in questions})
    samples = {image: source.sample(image) for image in images}
    if len({sample.patient for sample in samples.values()}) < 2:
        return None
    order = [images[int(n)] for n in np.random.default_rng(seed).permutation(len(images))]
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for image in order:
        for group in _groups(samples[image]):
            groups[group].append(image)
    places = {group: {image: n for n, image in enumerate(members)}
              for group, members in groups.items()}  # fmt: skip
    image_of = [*range(len(source))]
    for image in order:
        for group in _groups(samples[image]):
            other = _next_patient(image, groups[group], places[group][image], samples)
            if other is not None:
                image_of[image] = other
                break
    return image_of


def _groups(sample: Sample) -> tuple[tuple[object, ...], ...]:
    """Return the groups of an image, the narrowest first."""
    return (sample.view, sample.sex), (sample.view,), ()


def _next_patient(
    image: int, members: Sequence[int], place: int, samples: Mapping[int, Sample]
) -> int | None:
    count = len(members)
    circle = (members[(place + step) % count] for step in range(1, count))
    patient = samples[image].patient
    return next((other for other in circle if samples[other].patient != patient), None)


_REWORDINGS = (
    (r"(?:is|are) there (?:a |an |any |evidence of )?(.+)", "Does this image show {}?"),
    (r"does (?:this|the) image show (?:a |an |any )?(.+)", "Is there {} in this image?"),
    (r"what (?:is|are) (.+)", "Which is correct: what would you call {}?"),
    (r"which (.+)", "Looking at this image, which {}?"),
    (r"where (?:is|are) (.+)", "In which place do you see {}?"),
    (r"how many (.+)", "What is the number of {}?"),
    (r"how (.+)", "Looking at this image, how {}?"),
)
"""Begin of a question -> the question in other words. None of them changes its answer."""


def reword_question(question: str) -> str:
    """Return a question in other words, by rules; without a rule, with a lead before it.

    The rules keep the meaning and are not always good English: they show whether an answer depends
    on the wording.
    """
    text = " ".join(question.split()).rstrip("?. ")
    for pattern, form in _REWORDINGS:
        match = re.fullmatch(pattern, text, re.IGNORECASE)
        if match is not None:
            return form.format(match[1])
    return f"Regarding this image: {question}"


def control_metrics(
    metric: str,
    main_N: NDArray[np.float64],
    controls: Mapping[str, NDArray[np.float64]],
    masks: Mapping[str, NDArray[np.bool_]],
) -> list[MetricGroup]:
    """Return the mean credit of each control, and the gains over those of `GAINS`, within each
    mask.

    Args:
        metric: name of the mean credit.
        main_N: credits of the answers.
        controls: name -> credits; NaN where there is no answer to compare.
        masks: target -> its questions.
    """
    masks_NK = np.stack(list(masks.values()), axis=1)

    def group(metric: str, values_N: NDArray[np.float64], subgroup: str = "") -> MetricGroup:
        values_NK = np.where(masks_NK, values_N[:, None], np.nan)
        return mean_metrics(metric, values_NK, list(masks), subgroup=subgroup)

    groups = [group(metric, credit_N, control_of(name)) for name, credit_N in controls.items()]
    groups += [
        group(gain, main_N - controls[name]) for name, gain in GAINS.items() if name in controls
    ]
    return groups
