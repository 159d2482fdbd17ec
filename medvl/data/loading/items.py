"""Rows of a batch: the augmented images, texts and targets of one sample.

The boxes of a phrase are drawn on a picture that is augmented with the same draws as the image, so
that any transform moves both alike. Phrases whose boxes the crop removed are left out. A phrase
without boxes covers no cell.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations import Phrase, all_phrases_of, published_size
from medvl.data.images.codecs import JpegImage
from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.sentences import join_texts
from medvl.data.shards.format import label_row
from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import BuiltTransform, ImageTransform, ReadsTexts, Transformed
from medvl.data.transforms.operations import EncodedCrop, encoded_views, stack_views
from medvl.data.transforms.text import (
    REPORT_SECTIONS,
    OptionTexts,
    SamplePolicy,
    Statements,
    TextPair,
    TextPolicy,
    choose_sections,
)
from medvl.data.transforms.turning import mirror_labels, texts_and_names
from medvl.data.volumes.transform import CutVolume, VolumeTransform
from medvl.errors import ConfigError
from medvl.schema import FINDINGS, NEGATIVE, ORGANS, UNCERTAIN, Inputs, Sample

if TYPE_CHECKING:
    from medvl.data.loading.dense_targets import DenseTargets


PHRASE_CELLS = 32
"""Cells along a side, which models average over those of their own grid."""
MOST_PHRASES = 4
"""Phrases of an image in an epoch; of more, some are drawn at random."""
_PICTURE = 512
"""Longer side of a picture of boxes whose image is not read."""
_INK = 255
_FLAT = 16
"""Range of grey levels of a picture without an edge of a box."""


class BoxedPhrase(NamedTuple):
    """A phrase, and the share of each cell that its boxes cover."""

    text: str
    cover_HW: NDArray[np.uint8]
    """(PHRASE_CELLS, PHRASE_CELLS); 255 is all of a cell."""


def boxed_phrases(
    sample: Sample,
    shape: tuple[int, ...] | None,
    transform: BuiltTransform,
    rng_for: Callable[[str], np.random.Generator],
) -> tuple[BoxedPhrase, ...]:
    """Return up to `MOST_PHRASES` phrases of a sample (`all_phrases_of`).

    Args:
        sample: of the image; without annotations, there are no phrases.
        shape: of the stored image; None where it is not read, for the published one's proportions.
        transform: augmentation of the image.
        rng_for: function from "image" to a new generator with the draws of the image, and from
            "phrases" to that of the choice of phrases.

    Raises CorpusError when the annotations are malformed.
    """
    phrases = all_phrases_of(sample)
    if len(phrases) > MOST_PHRASES:
        chosen = sorted(
            rng_for("phrases").choice(len(phrases), MOST_PHRASES, replace=False).tolist()
        )
        phrases = tuple(phrases[place] for place in chosen)
    result = []
    for phrase in phrases:
        cover_HW = np.zeros((PHRASE_CELLS, PHRASE_CELLS), np.uint8)
        if phrase.boxes:
            published = published_size(sample)
            picture = _drawn(phrase, shape or _reduced(published), published)
            cover_HW = _cover(transform(picture, rng_for("image")).image_HWC)
        if not phrase.boxes or cover_HW.any():
            result.append(BoxedPhrase(phrase.text, cover_HW))
    return tuple(result)


def _reduced(size: tuple[int, int]) -> tuple[int, int]:
    """Return a size with the same proportions and a longer side of `_PICTURE`, in pixels."""
    height, width = (max(1, round(side * _PICTURE / max(size))) for side in size)
    return height, width


def _drawn(phrase: Phrase, shape: tuple[int, ...], published: tuple[int, int]) -> NDArray[np.uint8]:
    """Return a black picture of a shape with white boxes."""
    picture = np.zeros(shape, np.uint8)
    down = shape[0] / published[0]
    across = shape[1] / published[1]
    for box in phrase.boxes:
        left, top, width, height = (float(str(box[side])) for side in ("x", "y", "width", "height"))
        rows = slice(max(0, round(top * down)), max(1, round((top + height) * down)))
        columns = slice(max(0, round(left * across)), max(1, round((left + width) * across)))
        picture[rows, columns] = _INK
    return picture


def _cover(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the share of each cell that is white, whatever brightness, contrast and blur did."""
    grey_HW = image_HWC[:, :, 0].astype(np.float32)
    lowest, highest = float(grey_HW.min()), float(grey_HW.max())
    middle = (lowest + highest) / 2 if highest - lowest > _FLAT else _INK / 4
    white_HW = (grey_HW > middle).astype(np.float32) * _INK
    return cv2.resize(white_HW, (PHRASE_CELLS, PHRASE_CELLS), interpolation=cv2.INTER_AREA).astype(
        np.uint8
    )


