"""Evaluation of generated images against real ones.

Protocol "image_generation", version 2:

* Real images are made square and shrunk like those of the generator, so that frame and resolution
  do not differ.
* Prompted findings: a classifier that was trained on real images scores the generated ones; "auroc"
  compares the scores with the findings that the prompts state (`medvl.data.reports.labeler`).
  Beside it are the real images of the same prompts, reconstructions of them if given, and shuffled
  prompts.
* "negation_auroc" compares prompts that assert a finding with prompts that deny it, and
  "side_auroc" a finding on the left with the same on the right (`findings.prompted_sides`).
* Frechet and kernel distance, precision, recall, density and coverage are of named features, over
  all images and at one number of images, at which "real" is the distance of real test images from
  other patients' real test images.
* Diversity: similarity of images of one text. Alignment: similarity with the own prompt under a
  dual-encoder that was trained apart from the generator, and retrieval of the prompt.
* Memorisation: distance to the nearest of all training images, with the real test images as
  reference.
* Use: linear probes trained on real, on synthetic and on both, evaluated on the real test images.
* Each folder of images, such as one for each guidance, is a subgroup of the rows; the first folder
  is the main one. No setting is chosen here: choose it on prompts of validation patients.
* Intervals: patients of the prompts are resampled with all their images; distances of features have
  an interval of the delete-a-group jackknife.

Letters: N images, L findings.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from medvl.data.images.generated import GeneratedImages
from medvl.data.reports.labeler import conventions_named
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import Results, format_table, format_value
from medvl.eval.generation.fidelity import (
    ALL,
    FidelityOptions,
    distance_rows,
    diversity_rows,
    manifold_rows,
    matched_rows,
)
from medvl.eval.generation.findings import (
    Aligned,
    FindingClassifier,
    Resampling,
    align,
    alignment_rows,
    auroc_on,
    fit_classifier,
    negated_findings,
    prompted_findings,
    prompted_sides,
    shuffled_findings,
    stated_labels,
)
from medvl.eval.generation.inputs import (
    GeneratedSource,
    ImageSet,
    LoaderOptions,
    RealData,
    read_set,
    real_of_prompts,
)
from medvl.eval.generation.training_images import (
    PIXEL_SIZE,
    SPACES,
    Memorisation,
    UseOptions,
    describe_copies,
    memorisation_rows,
    real_distance_rows,
    search_copies,
    use_rows,
)
from medvl.eval.probing.features import ProbedEncoder
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import ConventionsName

# Result of the evaluation of generated images: metric rows, and the data of the page.

RECONSTRUCTED = "reconstructed"
IMAGES_OF = "images, "
"""Prefix of a folder's name in the inputs, for the hash of its images."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageSets:
    """Images that are compared."""

    generated: Sequence[ImageSet]
    """The folders, the main one first."""
    tested: ImageSet
    """All real test images."""
    real: ImageSet | None
    """Real images of the prompts of the main folder."""
    rebuilt: ImageSet | None
    """Reconstructed images."""

    @property
    def prompted(self) -> list[ImageSet]:
        """Sets with prompts."""
        return [*self.generated, *(each for each in (self.real, self.rebuilt) if each is not None)]

    @property
    def not_real(self) -> list[ImageSet]:
        """Sets that are compared with the real test images."""
        return [*self.generated, *([] if self.rebuilt is None else [self.rebuilt])]


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationResult:
    """Results, with the images, scores and nearest training images that the page shows."""

    results: Results
    sets: ImageSets
    classifier: FindingClassifier
    memorisation: Memorisation
    aligned: Mapping[str, Aligned]
    """Alignment by name of the set."""
    train_source: Any
    """All training images."""

    @property
    def generated(self) -> Sequence[ImageSet]:
        """The folders, the main one first."""
        return self.sets.generated

    @property
    def main(self) -> ImageSet:
        """The first folder."""
        return self.sets.generated[0]

    def row(self, metric: str, target: str, subgroup: str | None = None) -> MetricRow | None:
        """Return a row of a set, by default the main folder; None if there is none."""
        key = (metric, target, self.main.name if subgroup is None else subgroup)
        return next(
            (row for row in self.results.rows if (row.metric, row.target, row.subgroup) == key),
            None,
        )

    def table(self) -> str:
        """Return the means of all sets as plain text."""
        mean, negated = (
            "macro" if self.row(metric, "macro_competition") is None else "macro_competition"
            for metric in ("auroc", "negation_auroc")
        )
        shown = {
            ("auroc", mean): "prompted findings, AUROC",
            ("negation_auroc", negated): "asserted/negated, AUROC",
            ("side_auroc", "macro"): "left/right, AUROC",
            ("kernel_distance", ALL): "kernel distance",
            **{
                (metric, ALL): metric.replace("_", " ")
                for metric in ("frechet_distance", "precision", "recall")
            },
            **{(metric, ALL): metric for metric in ("density", "coverage")},
            ("ms_ssim", "same text"): "MS-SSIM within a prompt",
            **{
                ("recall@5", row.target): f"recall@5 of {row.target}"
                for row in self.results.rows
                if "@5" in row.metric
            },
            **{("too_near", space): f"too near to training, {space}" for space in SPACES},
        }
        used = [row for row in self.results.rows if row.metric.startswith("use_auroc@")]
        parts = [
            shown,
            {
                (row.metric, mean): row.metric.replace("_", " ")
                for row in used
                if row.target == mean
            },
        ]
        tables = [self._by_set(part) for part in parts if part]
        return "\n\n".join([*tables, self._note(), *describe_copies(self.results.rows)])

    def _by_set(self, shown: Mapping[tuple[str, str], str]) -> str:
        """Return a table with a line for each (metric, target), under other names, and a column
        for each set.
        """
        named = [(shown.get((row.metric, row.target)), row) for row in self.results.rows]
        lines = [
            dataclasses.replace(row, target=name, metric=row.subgroup, subgroup="")
            for name, row in named
            if name
        ]
        order = list(shown.values())
        return format_table(sorted(lines, key=lambda row: order.index(row.target)))

    def _note(self) -> str:
        """Return the features of the distances, and the distance of real images from other real
        ones.
        """
        config = self.results.config
        inputs = self.results.inputs
        dim = self.results.details["feature_dim"]
        halves = next(
            row
            for row in self.results.rows
            if row.metric == "frechet_distance" and row.subgroup == "real"
        )
        return (
            f"Distances are of {dim} features of {config['features']} (sha256 "
            f"{str(inputs['features'])[:12]}).\n"
            f"Frechet distance of real test images from other real ones at {halves.target}: "
            f"{format_value(halves)}.\n"
            "It is biased upwards, more for fewer images: compare at equal numbers, on the page."
        )

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one line per generated image: its prompt's key and findings, scores, the nearest
        training images.
        """
        policy = LabelPolicy(**self.results.config["policy"])
        names = self.classifier.names
        for images in self.generated:
            stated_NL = stated_labels(images, names, policy).tolist()
            logits_NL = self.classifier.logits(images.scored.x_ND)
            near = self.memorisation.too_near(images.name)
            nearest = self.memorisation.sets[images.name]
            aligned = self.aligned.get(images.name)
            for row, position in enumerate(images.scored.positions):
                source = images.source.images.rows[position]
                yield {
                    "set": images.name,
                    "folder": str(images.source.folder),
                    "file": source.file,
                    "prompt_key": source.prompt_key,
                    "patient": images.patients[row],
                    "guidance": source.guidance,
                    "seed": source.seed,
                    "stated": dict(zip(names, stated_NL[row], strict=True)),
                    "logits": dict(zip(names, logits_NL[row].tolist(), strict=True)),
                    "nearest": {
                        space: self.train_source.sample(int(places[row])).key
                        for space, places in nearest.position.items()
                    },
                    "distance": {space: float(nearest.distance[space][row]) for space in SPACES},
                    "too_near": [space for space in SPACES if near[space][row]],
                    **({} if aligned is None else {"alignment": float(aligned.own_N[row])}),
                }


PROTOCOL = "image_generation"
PROTOCOL_VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationModels:
    """Models of the evaluation; none may have been trained on a test patient."""

    judge: ProbedEncoder
    """Image encoder of the classifier of findings."""
    classifier: FindingClassifier | None = None
    """Classifier on the features of `judge`; None: a linear probe, fitted to the real training
    images.
    """
    features: ProbedEncoder | None = None
    """Image encoder of the distances; None: `judge`."""
    aligner: DualEncoder | None = None
    """Dual-encoder of the alignment; None for no alignment."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Settings of the evaluation."""

    policy: LabelPolicy = dataclasses.field(default_factory=LabelPolicy)
    fidelity: FidelityOptions = dataclasses.field(default_factory=FidelityOptions)
    use: UseOptions = dataclasses.field(default_factory=UseOptions)
    resampling: Resampling = dataclasses.field(default_factory=Resampling)
    pixel_size: int = PIXEL_SIZE
    """Side of the squares whose pixels are compared with the training images."""
    conventions: ConventionsName = "chexpert"
    """What the labeler takes as present and as uncertain in a prompt (`medvl.data.CONVENTIONS`)."""

    def __post_init__(self) -> None:
        conventions_named(self.conventions, error=EvaluationError)

    def stored(self) -> dict[str, Any]:
        """Return the settings as results record them."""
        resampling = dataclasses.asdict(self.resampling)
        parts = {
            name: dataclasses.asdict(getattr(self, name)) for name in ("policy", "fidelity", "use")
        }
        return {
            **parts,
            **resampling,
            "pixel_size": self.pixel_size,
            "conventions": self.conventions,
        }


