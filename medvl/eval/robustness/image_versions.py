"""Corrupted versions of images, made-up images, and a source that yields several versions of each
image.

A version depends on (seed, image key, version) only, so that it is the same on any machine and
number of workers, and for every model. It is made from the stored pixels, before a model's own
resizing. Lengths are relative to the shorter side: a version looks the same at every stored size.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import cv2
import numpy as np

from medvl.common.label_names import match_labels, spoken_name
from medvl.data.loading.sources import Source, SourceView
from medvl.errors import EvaluationError
from medvl.eval.classification.scored_images import NO_FINDING
from medvl.eval.zero_shot_classification.prompts import ClassPrompts, PromptSet, load_prompts
from medvl.schema import Sample

STRENGTHS = 5
_GRAIN = 224
"""Number of noise cells along the shorter side: finer noise would disappear when a model shrinks
the image.
"""
_TILES = 4

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""Function of uint8 pixels (H, W) or (H, W, C), a strength from 0 to 4, and a generator."""


def _noise(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    cell = max(1.0, min(height, width) / _GRAIN)
    grain = rng.normal(
        0, 255 * (0.04, 0.08, 0.13, 0.2, 0.3)[strength], (round(height / cell), round(width / cell))
    )
    noise = cv2.resize(grain.astype(np.float32), (width, height), interpolation=cv2.INTER_NEAREST)
    return _to_uint8(image + (noise if image.ndim == 2 else noise[:, :, None]))


def _blur(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    sigma = min(image.shape[:2]) * (0.004, 0.008, 0.014, 0.022, 0.034)[strength]
    return cv2.GaussianBlur(image, (0, 0), sigma)


def _contrast(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    exponent = math.exp((0.15, 0.3, 0.5, 0.75, 1.1)[strength] * rng.choice((-1, 1)))
    scale = (0.9, 0.8, 0.65, 0.5, 0.35)[strength]
    curve = (np.arange(256) / 255) ** exponent
    return cv2.LUT(image, _to_uint8(255 * (0.5 + scale * (curve - 0.5))))


def _crop(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    share = (0.95, 0.88, 0.8, 0.7, 0.6)[strength]
    height, width = (max(1, round(share * side)) for side in image.shape[:2])
    top = rng.integers(image.shape[0] - height + 1)
    left = rng.integers(image.shape[1] - width + 1)
    return np.ascontiguousarray(image[top : top + height, left : left + width])


def _rotation(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    angle = (3, 6, 10, 16, 25)[strength] * rng.choice((-1, 1))
    turn_23 = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle, 1.0)
    return cv2.warpAffine(image, turn_23, (width, height), flags=cv2.INTER_LINEAR)


def _marks(image: np.ndarray, strength: int, rng: np.random.Generator) -> np.ndarray:
    marked, (height, width) = image.copy(), image.shape[:2]
    size = min(height, width) * (0.05, 0.06, 0.075, 0.09, 0.11)[strength]  # of a letter
    # cv2's letters are 22 pixels high at scale 1
    scale = size / 22
    weight = max(1, round(size / 7))
    for _ in range((1, 2, 4, 7, 11)[strength]):
        letters = "".join(
            rng.choice(list("ABCDEFHKLMNPRSTUWX0123456789:/"), int(rng.integers(1, 8)))
        )
        (across, down), _ = cv2.getTextSize(letters, cv2.FONT_HERSHEY_SIMPLEX, scale, weight)
        x = rng.uniform(0, max(1, width - across))
        y = rng.uniform(down, max(down + 1, height))
        color = (255,) * (1 if image.ndim == 2 else image.shape[2])
        origin = (round(x), round(y))
        cv2.putText(
            marked, letters, origin, cv2.FONT_HERSHEY_SIMPLEX, scale, color, weight, cv2.LINE_AA
        )
    return marked


CORRUPTIONS: Mapping[str, Corruption] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "crop": _crop,
    "rotation": _rotation,
    "marks": _marks,
}
"""noise: Gaussian; blur: Gaussian; contrast: another display curve, brighter or darker, of less
range; crop: a random window; rotation: to either side, black borders; marks: burned-in letters and
digits.
"""


def _made_up_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return noise with the power spectrum of natural images, and the mean and deviation of the
    grey levels.
    """
    side = _GRAIN
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    spectrum = (
        rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
    ) / frequency
    spectrum[0, 0] = 0
    field = np.fft.irfft2(spectrum, (side, side))
    grey = cv2.resize((field / (field.std() or 1)).astype(np.float32), image.shape[1::-1])
    grey = grey * float(image.std()) + float(image.mean())
    return _to_uint8(
        grey if image.ndim == 2 else np.repeat(grey[:, :, None], image.shape[2], axis=2)
    )


def _inverted(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 255 - image


def _shuffled(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    down, across = (max(1, side // _TILES) for side in image.shape[:2])
    image = image[: down * _TILES, : across * _TILES]
    if image.shape[0] < down * _TILES or image.shape[1] < across * _TILES:
        return image.copy()
    tiles = (
        image.reshape(_TILES, down, _TILES, across, -1)
        .swapaxes(1, 2)
        .reshape(_TILES**2, down, across, -1)
    )
    mixed = (
        tiles[rng.permutation(_TILES**2)].reshape(_TILES, _TILES, down, across, -1).swapaxes(1, 2)
    )
    return np.ascontiguousarray(mixed.reshape(image.shape))


MADE_UP: Mapping[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "natural noise": _made_up_noise,
    "inverted": _inverted,
    "shuffled tiles": _shuffled,
}
"""Images that are not radiographs, made from radiographs: with the same grey levels, or all of
the same pixels.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """A version of an image: a corruption at a strength from 1 to 5, or a name of `MADE_UP`
    (strength 0).
    """

    name: str
    strength: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.strength}" if self.strength else self.name

    def apply(self, image: np.ndarray, key: str, seed: int) -> np.ndarray:
        """Return the version of an image, uint8."""
        digest = hashlib.blake2b(f"{seed}/{key}/{self.name}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        if self.strength:
            return CORRUPTIONS[self.name](image, self.strength - 1, rng)
        return MADE_UP[self.name](image, rng)


def corruption_versions(names: Sequence[str]) -> list[Version]:
    """Return every strength of some corruptions. Raises EvaluationError for an unknown name."""
    _check_names(names, CORRUPTIONS, "corruptions")
    return [Version(name, strength) for name in names for strength in range(1, STRENGTHS + 1)]


def made_up_versions(names: Sequence[str]) -> list[Version]:
    """Return some of the images of `MADE_UP`. Raises EvaluationError for an unknown name."""
    _check_names(names, MADE_UP, "made_up")
    return [Version(name) for name in names]


def _check_names(names: Sequence[str], known: Collection[str], field: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        message = (
            f"expected {field.replace('_', '-')} among {', '.join(known)}, got {', '.join(unknown)}"
        )
        raise EvaluationError(message, "unknown_name", field=field)


class VersionSource(SourceView):
    """Source with all versions of the first image, then all versions of the second, and so on.

    Reading in order decodes each image once for each worker process. Samples have no text unless
    `texts` is set.
    """

    def __init__(
        self, source: Source, versions: Sequence[Version], seed: int, *, texts: bool = False
    ) -> None:
        content = [str(source.fingerprint), str(seed), *map(str, versions)]
        super().__init__(source, "\n".join(content).encode())
        self.versions = tuple(versions)
        self.seed = seed
        self.texts = texts
        self._last: tuple[tuple[int, bool | None], str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.source) * len(self.versions)

    def key(self, image: str, version: int) -> str:
        """Return the key of a version of an image."""
        return f"{image}-version{version}"

    def sample(self, position: int) -> Sample:
        """Return the sample of a version; its key is that of the image and the number of the
        version.
        """
        image, version = divmod(position, len(self.versions))
        sample = self.source.sample(image)
        sections = sample.sections if self.texts else {}
        return dataclasses.replace(sample, key=self.key(sample.key, version), sections=sections)

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the pixels of a version."""
        image, version = divmod(position, len(self.versions))
        if self._last is None or self._last[0] != (image, color):
            self._last = (
                (image, color),
                self.source.sample(image).key,
                self.source.pixels(image, color),
            )
        _, key, pixels = self._last
        return self.versions[version].apply(pixels, key, self.seed)


def _to_uint8(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


# Sentences of the tests: statements about findings, their denials, and paraphrases of both.

PARAPHRASES: Mapping[str, tuple[str, str]] = {
    "seen": ("{} can be seen.", "No {} can be seen."),
    "evidence": ("Evidence of {}.", "No evidence of {}."),
    "consistent": ("Findings are consistent with {}.", "Findings are not consistent with {}."),
    "patient": ("The patient has {}.", "The patient does not have {}."),
    "shows": ("The radiograph shows {}.", "The radiograph shows no {}."),
    "name alone": ("{}", "no {}"),
}
"""Name -> a statement and its denial, with {} for the finding."""


def statements(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return class -> "There is X." and "There is no X.", without No Finding, whose denial
    asserts a finding.
    """
    known = load_prompts("chexpert_pairs").classes
    known_as = {name: finding for finding, name in match_labels(list(known), names).items()}
    pairs = {}
    for name in names:
        if name in known_as:
            pairs[name] = known[known_as[name]].positive[0], known[known_as[name]].negative[0]
        else:
            noun = spoken_name(name)
            pairs[name] = _fill("There is {}.", noun), _fill("There is no {}.", noun)
    return {name: pair for name, pair in pairs.items() if name != NO_FINDING}


def paraphrases(names: Sequence[str]) -> list[PromptSet]:
    """Return a prompt set of `statements` and of each of `PARAPHRASES`, scored by the margin of
    the two sentences.
    """
    pairs = statements(names)
    nouns = {
        name: re.sub(r"^There (is|are) no |\.$", "", denial) for name, (_, denial) in pairs.items()
    }
    wordings = {"there is": pairs}
    for name, templates in PARAPHRASES.items():
        wordings[name] = {
            label: (_fill(templates[0], noun), _fill(templates[1], noun))
            for label, noun in nouns.items()
        }
    sets = []
    for name, sentences in wordings.items():
        classes = {
            label: ClassPrompts(positive=(one,), negative=(other,))
            for label, (one, other) in sentences.items()
        }
        prompts = PromptSet(
            name=name,
            version=1,
            description="",
            scoring="margin",
            temperature=1.0,
            ensemble="similarity_mean",
            classes=classes,
            sha256=hashlib.sha256(repr(classes).encode()).hexdigest(),
        )
        sets.append(prompts)
    return sets


def _fill(template: str, noun: str) -> str:
    filled = template.format(noun)
    return filled[:1].upper() + filled[1:] if template.endswith(".") else filled
