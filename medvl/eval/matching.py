"""Image-text matching: whether a model prefers an image's own text to another text, and to its own
mirror.

Protocol "image_text_matching", version 2:

* An item is an image with a text. Its other text is the text of the next image, in the order of the
  data, of another patient with another text; white space is collapsed. Its mirror is its text with
  left and right exchanged, if it names a side.
* "above_other" is the share of images that score higher with their own text than with the other
  one, "above_mirror" the same for the mirror. A tie counts one half, and 1/2 is chance.
* "accuracy", of fusion-encoders only, is the share of right decisions of the matching head on own
  and other texts: a match has the higher logit, a tie is wrong. Chance is 1/2.
* Fusion-encoders score by the log-odds of a match, dual-encoders by similarity.
* Intervals: patients are resampled with all their images.

Letters: N images with text, M distinct texts, Q pairs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.reports.cleaning import swap_laterality
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, embed_texts, input_hashes, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure, subgroups_of
from medvl.eval.core.metrics import Array
from medvl.eval.core.open import Setup
from medvl.eval.core.results import LineFields, Lines, PageHeader, Results, WritePage, number
from medvl.eval.evaluation import Column, ModelEvaluation, Task, Trial
from medvl.eval.html.page import (
    Card,
    Cards,
    Choice,
    Deck,
    Page,
    Picture,
    Pixels,
    Section,
    header_facts,
    headline,
    thumbnail_uri,
    write_page,
)
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.retrieval.rerank import (
    Encoded,
    check_matching,
    encode_images_with_text,
    encode_texts,
    match_scores,
)
from medvl.eval.retrieval.similarity import encode_images, paired_similarity
from medvl.models.base import System, evaluating
from medvl.models.downstream.ranking import as_matcher
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.schema import Sample

PROTOCOL = "image_text_matching"
PROTOCOL_VERSION = 2
OWN, OTHER, MIRROR = range(3)
"""Columns of the texts and scores of an image."""
COLUMNS = ("own", "other", "mirror")
"""Their names in `predictions.jsonl`."""


class Items(NamedTuple):
    """The texts of the images that have one."""

    position_N: NDArray[np.int64]
    """Index of the image among those that were read."""
    texts: tuple[str, ...]
    """Distinct texts."""
    text_N3: NDArray[np.int64]
    """Index of the own, the other and the mirrored text; -1: there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchingResult:
    """Results, with the images, their texts and scores."""

    results: Results
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    """Position of each image in the source."""
    items: Items
    scores_N3: Array
    """Score of the own, the other and the mirrored text; NaN: there is none."""

    def text(self, row: int, column: int) -> str:
        """Return a text of an image."""
        return self.items.texts[self.items.text_N3[row, column]]

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one JSON line per image: key, patient, subgroups, and the scores."""
        for sample, scores_3 in zip(self.samples, self.scores_N3.tolist(), strict=True):
            scores = {
                name: score
                for name, score in zip(COLUMNS, scores_3, strict=True)
                if not np.isnan(score)
            }
            yield {
                "key": sample.key,
                "patient": sample.patient,
                "subgroups": subgroups_of(sample),
                "scores": scores,
            }


@torch.no_grad()
def image_text_matching(
    model: System,
    loader: Loader,
    *,
    resamples: int = 1000,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    checkpoint: str | Path | None = None,
) -> MatchingResult:
    """Evaluate matching by the protocol of this module.

    The images are kept in host memory after they were encoded: 1 MB per image at 325 tokens of 768
    float32 numbers.

    Args:
        model: a fusion-encoder or a dual-encoder.
        loader: every sample once, prepared for `model`.
        resamples, seed: number and seed of the bootstrap resamples.
        autocast: dtype of encoders and fusion-encoder; scores stay in float32.
        checkpoint: the model's, whose hash is recorded.

    Raises ConfigError for a model that does not score pairs, EvaluationError for one that was not
    trained to match, or if images are missing, no image has a text, or all texts are equal.
    """
    if not isinstance(model, FusionModel | DualEncoder):
        message = f"{model.name} scores no pairs; give a dual-encoder or a fusion-encoder"
        raise ConfigError(message, "unsupported", field="model")
    if isinstance(model, FusionModel):
        check_matching(model)
    by_key = samples_by_key(loader.source)
    batches = FullPass(loader)
    with evaluating(model):
        if isinstance(model, FusionModel):
            items, scores_N3 = _score_fused(model, batches, by_key, autocast)
        else:
            items, scores_N3 = _score_embedded(model, batches, by_key, autocast)
    placed = [by_key[batches.keys[position]] for position in items.position_N]
    samples = tuple(sample for _, sample in placed)
    groups = matching_groups(scores_N3, decides=isinstance(model, FusionModel))
    patients = [sample.patient for sample in samples]
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(groups, len(samples), resamples=resamples, seed=seed, groups=patients),
        config={"resamples": resamples, "seed": seed, "autocast": autocast and str(autocast)},
        inputs=input_hashes(checkpoint, manifest=loader),
        details={
            "images": len(samples),
            "without_text": len(batches.keys) - len(samples),
            "naming_a_side": int((items.text_N3[:, MIRROR] >= 0).sum()),
            "unreadable": batches.unreadable,
        },
    )
    return MatchingResult(
        results=results,
        samples=samples,
        positions=tuple(position for position, _ in placed),
        items=items,
        scores_N3=scores_N3,
    )


def choose_texts(texts: Sequence[str], patients: Sequence[str]) -> Items:
    """Return the own, the other and the mirrored text of every image with a text; texts are "" for
    those without.

    Raises EvaluationError if no image has a text, or if an image has no other one.
    """
    position_N = [position for position, text in enumerate(texts) if text]
    if not position_N:
        raise EvaluationError("no image has a text; choose other sections", "empty", field="data")
    following = _following([texts[p] for p in position_N], [patients[p] for p in position_N])
    rows = [
        (texts[position], texts[position_N[other]], swap_laterality(texts[position]))
        for position, other in zip(position_N, following, strict=True)
    ]
    index = {
        text: number
        for number, text in enumerate(dict.fromkeys(text for row in rows for text in row))
    }
    text_N3 = [
        (index[own], index[other], -1 if mirror == own else index[mirror])
        for own, other, mirror in rows
    ]
    return Items(np.array(position_N), tuple(index), np.array(text_N3))


def _following(texts: Sequence[str], patients: Sequence[str]) -> list[int]:
    """Return for each item the next one, in a circle, of another patient and with another text."""
    count = len(texts)
    partners: list[int] = []
    for place in range(count):
        steps = (step % count for step in range(place + 1, place + count))
        other = next(
            (n for n in steps if patients[n] != patients[place] and texts[n] != texts[place]), None
        )
        if other is None:
            raise EvaluationError(
                "matching needs texts of several patients that differ", "empty", field="data"
            )
        partners.append(other)
    return partners


def matching_groups(scores_N3: Array, *, decides: bool) -> list[MetricGroup]:
    """Return the metrics of all images; with "accuracy" if the scores are log-odds of a matching
    head (`decides`).
    """
    own_N = scores_N3[:, OWN]
    values = {
        name: (np.sign(own_N - scores_N3[:, column]) + 1) / 2
        for name, column in (("above_other", OTHER), ("above_mirror", MIRROR))
    }
    if decides:
        values["accuracy"] = ((own_N > 0).astype(np.float64) + (scores_N3[:, OTHER] < 0)) / 2
    return [mean_metrics(name, value_N[:, None], ["all"]) for name, value_N in values.items()]


def _score_fused(
    model: FusionModel,
    batches: FullPass,
    by_key: Mapping[str, tuple[int, Sample]],
    autocast: torch.dtype | None,
) -> tuple[Items, Array]:
    with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
        image, texts = encode_images_with_text(model, batches)
        items = _choose(texts, batches, by_key)
        encoded = Encoded(image, encode_texts(model, items.texts))
    row_N = torch.arange(len(items.position_N))
    return items, _scores(
        items,
        row_N,
        lambda image_Q, text_Q: match_scores(model, encoded, image_Q, text_Q, autocast),
    )


def _score_embedded(
    model: DualEncoder,
    batches: FullPass,
    by_key: Mapping[str, tuple[int, Sample]],
    autocast: torch.dtype | None,
) -> tuple[Items, Array]:
    images, _, texts = encode_images(model, batches, autocast)
    items = _choose(texts, batches, by_key)
    embedded = embed_texts(model, items.texts)
    row_N = torch.from_numpy(items.position_N)
    return items, _scores(
        items,
        row_N,
        lambda image_Q, text_Q: paired_similarity(model, images, embedded, image_Q, text_Q),
    )


def _choose(
    texts: Sequence[str], batches: FullPass, by_key: Mapping[str, tuple[int, Sample]]
) -> Items:
    return choose_texts(texts, [by_key[key][1].patient for key in batches.keys])


def _scores(items: Items, row_N: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Array:
    """Return scores_N3, NaN if there is no text; `score` gets the rows of the images and the
    texts of all pairs.
    """
    text_N3 = torch.from_numpy(items.text_N3)
    present_N3 = text_N3 >= 0
    scores_N3 = torch.full(present_N3.shape, torch.nan, dtype=torch.float64)
    scores_N3[present_N3] = score(
        row_N[:, None].expand(-1, 3)[present_N3], text_N3[present_N3]
    ).double()
    result: Array = scores_N3.numpy()
    return result


# Page of image-text matching: the metrics, and images that prefer another text or the mirror of
# their own.

_LIMITS = (
    "A research evaluation, not for clinical use.",
    "The other text may fit the image as well as its own: normal studies have similar reports.",
)
_ROWS = {
    "above_other": "Own text above another patient's",
    "above_mirror": "Own text above its mirror",
    "accuracy": "Decisions of the matching head",
}


def write_matching_page(
    result: MatchingResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 4,
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `image_text_matching`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        pixels: function from the position of an image to its pixels; None for no images.
        examples: images of each kind of mistake.
    """
    results = result.results
    rows = [row for row in results.rows if row.n]
    sections: list[Section] = [
        Table(
            title="Summary",
            columns=["", "Share", "Images"],
            rows=[
                [_ROWS[row.metric], metric_cell(row, reference=0.5, bar=True), f"{row.n:,}"]
                for row in rows
            ],
            caption="Mirrors have left and right exchanged; only texts that name a side have "
            "one. The tick is chance.",
        )
    ]
    if pixels is not None:
        sections.append(_mistakes(result, pixels, examples))
    page = Page(
        title=f"Image-text matching: {header.model}",
        subtitle=f"{header.data}: {results.details['images']:,} images, "
        f"{results.details['naming_a_side']:,} with a text that names a side",
        headlines=[headline(_ROWS[row.metric].lower(), row) for row in rows],
        facts=header_facts(results, header, units="patients"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _mistakes(result: MatchingResult, pixels: Pixels, examples: int) -> Cards:
    decks = []
    for title, column in (
        ("Another text scored higher", OTHER),
        ("The mirror scored higher", MIRROR),
    ):
        wrong = np.flatnonzero(result.scores_N3[:, column] > result.scores_N3[:, OWN])
        shown = wrong[np.linspace(0, len(wrong) - 1, min(examples, len(wrong))).astype(int)]
        if len(shown):
            cards = [_card(result, int(row), column, pixels) for row in shown]
            decks.append(Deck(title=f"{title}: {len(wrong):,} images", cards=cards, good=False))
    caption = (
        "The text that scored higher, then the image's own (✓); evenly spaced in the "
        "order of the data."
    )
    return Cards(title="Mistakes", decks=decks, caption=caption)


def _card(result: MatchingResult, row: int, column: int, pixels: Pixels) -> Card:
    scores_3 = result.scores_N3[row]
    full = float(max(1.0, np.nanmax(np.abs(result.scores_N3))))
    margin = f"{scores_3[column] - scores_3[OWN]:.2f}"
    alternative = (
        f"image whose own text scores {scores_3[OWN]:.2f} and the other text {scores_3[column]:.2f}"
    )
    return Card(
        title=f"Preferred by {margin}",
        pictures=[
            Picture(
                source=thumbnail_uri(pixels(result.positions[row]), 256), alternative=alternative
            )
        ],
        choices=[
            Choice(
                text=result.text(row, place),
                score=float(scores_3[place]),
                right=place == OWN,
                full=full,
            )
            for place in (column, OWN)
        ],
        lines=[],
        tags=[],
    )


@register_evaluation("matching")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Matching(ModelEvaluation):
    """Evaluate whether a model prefers an image's own text to another patient's, and to the text
    with sides exchanged.

    The checkpoint is a dual-encoder, a fusion-encoder, or one of recipes/retrieval_finetune.py; the
    shards have texts.
    """

    protocols = (PROTOCOL,)
    lines = LineFields(needs=("patient",))
    advice = "give a dual-encoder or a fusion-encoder"
    tasks = (
        Task(
            fits=FusionModel,
            columns=(
                Column(title="matching", metric="accuracy", targets=("all",)),
                Column(title="text above its mirror", metric="above_mirror", targets=("all",)),
            ),
        ),
    )

    sections: tuple[str, ...] = ()
    """sections of the text; default the whole text"""
    examples: int = 4
    """images of each kind of mistake on the page"""

    def evaluate(self, model: System, source: ShardSource, setup: Setup) -> MatchingResult:
        """Return the metrics of the choices."""
        return image_text_matching(
            as_matcher(model),
            setup.loader(source, model, sections=self.sections),
            resamples=setup.resamples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: MatchingResult, source: ShardSource) -> WritePage:
        return functools.partial(
            write_matching_page, result, pixels=source.pixels, examples=self.examples
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of the choices."""
        scores_N3 = np.array(
            [[number(line["scores"].get(name)) for name in COLUMNS] for line in lines]
        )
        decides = any(row.metric == "accuracy" for row in results.rows)
        return matching_groups(scores_N3, decides=decides)

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Matching":
        """Return the evaluation with the sections of the benchmark."""
        return cls(checkpoint=trial.checkpoint, data=trial.data, sections=trial.settings.sections)