def evaluate_generation(
    folders: Sequence[GeneratedImages],
    real: RealData,
    models: GenerationModels,
    *,
    reconstructed: GeneratedImages | None = None,
    synthetic_train: GeneratedImages | None = None,
    options: GenerationOptions | None = None,
    loading: LoaderOptions | None = None,
    inputs: Mapping[str, str | None] | None = None,
    details: Mapping[str, Any] | None = None,
) -> GenerationResult:
    """Evaluate generated images by the protocol of this module.

    Args:
        folders: generated images of one generator, such as one folder for each guidance; the first
            is the main one.
        real: shards of other patients for training, validation and test.
        models: models of the evaluation.
        reconstructed: real images that went through the generator's autoencoder, with the keys of
            the real ones.
        synthetic_train: images generated from training texts, to train classifiers with; None omits
            this part.
        options, loading: settings.
        inputs, details: further hashes and facts for the results.

    Raises:
        ConfigError: two folders have the same guidance.
        EvaluationError: too few images, or no finding can be evaluated.
        SplitError: patients of the sets are not disjoint.
    """
    options = options or GenerationOptions()
    loading = loading or LoaderOptions()
    encoder = models.features or models.judge
    patients = _all_patients(real)
    train, valid = (loading.features(models.judge, source) for source in (real.train, real.valid))
    classifier = models.classifier or fit_classifier(train, valid, options.policy)
    sets = _read_sets(folders, reconstructed, real, patients, models, loading, options.conventions)
    aligned = _align(sets, models.aligner, loading)
    features = loading.features(encoder, real.all_train)
    size = options.pixel_size
    memorisation = search_copies(
        sets.generated, sets.tested, real.all_train, features, loading, pixel_size=size
    )
    rows = [
        *_finding_rows(sets, classifier, models.judge, options),
        *_fidelity_rows(sets, options),
        *_alignment_rows(sets, aligned, options),
        *_memorisation_rows(sets, memorisation, options),
    ]
    if synthetic_train is not None:
        made = loading.features(
            models.judge, GeneratedSource(synthetic_train, patients, options.conventions)
        )
        rows += use_rows(
            train, made, valid, sets.tested.scored, options.policy, options.use, options.resampling
        )
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=tuple(rows),
        config={
            "classifier": models.judge.name,
            "features": encoder.name,
            **real.framing,
            **options.stored(),
        },
        inputs={**_input_hashes(sets.generated, real, models.judge, encoder), **(inputs or {})},
        details={**_details(sets, real, classifier, memorisation, options), **(details or {})},
    )
    return GenerationResult(results, sets, classifier, memorisation, aligned, real.all_train)


