"""Passes of a model over images: the values of every image, and of every version of it.

Letters: B images of a batch, N images, V versions, L findings, S statements and denials, K prompt
sets.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medvl.data.loading.sources import Source, region_manifest_of
from medvl.data.reports.sentences import one_line
from medvl.data.transforms.text import WholeText
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, column, samples_by_key
from medvl.eval.core.metrics import Array
from medvl.eval.matching import Items, choose_texts
from medvl.eval.robustness.image_versions import Version, VersionSource
from medvl.eval.robustness.scorers import Scorer
from medvl.schema import Batch, Sample

TextRows = Mapping[str, Sequence[int]]
"""Key of an image -> indices of its own, another and the mirrored text; -1 for none."""

OpenLoader = Callable[[Source], Loader]
"""Function that opens a loader of a source for the model, every sample once and in order."""
_PARTIAL = ("texts", "own_and_other")
"""Values that some images do not have."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images of one source, with values by name: (N, ...), NaN where an image has none."""

    keys: tuple[str, ...]
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    labels_NL: Array
    """Labels of the table: 1, 0, -1 or NaN."""
    unreadable: Mapping[str, int]
    values: Mapping[str, Array]

    @property
    def patients(self) -> list[str]:
        """Patient of each image."""
        return [sample.patient for sample in self.samples]


def score_images(
    scorer: Scorer, loader: Loader, wanted: Sequence[str], texts: TextRows | None = None
) -> Images:
    """Return every image of a loader with the values `wanted`: findings, prompts, statements,
    confidence, texts.

    Images are encoded once. Raises EvaluationError if images are missing or a value is not finite.
    """
    by_key = samples_by_key(loader.source)
    batches = FullPass(loader)
    functions: dict[str, Callable[[Any, Batch], Tensor]] = {
        "findings": lambda images, batch: scorer.findings(images),
        "prompts": lambda images, batch: scorer.prompts(images),
        "statements": lambda images, batch: scorer.statement_scores(images),
        "texts": lambda images, batch: _text_scores(scorer, images, batch.keys, texts or {}, 3),
        "own_and_other": lambda images, batch: _text_scores(
            scorer, images, batch.keys, texts or {}, 2
        ),
    }

    def compute(batch: Batch) -> dict[str, Tensor]:
        images = scorer.encode(batch)
        scores = {name: functions[name](images, batch) for name in wanted if name in functions}
        if "confidence" in wanted:
            scores["confidence"] = scorer.confidence(images, scores.get("statements"))
        return {"labels": batch.labels_BL, **scores}

    parts = batches.compute(compute)
    values = {name: column(parts, name).double().numpy() for name in wanted}
    for name, value in values.items():
        if np.isinf(value).any() or (name not in _PARTIAL and np.isnan(value).any()):
            raise EvaluationError(
                f"the scores of {name} are not finite: check the model's weights", "nonfinite"
            )
    positions, samples = zip(*(by_key[key] for key in batches.keys), strict=True)
    return Images(
        keys=tuple(batches.keys),
        samples=samples,
        positions=positions,
        labels_NL=column(parts, "labels").double().numpy(),
        unreadable=batches.unreadable,
        values=values,
    )


def score_versions(
    scorer: Scorer,
    loader: Loader,
    keys: Sequence[str],
    wanted: Sequence[str],
    texts: TextRows | None = None,
) -> dict[str, Array]:
    """Return values (N, V, ...) of all versions of the images `keys`, from a loader over a
    `VersionSource`.

    Raises EvaluationError if a version of an image is missing.
    """
    source = loader.source
    assert isinstance(source, VersionSource)
    of_version = None
    if texts is not None:
        numbers = range(len(source.versions))
        of_version = {
            source.key(key, number): row for key, row in texts.items() for number in numbers
        }
    scored = score_images(scorer, loader, wanted, of_version)
    place = {key: row for row, key in enumerate(scored.keys)}
    try:
        rows = [
            [place[source.key(key, number)] for number in range(len(source.versions))]
            for key in keys
        ]
    except KeyError:
        raise EvaluationError(
            "a version of an image could not be read; verify the shards", "mismatch"
        ) from None
    return {name: value[np.array(rows)] for name, value in scored.values.items()}


