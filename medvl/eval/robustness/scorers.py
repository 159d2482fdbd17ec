"""Scores of a batch of images by each kind of model: findings, statements, texts, and a confidence;
and passes of a model over images: the values of every image, and of every version of it.

Images are encoded once by `encode`; the other methods take its result. Scores are float64 tensors
on the CPU.

Letters: B images of a batch, N images, V versions, L findings, K prompt sets, S statements and
denials, Q pairs of an image and a text.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medvl.common.label_names import match_labels, named_as
from medvl.data.loading.sources import Source, region_manifest_of
from medvl.data.reports.sentences import one_line
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.classification.scored_images import NO_FINDING
from medvl.eval.core.full_pass import (
    FullPass,
    Loader,
    column,
    embed_texts,
    encode_batch,
    samples_by_key,
)
from medvl.eval.core.metrics import Array
from medvl.eval.matching import Items, choose_texts
from medvl.eval.probing.protocol import FittedProbe
from medvl.eval.retrieval.rerank import Encoded, check_matching, encode_texts, match_scores
from medvl.eval.retrieval.similarity import paired_similarity
from medvl.eval.robustness.image_versions import Version, VersionSource, paraphrases, statements
from medvl.eval.zero_shot_classification.prompts import STANDARDIZED, PromptSet
from medvl.eval.zero_shot_classification.protocol import PromptScorer
from medvl.models.base import System
from medvl.models.downstream.classifier import LabelModel
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import FINDINGS, Batch, Embeddings, Sample


class Scorer(abc.ABC):
    """Base class of the scorers of one model. Every scorer has `encode` and `confidence`;
    attributes tell which of the other methods it has, and those that it does not have raise
    NotImplementedError.

    Attributes:
        names: findings that are scored, without No Finding; empty for a model without `findings`.
        not_scored: label of the data -> names of the prompt sets without sentences of it, because
            of which it is not in `names`.
        probabilities: whether scores of findings are probabilities.
        prompt_sets: names of the prompt sets, the paraphrases last; the first one scores the
            findings. Empty for a model without `prompts`.
        named_sets: number of prompt sets that are not paraphrases.
        statements: class -> a statement and its denial; empty for a model without
            `statement_scores`.
        compares_texts: whether the model has `set_texts` and `text_scores`.
        reads_text: whether findings also depend on the text of the batch.
        confidence_is: description of the confidence, for the page.
        classes: names of the model or its prompts, by which labels of the data are called.
    """

    classes: tuple[str, ...] = FINDINGS
    names: tuple[str, ...] = ()
    not_scored: Mapping[str, tuple[str, ...]] = {}
    probabilities: bool = False
    prompt_sets: tuple[str, ...] = ()
    named_sets: int = 0
    statements: Mapping[str, tuple[str, str]] = {}
    compares_texts: bool = False
    reads_text: bool = False
    confidence_is: str

    def label_names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the labels of data as the model's classes are called, whatever their case and
        separators.
        """
        return named_as(labels, self.classes)

    @abc.abstractmethod
    def encode(self, batch: Batch) -> Any:
        """Return the encoded images of a batch, in the form that the other methods of this class
        take.
        """

    @abc.abstractmethod
    def confidence(self, images: Any, statement_BS: Tensor | None = None) -> Tensor:
        """Return (B,): the confidence of each image, as described by `confidence_is`.

        `statement_BS` is the result of `statement_scores` for these images, where it is known
        already.
        """

    def findings(self, images: Any) -> Tensor:
        """Return (B, L): the scores of the findings, columns as in `names`."""
        raise self._not_implemented("names")

    def prompts(self, images: Any) -> Tensor:
        """Return (B, K, L): the scores of the findings under every prompt set."""
        raise self._not_implemented("prompt_sets")

    def statement_scores(self, images: Any) -> Tensor:
        """Return (B, S): the scores of each statement, followed by that of its denial."""
        raise self._not_implemented("statements")

    def set_texts(self, texts: Sequence[str]) -> None:
        """Encode the texts whose indices `text_scores` takes."""
        raise self._not_implemented("compares_texts")

    def text_scores(self, images: Any, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        """Return (Q,): the score of each pair of an image and a text, given by their indices."""
        raise self._not_implemented("compares_texts")

    def _not_implemented(self, attribute: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} has no such scores; check its attribute {attribute!r} first"
        )