def stack_phrases(rows: Sequence[Sequence[BoxedPhrase]]) -> tuple[list[list[str]], Tensor]:
    """Return the texts of each row, and (B, S, PHRASE_CELLS, PHRASE_CELLS) uint8, zeros for
    padding; S is at least 1.
    """
    longest = max(1, *map(len, rows))
    cover_BSHW = np.zeros((len(rows), longest, PHRASE_CELLS, PHRASE_CELLS), np.uint8)
    for row, phrases in enumerate(rows):
        for place, phrase in enumerate(phrases):
            cover_BSHW[row, place] = phrase.cover_HW
    texts = [[phrase.text for phrase in phrases] for phrases in rows]
    return texts, torch.from_numpy(cover_BSHW)


class OrganText(NamedTuple):
    """What a report states about an organ."""

    text: str
    """Empty for a sample without a report."""
    normal: bool


NO_IMAGE = "no_image"
"""Reason for skipping a sample without an image, also the code of ImageError. It does not count
as unreadable.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that is left out of its batch: an unreadable one, or one without an image or a
    text that is needed.
    """

    key: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One row of a batch."""

    key: str
    study: str
    image_HWC: np.ndarray
    text: str
    labels_L: np.ndarray
    image_key: str | None = None
    """Equal for items that share one image. None: the item has its own image."""
    second_image_HWC: np.ndarray | None = None
    second_text: str | None = None
    prior_image_HWC: np.ndarray | None = None
    """None: the sample has no previous image, or the system needs none."""
    other_views_HWC: tuple[np.ndarray, ...] = ()
    """Other images of the study, where the system needs them."""
    has_image: bool = True
    """False: the sample has no image, and its pixels are a placeholder."""
    entities: tuple[int, ...] = ()
    """Distinct entities in all sections, where the system needs them."""
    regions: Regions | None = None
    """None: the system reads pixels, or the sample has no image."""
    other_regions: tuple[Regions, ...] = ()
    """Regions of other images of the study, where the system needs them."""
    target: Any = None
    """Target that `DenseTargets` made; None without it."""
    positions: tuple[int, ...] = ()
    """Class of the position of each label's finding, where the system needs it."""
    statements: tuple[str, ...] = ()
    """All statements, where the system needs them."""
    augmentation_VK: np.ndarray | None = None
    """Parameters of the augmentation that is left to the device; None: the images are augmented."""
    encoded: tuple[EncodedCrop | None, ...] = ()
    """Images that the device decodes, in the order of `augmentation_VK`; None: it is decoded."""
    prompt: tuple[int, ...] = ()
    """Ids of the prompt, where the system needs it."""
    volume: CutVolume | None = None
    """None: the loader reads no volumes."""
    slices_NCHW: np.ndarray | None = None
    """uint8 RGB slices of a volume; None: the loader reads no slices, or one, as an image."""
    phrases: tuple[BoxedPhrase, ...] = ()
    """Where the system needs them."""
    findings: tuple[int, ...] = ()
    """Values of the findings of the report, where the system reads denied texts."""
    organs: tuple[OrganText, ...] = ()
    """Likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Views:
    """The augmented images of one sample, or placeholders."""

    image: Transformed
    second: Transformed | None = None
    prior: Transformed | None = None
    others: tuple[Transformed, ...] = ()
    has_image: bool = True
    regions: Regions | None = None
    other_regions: tuple[Regions, ...] = ()
    prior_sections: Mapping[str, str] | None = None
    """Sections of the prior report, where the system reads it."""
    volume: CutVolume | None = None
    slices_NCHW: np.ndarray | None = None
    phrases: tuple[BoxedPhrase, ...] = ()


NO_PIXELS = Transformed(np.zeros((0, 0, 1), np.uint8))
"""Image of samples whose regions, volumes or slices are read."""


def sample_rng(seed: int, epoch: int, key: str, purpose: str) -> np.random.Generator:
    """Return the random generator of one sample in one epoch; each purpose has an independent
    one.
    """
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, epoch, key, purpose))))


def sample_rngs(
    seed: int, places: Sequence[tuple[int, str, str]]
) -> dict[tuple[int, str, str], np.random.Generator]:
    """Return the `sample_rng` of each (epoch, key, purpose), in a sixth of the time."""
    digests = b"".join(_digest(seed, *place) for place in places)
    entropy_B4 = np.frombuffer(digests, ">u4").reshape(-1, 4)[:, ::-1].astype(np.uint32)
    return {
        place: np.random.Generator(np.random.PCG64(_KnownWords(words_4)))
        for place, words_4 in zip(places, seed_words(entropy_B4), strict=True)
    }


def _digest(seed: int, epoch: int, key: str, purpose: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{epoch}/{key}/{purpose}".encode(), digest_size=16).digest()


class _KnownWords(np.random.SeedSequence):
    """A seed sequence whose words are known, so that they are not computed."""

    def __init__(self, words_4: NDArray[np.uint64]) -> None:
        self._words_4 = words_4

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> NDArray[Any]:
        """Return the words that PCG64 asks for."""
        assert (n_words, dtype) == (len(self._words_4), np.uint64), "a generator other than PCG64"
        return self._words_4


def _powers(first: int, factor: int, count: int) -> NDArray[np.uint32]:
    """Return (count, 1): a number times the powers of a factor, modulo 2^32."""
    powers = [first * pow(factor, power, 1 << 32) % (1 << 32) for power in range(count)]
    return np.array(powers, np.uint32)[:, None]


_POOL_K1 = _powers(0x43B0D7E5, 0x931E8875, 17)
_STATE_K1 = _powers(0x8B51F9DD, 0x58F38DED, 9)
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
"""Constants of NumPy's SeedSequence."""