def own_texts(source: Source) -> tuple[Items, TextRows]:
    """Return the texts of a source, and their indices for every image with a text, by key.

    Raises EvaluationError if no image has a text, or if there are no two texts of different
    patients.
    """
    whole = WholeText()
    nothing = np.random.default_rng(0)
    samples = [sample for _, sample in samples_by_key(source).values()]
    texts = [one_line(whole(sample.sections, nothing)) for sample in samples]
    items = choose_texts(texts, [sample.patient for sample in samples])
    rows = zip(items.position_N.tolist(), items.text_N3.tolist(), strict=True)
    return items, {samples[position].key: row for position, row in rows}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Everything that the metrics are computed from."""

    scorer: Scorer
    label_names: tuple[str, ...]
    clean: Images
    versions: tuple[Version, ...]
    of_versions: Mapping[str, Array]
    """"findings" (N, V, L) and "own_and_other" (N, V, 2) of the corrupted images."""
    made_up: Mapping[str, Array]
    """Name -> confidence (N,) of images made from those of the data."""
    outside: Mapping[str, Images]
    sites: Mapping[str, tuple[tuple[str, ...], Images]]
    """Name -> label columns and images."""
    left_out: Mapping[str, str]
    """Test -> reason why it is left out."""


def score_everything(
    scorer: Scorer,
    source: Source,
    open_loader: OpenLoader,
    *,
    versions: Sequence[Version],
    made_up: Sequence[Version],
    sites: Mapping[str, Source],
    outside: Mapping[str, Source],
    seed: int,
) -> Scores:
    """Return the scores of all images: clean, corrupted, made up, of other sites, and of other
    kinds.

    Raises EvaluationError if the data has neither findings of the model nor texts to compare, or as
    `score_images`.
    """
    left_out = {}
    texts = None
    if region_manifest_of(source) is not None:
        left_out["corruptions"], versions = (
            "the model reads precomputed regions in place of pixels",
            (),
        )
    if scorer.compares_texts:
        try:
            items, texts = own_texts(source)
            scorer.set_texts(items.texts)
        except EvaluationError as error:
            left_out["texts"] = str(error)
    if not scorer.names and texts is None:
        message = (
            f"expected labels of the model's findings or texts, got labels "
            f"{', '.join(source.label_names) or 'none'}"
        )
        raise EvaluationError(message, "mismatch", field="data")
    if sites and not scorer.names:
        left_out["sites"], sites = (
            "sites are compared on findings, which the model does not score",
            {},
        )
    findings = ["findings"] if scorer.names else []
    wanted = ["confidence", *findings]
    wanted += ["prompts"] if scorer.prompt_sets else []
    wanted += (
        ["statements"]
        if set(scorer.statements) & set(scorer.label_names(source.label_names))
        else []
    )
    wanted += ["texts"] if texts is not None else []
    clean = score_images(scorer, open_loader(source), wanted, texts)
    corrupted = [*findings, *(["own_and_other"] if texts is not None else [])]

    def versions_of(chosen: Sequence[Version], values: Sequence[str]) -> dict[str, Array]:
        if not chosen or "corruptions" in left_out:
            return {}
        loader = open_loader(VersionSource(source, chosen, seed, texts=scorer.reads_text))
        return score_versions(scorer, loader, clean.keys, values, texts)

    confidence_NV = versions_of(made_up, ["confidence"]).get("confidence")
    return Scores(
        scorer=scorer,
        label_names=scorer.label_names(source.label_names),
        clean=clean,
        versions=tuple(versions),
        of_versions=versions_of(versions, corrupted),
        made_up={}
        if confidence_NV is None
        else dict(zip(map(str, made_up), confidence_NV.T, strict=True)),
        outside={
            name: score_images(scorer, open_loader(one), ["confidence"])
            for name, one in outside.items()
        },
        sites={
            name: (
                scorer.label_names(one.label_names),
                score_images(scorer, open_loader(one), ["findings"]),
            )
            for name, one in sites.items()
        },
        left_out=left_out,
    )


def _text_scores(
    scorer: Scorer, images: Any, keys: Sequence[str], rows: TextRows, columns: int
) -> Tensor:
    """Return (B, columns): the scores of the first texts of each image, NaN where there is none."""
    text_BK = torch.tensor([list(rows.get(key, (-1, -1, -1)))[:columns] for key in keys])
    present_BK = text_BK >= 0
    scores_BK = torch.full(text_BK.shape, torch.nan, dtype=torch.float64)
    if present_BK.any():
        image_BK = torch.arange(len(keys))[:, None].expand_as(text_BK)
        scores_BK[present_BK] = scorer.text_scores(
            images, image_BK[present_BK], text_BK[present_BK]
        )
    return scores_BK