class ClassifierScorer(Scorer):
    """Probabilities of a classifier, for the labels that are findings.

    Args:
        model: the classifier.
        labels: labels of the data.
    """

    probabilities = True
    confidence_is = "largest probability of a finding"

    def __init__(self, model: LabelModel, labels: Sequence[str]) -> None:
        self.model = model
        self.reads_text = model.tokenizer is not None
        self.classes = tuple(model.config.labels)
        labels = self.label_names(labels)
        findings = [name for name in model.config.labels if name != NO_FINDING]
        self.names = tuple(name for name in findings if name in labels)
        self._findings = [model.config.labels.index(name) for name in findings]
        self._columns = [findings.index(name) for name in self.names]

    def encode(self, batch: Batch) -> Tensor:
        """Return the probabilities of all findings of the model."""
        probability_BL = self.model.probabilities(batch.to(self.model.device, non_blocking=True))
        return probability_BL[:, self._findings].double().cpu()

    def confidence(self, images: Tensor, statement_BS: Tensor | None = None) -> Tensor:
        return images.amax(dim=1)

    def findings(self, images: Tensor) -> Tensor:
        return images[:, self._columns]


class ProbeScorer(Scorer):
    """Probabilities of a linear probe, for any system with an image encoder."""

    probabilities = True
    confidence_is = "largest probability of a finding by the linear probe"

    def __init__(
        self, probe: FittedProbe, labels: Sequence[str], autocast: torch.dtype | None
    ) -> None:
        self.classes = probe.names
        labels = self.label_names(labels)
        self.probe = probe
        self.names = tuple(name for name in probe.names if name in labels)
        self._autocast = autocast
        self._columns = [probe.names.index(name) for name in self.names]

    def encode(self, batch: Batch) -> Tensor:
        """Return the probabilities of all findings of the probe."""
        device = self.probe.encoder.device
        with torch.autocast(device.type, dtype=self._autocast, enabled=self._autocast is not None):
            return self.probe.probabilities(batch)

    def confidence(self, images: Tensor, statement_BS: Tensor | None = None) -> Tensor:
        return images.amax(dim=1)

    def findings(self, images: Tensor) -> Tensor:
        return images[:, self._columns]