def seed_words(entropy_B4: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return (B, 4): `SeedSequence(entropy).generate_state(4, np.uint64)` of each row of entropy,
    the lowest word first. NumPy keeps that algorithm stable.
    """
    pool_4B = _hashed(entropy_B4.T, _POOL_K1[:5])
    for word in range(4):
        others = [other for other in range(4) if other != word]
        factors_K1 = _POOL_K1[4 + 3 * word : 8 + 3 * word]
        mixed_3B = _LEFT * pool_4B[others] - _RIGHT * _hashed(pool_4B[word], factors_K1)
        pool_4B[others] = _folded(mixed_3B)
    state_8B = _hashed(np.concatenate([pool_4B, pool_4B]), _STATE_K1)
    return np.ascontiguousarray(state_8B.T).astype("<u4").view("<u8").astype(np.uint64)


def _hashed(value_KB: NDArray[np.uint32], factors_K1: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _folded((value_KB ^ factors_K1[:-1]) * factors_K1[1:])


def _folded(value_KB: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return value_KB ^ (value_KB >> np.uint32(16))


class ItemMaker:
    """Image augmentation and text selection for a sample. All randomness comes from (seed, epoch,
    key).

    Second views and texts have generators of their own, so that they leave the first ones as they
    are.
    """

    def __init__(
        self,
        image: ImageTransform | VolumeTransform,
        text: TextPolicy,
        label_names: Sequence[str],
        seed: int,
        inputs: Inputs | None = None,
        targets: "DenseTargets | None" = None,
    ) -> None:
        self.image = image
        self.text = text
        self.targets = targets
        self.label_names = tuple(label_names)
        self.seed = seed
        self.inputs = inputs or Inputs()
        if self.inputs.mirrored_text and getattr(image, "flip", "off") == "plain":
            message = (
                "mirrored texts need images that agree with their text: use image.flip "
                "'swap_text' or 'off'"
            )
            raise ConfigError(message, "conflict", field="image.flip")
        made = targets is not None or self.inputs.boxed_phrases
        if made and getattr(image, "on_device", False):
            message = "boxes are moved with the augmented image: leave image.on_device unset"
            raise ConfigError(message, "conflict", field="image.on_device")
        # checked once: isinstance of a protocol takes as long as a tenth of the augmentation
        self._for_texts = image.for_texts if isinstance(image, ReadsTexts) else None
        self._of_sample = text.of_sample if isinstance(text, SamplePolicy) else None
        self._transforms: dict[
            str, BuiltTransform
        ] = {}  # built in the process that uses them: they do not pickle
        self._blank: Transformed | None = None
        self._rngs: dict[tuple[int, str, str], np.random.Generator] = {}

    def __call__(self, sample: Sample, pixels: np.ndarray | JpegImage, epoch: int) -> Item:
        """Return the item of one sample. `pixels` are uint8, (H, W) or (H, W, 3), or
        a JPEG for a transform that decodes it or leaves it to the device."""
        return self.row(sample, self.views(sample.key, pixels, epoch, sample=sample), epoch)

    def rng(self, epoch: int, key: str, purpose: str) -> np.random.Generator:
        """Return the random generator of one sample in one epoch (`sample_rng`)."""
        ahead = self._rngs.pop((epoch, key, purpose), None)
        return ahead or sample_rng(self.seed, epoch, key, purpose)

    def make_rngs(self, places: Sequence[tuple[int, str, str]]) -> None:
        """Make the generators of a batch, for each (epoch, key, purpose), which `rng` returns once
        each.
        """
        self._rngs = sample_rngs(self.seed, places)

    def views(
        self,
        key: str,
        pixels: np.ndarray | JpegImage,
        epoch: int,
        prior: np.ndarray | JpegImage | None = None,
        sample: Sample | None = None,
        others: Sequence[np.ndarray | JpegImage] = (),
    ) -> Views:
        """Return the augmented images.

        `key` seeds the augmentation, `prior` are the pixels of the previous image, `others` those
        of other images of the study, and `sample` has the texts and names for transforms that flip
        an image only where these allow it (`medvl.data.transforms.turning.texts_and_names`).
        """
        transform = self._transform(sample)
        image = transform(pixels, self.rng(epoch, key, "image"))

        def augment(pixels: np.ndarray | JpegImage, purpose: str) -> Transformed:
            """Return another augmentation, flipped like `image` where the text names sides."""
            rng = self.rng(epoch, key, purpose)
            while True:
                augmented = transform(pixels, rng)
                if self.image.flip != "swap_text" or augmented.flipped == image.flipped:
                    return augmented

        second = augment(pixels, "second image") if self.inputs.second_image else None
        phrases = () if sample is None else self.phrases(key, sample, epoch, pixels.shape)
        return Views(
            image,
            second,
            None if prior is None else augment(prior, "prior image"),
            tuple(
                augment(other, "other view" if number == 1 else f"other view {number}")
                for number, other in enumerate(others, start=1)
            ),
            phrases=phrases,
        )

    def phrases(
        self, key: str, sample: Sample, epoch: int, shape: tuple[int, ...] | None = None
    ) -> tuple[BoxedPhrase, ...]:
        """Return the `boxed_phrases` of a sample, where the system needs them. `key` seeds the
        augmentation; `shape` is that of the stored image, None where it is not read.
        """
        if not self.inputs.boxed_phrases:
            return ()
        rngs = functools.partial(self.rng, epoch, key)
        return boxed_phrases(sample, shape, self._transform(sample), rngs)

    def placeholder(self, color: bool) -> Views:
        """Return black images of the transform's size, for a sample without an image."""
        if self._blank is None:
            pixels = np.zeros((16, 16, 3) if color else (16, 16), np.uint8)
            example = self._transform()(pixels, sample_rng(self.seed, 0, "", "placeholder"))
            self._blank = Transformed(
                np.zeros_like(example.image_HWC), deferred_K=example.deferred_K
            )
        return Views(
            self._blank, self._blank if self.inputs.second_image else None, has_image=False
        )

    def _transform(self, sample: Sample | None = None) -> BuiltTransform:
        image = self.image
        assert not isinstance(image, VolumeTransform), "volumes are cut, not transformed"
        name = ""
        if self._for_texts is not None:
            image = self._for_texts(() if sample is None else texts_and_names(sample))
            name = "" if image is self.image else repr(image)
        if name not in self._transforms:
            self._transforms[name] = image.build()
        return self._transforms[name]

    def row(self, sample: Sample, views: Views, epoch: int, image_key: str | None = None) -> Item:
        """Return the item of one sample and its augmented images. Items with one `image_key`
        share the image.
        """
        if isinstance(self.text, Statements):
            sample = self.text.relabelled(sample)
        labelled = mirror_labels(sample) if self._is_mirrored(views) else sample
        return Item(
            sample.key,
            sample.study,
            views.image.image_HWC,
            self._text(sample, views, epoch, "text"),
            label_row(labelled.labels, self.label_names),
            image_key,
            None if views.second is None else views.second.image_HWC,
            self._text(sample, views, epoch, "second text") if self.inputs.second_text else None,
            None if views.prior is None else views.prior.image_HWC,
            tuple(other.image_HWC for other in views.others),
            views.has_image,
            self._entities(sample, views),
            views.regions,
            views.other_regions,
            None if self.targets is None else self.targets(labelled, views.image),
            self._positions(sample, views) if self.inputs.positions else (),
            self._statements(sample, views, epoch) if self.inputs.statements else (),
            stack_views(views.image, views.second, views.prior, *views.others),
            encoded_views(views.image, views.second, views.prior, *views.others),
            self._prompt(sample, views),
            views.volume,
            views.slices_NCHW,
            tuple(each._replace(text=self._as_image(each.text, views)) for each in views.phrases),
            report_findings(sample) if self.inputs.denied_text else (),
            organ_texts(sample, self.text, functools.partial(self.rng, epoch, sample.key))
            if self.inputs.organs
            else (),
        )

    def _prompt(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the ids of the sample's prompt; left and right as in the augmented image."""
        if self.inputs.prompt is None:
            return ()
        own, prior = (
            None
            if sections is None
            else {name: self._as_image(text, views) for name, text in sections.items()}
            for sections in (sample.sections, views.prior_sections)
        )
        return tuple(self.inputs.prompt(own or {}, prior))

    def _positions(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the class of the position of each label's finding; left and right as in the
        augmented image.
        """
        # Few systems read positions, so that most runs import no labeler.
        from medvl.data.reports.labeler import conventions_named
        from medvl.data.reports.statements import mirrored_positions, positions_of

        named = self.text.conventions if isinstance(self.text, Statements) else "chexpert"
        rules = conventions_named(named)
        text = "\n\n".join(choose_sections(sample.sections, REPORT_SECTIONS))
        positions = positions_of(text, self.label_names, rules)
        return tuple(mirrored_positions(positions) if self._is_mirrored(views) else positions)

    def _statements(self, sample: Sample, views: Views, epoch: int) -> tuple[str, ...]:
        """Return all statements; under a policy without statements, the sample's text is its
        only one.
        """
        if not isinstance(self.text, Statements | OptionTexts):
            text = self._text(sample, views, epoch, "text")
            return (text,) if text.strip() else ()
        rng = sample_rng(self.seed, epoch, sample.key, "statements")
        return tuple(
            self._as_image(text, views) for text in self.text.all_of(self._sections(sample), rng)
        )

    def _sections(self, sample: Sample) -> Mapping[str, str]:
        return sample.sections if self._of_sample is None else self._of_sample(sample)

    def _entities(self, sample: Sample, views: Views) -> tuple[int, ...]:
        """Return the distinct entities of all sections, whichever of them is the item's text."""
        finder = self.inputs.entities
        if finder is None:
            return ()
        texts = [self._as_image(text, views) for text in sample.sections.values()]
        return tuple(dict.fromkeys(entity for text in texts for _, _, entity in finder.find(text)))

    def _text(self, sample: Sample, views: Views, epoch: int, purpose: str) -> str:
        rng = self.rng(epoch, sample.key, purpose)
        if purpose == "second text" and isinstance(self.text, TextPair):
            first = self.text(sample.sections, sample_rng(self.seed, epoch, sample.key, "text"))
            text = self.text.other(sample.sections, first, rng)
        else:
            text = self.text(self._sections(sample), rng)
        return self._as_image(text, views)

    def _as_image(self, text: str, views: Views) -> str:
        """Return a text, with left and right exchanged if the image is flipped and `flip` is
        swap_text.
        """
        return swap_laterality(text) if self._is_mirrored(views) else text

    def _is_mirrored(self, views: Views) -> bool:
        """Return whether left and right are exchanged in texts and names."""
        return views.image.flipped and self.image.flip == "swap_text"


def report_findings(sample: Sample) -> tuple[int, ...]:
    """Return the values of `FINDINGS` in the report of a sample: 1, 0 (or not mentioned) or -1
    (uncertain, or without a report).
    """
    from medvl.data.reports.labeler import label_report

    report = "\n".join(sample.sections.values())
    labels = label_report(report)
    unknown = NEGATIVE if report.strip() else UNCERTAIN
    return tuple(labels.get(name, unknown) for name in FINDINGS)


def organ_texts(
    sample: Sample, policy: TextPolicy, rng: Callable[[str], np.random.Generator]
) -> tuple[OrganText, ...]:
    """Return the text of each organ: what a policy selects of its stored parts
    (`medvl.data.reports.organs`), or the sentence that it shows nothing, where it has none.

    Args:
        sample: with `extra["organs"]["texts"]`, unless it has no report.
        policy: reads the parts of an organ in place of the sections of a report.
        rng: generator of a purpose.
    """
    organs = sample.extra.get("organs")
    texts = organs.get("texts") if isinstance(organs, Mapping) else None
    if not isinstance(texts, Mapping):
        return (OrganText("", False),) * len(ORGANS)
    return tuple(_of_organ(organ, texts.get(organ), policy, rng) for organ in ORGANS)


def _of_organ(
    organ: str, entry: Any, policy: TextPolicy, rng: Callable[[str], np.random.Generator]
) -> OrganText:
    # Only fVLM reads texts of organs, so that most runs import no list of their names.
    from medvl.data.reports.organs import PARTS, template_of

    parts = {part: entry[part] for part in PARTS if entry.get(part)} if entry else {}
    if not parts:
        return OrganText(template_of(organ), True)
    text = policy(parts, rng(f"text of {organ}")) or join_texts(parts.values())
    return OrganText(text, bool(entry.get("normal")))