def _read_sets(
    folders: Sequence[GeneratedImages],
    reconstructed: GeneratedImages | None,
    real: RealData,
    patients: Mapping[str, str],
    models: GenerationModels,
    loading: LoaderOptions,
    conventions: ConventionsName,
) -> ImageSets:
    encoder = models.features or models.judge
    read = functools.partial(read_set, classifier=models.judge, encoder=encoder, options=loading)
    tested = read("real test images", real.test)
    names = _names(folders)
    source = functools.partial(GeneratedSource, patients=patients, conventions=conventions)
    generated = [read(name, source(each)) for name, each in zip(names, folders, strict=True)]
    return ImageSets(
        generated=generated,
        tested=tested,
        real=real_of_prompts(generated[0], tested),
        rebuilt=None if reconstructed is None else read(RECONSTRUCTED, source(reconstructed)),
    )


def _names(folders: Sequence[GeneratedImages]) -> list[str]:
    names = [f"guidance {images.generation.guidance:g}" for images in folders]
    if not names or len(set(names)) < len(names):
        message = (
            f"expected folders of different guidance, got {', '.join(names) or 'none'}; "
            f"evaluate others apart"
        )
        raise ConfigError(message, "conflict", field="generated")
    if len({(images.generation.generator, images.generation.image_size) for images in folders}) > 1:
        message = "the folders are of different generators or image sizes; evaluate them apart"
        raise ConfigError(message, "mismatch", field="generated")
    return names


def _all_patients(real: RealData) -> dict[str, str]:
    """Return the patient of each key of all real images."""
    patients: dict[str, str] = {}
    for source in (real.all_train, real.valid, real.test):
        for position in range(len(source)):
            sample = source.sample(position)
            patients[sample.key] = sample.patient
    return patients