class DualScorer(Scorer):
    """Zero-shot scores and similarities of a dual-encoder.

    Args:
        model: the model.
        prompts: the named prompt sets.
        labels: labels of the data; those that all prompt sets have sentences of are scored, without
            No Finding.
        autocast: dtype of the image encoder.

    Raises ConfigError for prompts whose scores depend on the other images of the test set.
    """

    compares_texts = True
    confidence_is = "largest similarity with a statement about a finding or its denial"

    def __init__(
        self,
        model: DualEncoder,
        prompts: Sequence[PromptSet],
        labels: Sequence[str],
        autocast: torch.dtype | None,
    ) -> None:
        self.classes = tuple(prompts[0].classes)
        labels = self.label_names(labels)
        prompts = [one.for_labels(labels) for one in prompts]
        lacking = {
            name: tuple(one.name for one in prompts if name not in one.classes) for name in labels
        }
        self.not_scored = {
            name: sets for name, sets in lacking.items() if sets and name != NO_FINDING
        }
        names = [
            name for name in prompts[0].classes if lacking.get(name) == () and name != NO_FINDING
        ]
        self.model = model
        self.names = tuple(names)
        self._autocast = autocast
        self.statements = statements(names or FINDINGS)
        self._statements = embed_texts(model, _in_turn(self.statements))
        self._texts = self._statements
        sets = [_checked(prompt_set).select(names) for prompt_set in prompts] if names else []
        self.named_sets = len(sets)
        sets += paraphrases(names) if names else []
        self.prompt_sets = tuple(prompt_set.name for prompt_set in sets)
        self.probabilities = bool(sets) and sets[0].gives_probabilities
        self._scorers = [PromptScorer(model, prompt_set) for prompt_set in sets]

    def encode(self, batch: Batch) -> Embeddings:
        """Return the embeddings of the images."""
        return encode_batch(self.model, batch, self.model.device, self._autocast)

    def confidence(self, images: Embeddings, statement_BS: Tensor | None = None) -> Tensor:
        return (self.statement_scores(images) if statement_BS is None else statement_BS).amax(dim=1)

    def findings(self, images: Embeddings) -> Tensor:
        return self._scorers[0](images)

    def prompts(self, images: Embeddings) -> Tensor:
        return torch.stack([scorer(images) for scorer in self._scorers], dim=1)

    def statement_scores(self, images: Embeddings) -> Tensor:
        return self.model.similarity(images, self._statements).double().cpu()

    def set_texts(self, texts: Sequence[str]) -> None:
        self._texts = embed_texts(self.model, texts)

    def text_scores(self, images: Embeddings, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        return paired_similarity(self.model, images, self._texts, image_Q, text_Q).double()


class FusionScorer(Scorer):
    """Log-odds of a match of a fusion-encoder; it scores no findings.

    Raises EvaluationError for a model that was trained without matching.
    """

    compares_texts = True
    confidence_is = "largest log-odds of a match with a statement about a finding or its denial"

    def __init__(
        self, model: FusionModel, names: Sequence[str], autocast: torch.dtype | None
    ) -> None:
        check_matching(model)
        self.model = model
        self._autocast = autocast
        self.statements = statements(names or FINDINGS)
        self._statements = encode_texts(model, _in_turn(self.statements))
        self._texts = self._statements

    def encode(self, batch: Batch) -> Tokens:
        """Return the tokens of the images."""
        batch = batch.to(self.model.device, non_blocking=True)
        with torch.autocast(
            self.model.device.type, dtype=self._autocast, enabled=self._autocast is not None
        ):
            return self.model.image_tokens(self.model.image_input_of(batch), batch.has_image_B)

    def confidence(self, images: Tokens, statement_BS: Tensor | None = None) -> Tensor:
        return (self.statement_scores(images) if statement_BS is None else statement_BS).amax(dim=1)

    def statement_scores(self, images: Tokens) -> Tensor:
        count = len(images.states_BND)
        sentences = len(self._statements.states_BND)
        image_BS = torch.arange(count)[:, None].expand(count, sentences)
        text_BS = torch.arange(sentences)[None].expand(count, sentences)
        return self._scores(images, self._statements, image_BS.flatten(), text_BS.flatten()).view(
            count, sentences
        )

    def set_texts(self, texts: Sequence[str]) -> None:
        self._texts = encode_texts(self.model, texts)

    def text_scores(self, images: Tokens, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        return self._scores(images, self._texts, image_Q, text_Q)

    def _scores(self, images: Tokens, texts: Tokens, image_Q: Tensor, text_Q: Tensor) -> Tensor:
        on_cpu = images.to(torch.device("cpu"))
        return match_scores(
            self.model, Encoded(on_cpu, texts), image_Q, text_Q, self._autocast
        ).double()


def make_scorer(
    model: System, prompts: Sequence[PromptSet], labels: Sequence[str], autocast: torch.dtype | None
) -> Scorer:
    """Return the scorer of a model for data with these labels.

    Raises ConfigError for a system that scores neither findings nor pairs, and for prompts that
    cannot be used.
    """
    if isinstance(model, LabelModel):
        return ClassifierScorer(model, labels)
    if isinstance(model, DualEncoder):
        return DualScorer(model, prompts, labels, autocast)
    if isinstance(model, FusionModel):
        return FusionScorer(model, list(match_labels(FINDINGS, labels)), autocast)
    message = (
        f"{model.name} scores neither findings nor pairs; test a linear probe of it "
        f"(--probe-train, --probe-valid)"
    )
    raise ConfigError(message, "unsupported", field="checkpoint")


def _checked(prompts: PromptSet) -> PromptSet:
    if prompts.scoring in STANDARDIZED:
        message = (
            f"{prompts.name!r} standardises scores over the images of a test set; use other prompts"
        )
        raise ConfigError(message, "unsupported", field="prompts")
    return prompts


def _in_turn(pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    return [text for pair in pairs.values() for text in pair]


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
    scorer: Scorer, loader: Loader, value_names: Sequence[str], texts: TextRows | None = None
) -> Images:
    """Return every image of a loader with the values `value_names`: findings, prompts, statements,
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
        scores = {name: functions[name](images, batch) for name in value_names if name in functions}
        if "confidence" in value_names:
            scores["confidence"] = scorer.confidence(images, scores.get("statements"))
        return {"labels": batch.labels_BL, **scores}

    parts = batches.compute(compute)
    values = {name: column(parts, name).double().numpy() for name in value_names}
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
    value_names: Sequence[str],
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
    scored = score_images(scorer, loader, value_names, of_version)
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
    value_names = ["confidence", *findings]
    value_names += ["prompts"] if scorer.prompt_sets else []
    value_names += (
        ["statements"]
        if set(scorer.statements) & set(scorer.label_names(source.label_names))
        else []
    )
    value_names += ["texts"] if texts is not None else []
    clean = score_images(scorer, open_loader(source), value_names, texts)
    corrupted = [*findings, *(["own_and_other"] if texts is not None else [])]

    def versions_of(versions: Sequence[Version], values: Sequence[str]) -> dict[str, Array]:
        if not versions or "corruptions" in left_out:
            return {}
        loader = open_loader(VersionSource(source, versions, seed, texts=scorer.reads_text))
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
    """Return (B, columns): the scores of the first texts of each image, NaN if there is none."""
    text_BK = torch.tensor([list(rows.get(key, (-1, -1, -1)))[:columns] for key in keys])
    present_BK = text_BK >= 0
    scores_BK = torch.full(text_BK.shape, torch.nan, dtype=torch.float64)
    if present_BK.any():
        image_BK = torch.arange(len(keys))[:, None].expand_as(text_BK)
        scores_BK[present_BK] = scorer.text_scores(
            images, image_BK[present_BK], text_BK[present_BK]
        )
    return scores_BK