def _finding_rows(
    sets: ImageSets,
    classifier: FindingClassifier,
    encoder: ProbedEncoder,
    options: GenerationOptions,
) -> list[MetricRow]:
    """Return prompted findings, negations and sides of all sets, and the shuffled prompts of the
    main one.
    """
    rows: list[MetricRow] = []
    rules = conventions_named(options.conventions)
    like = stated_labels(sets.generated[0], classifier.names, options.policy)
    if not ((like == 1).any(axis=0) & (like == 0).any(axis=0)).any():
        return rows  # prompts that name no finding of chest radiographs
    for each in sets.prompted:
        rows += prompted_findings(each, classifier, options.policy, options.resampling, like=like)
        rows += negated_findings(each, classifier, options.resampling)
        rows += prompted_sides(each, classifier, encoder, options.resampling, rules)
    rows += shuffled_findings(
        sets.generated[0], classifier, options.policy, options.resampling.seed
    )
    return rows


def _fidelity_rows(sets: ImageSets, options: GenerationOptions) -> list[MetricRow]:
    """Return distances from the real test images, and the diversity."""
    compared = sets.not_real
    tested = sets.tested
    resampling = options.resampling
    diverse = [*sets.generated, *([] if sets.real is None else [sets.real])]
    return [
        *distance_rows(compared, tested, options.fidelity),
        *manifold_rows(compared, tested, options.fidelity, resampling),
        *matched_rows(compared, tested, options.fidelity),
        *(row for each in diverse for row in diversity_rows(each, resampling)),
    ]


def _memorisation_rows(
    sets: ImageSets, memorisation: Memorisation, options: GenerationOptions
) -> list[MetricRow]:
    """Return shares and distances of all folders, and the distances of the real test images."""
    rows = [
        row
        for each in sets.generated
        for row in memorisation_rows(each, memorisation, options.resampling)
    ]
    return [*rows, *real_distance_rows(sets.tested, memorisation, options.resampling)]


def _align(
    sets: ImageSets, model: DualEncoder | None, loading: LoaderOptions
) -> dict[str, Aligned]:
    if model is None:
        return {}
    prompts = list(dict.fromkeys(prompt for each in sets.prompted for prompt in each.prompts))
    return {each.name: align(each, model, prompts, loading) for each in sets.prompted}


def _alignment_rows(
    sets: ImageSets, aligned: Mapping[str, Aligned], options: GenerationOptions
) -> list[MetricRow]:
    known = [each for each in sets.prompted if each.name in aligned]
    return [
        row
        for each in known
        for row in alignment_rows(each, aligned[each.name], options.resampling)
    ]


def _input_hashes(
    generated: Sequence[ImageSet], real: RealData, classifier: ProbedEncoder, encoder: ProbedEncoder
) -> dict[str, str | None]:
    return {
        "generator": generated[0].source.images.generation.generator,
        **{f"{IMAGES_OF}{each.name}": each.source.fingerprint for each in generated},
        "manifest": real.test.fingerprint,
        "train_manifest": real.all_train.fingerprint,
        "validation_manifest": real.valid.fingerprint,
        "classifier_encoder": classifier.sha256,
        "features": encoder.sha256,
    }


def _details(
    sets: ImageSets,
    real: RealData,
    classifier: FindingClassifier,
    memorisation: Memorisation,
    options: GenerationOptions,
) -> dict[str, Any]:
    generated = sets.generated
    tested = sets.tested
    main = generated[0].source.images
    shards = {
        shard["sha256"]
        for manifest in main.train_manifests()
        for shard in manifest.get("shards", ())
    }
    return {
        "images": {each.name: len(each.prompts) for each in generated},
        "unreadable": {each.name: dict(each.scored.unreadable) for each in generated},
        "prompts": len({sample.extra["prompt_key"] for sample in generated[0].scored.samples}),
        "cut_prompts": len({row.prompt_key for row in main.rows if row.cut_tokens > 0}),
        "real_images_of_prompts": 0 if sets.real is None else len(sets.real.prompts),
        "test_images": len(tested.prompts),
        "training_images": len(real.all_train),
        "training_shards_not_given": len(shards - real.shards),
        "generator_training_unknown": not shards,
        "feature_dim": tested.features.x_ND.shape[1],
        "classifier": {
            **classifier.details,
            "auroc_on_test": auroc_on(classifier, tested.scored, options.policy),
        },
        "too_near_below": dict(memorisation.limit),
        "nearest": {
            space: {
                each.name: float(np.min(memorisation.sets[each.name].distance[space]))
                for each in generated
            }
            | {"real": float(np.min(memorisation.real.distance[space]))}
            for space in SPACES
        },
        "generation": {
            each.name: {
                name: getattr(each.source.images.generation, name)
                for name in ("system", "sampler", "steps", "guidance", "seed", "image_size")
            }
            for each in generated
        },
    }
