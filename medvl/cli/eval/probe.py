"""`medvl eval probe`: a linear probe of an image encoder."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.cli.eval.options import MeanOptions, RunOptions, publish_result
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.eval.probing.features import FeatureTable, ProbedEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The image encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with an image encoder"""
    random_encoder: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of an image encoder with random weights, such as resnet50"""
    pretrained: bool = False
    """use the published weights of --encoder"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub"""
    image_arguments: Mapping[str, bool | int | float | str | tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )
    """arguments of --encoder, such as mean 0.5 std 0.5 pad_type same"""
    image_size: int | None = None
    """image size of --encoder, where it can be chosen"""


def probe(
    train: Path,
    valid: Path,
    test: Path,
    image: EncoderOptions,
    shared: RunOptions,
    label: MeanOptions,
    *,
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    levels: str | None = None,
    cache: Path | None = None,
) -> None:
    """Evaluate an image encoder by a linear probe at fractions of the labels, with intervals and a page.

    Args:
        train: folder of shards with labels, on which the probe is fitted.
        valid: folder of shards of other patients, on which penalty and thresholds are chosen.
        test: folder of shards of further patients, that the encoder was not trained on.
        fractions: fractions of the training patients whose labels are used.
        seeds: random subsets per fraction below 1.
        levels: ordinal AUCs of a graded finding instead of the labels, such as edema_severity=none,mild,moderate,severe
            (lowest first) for shards with --category-column edema_severity.
        cache: folder of cached features; default `features` beside the output folder.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.probing.evaluate import linear_probe
    from medvl.eval.probing.page import write_probe_page

    probed = _open_encoder(image, test, shared.device)
    task = "probe_random" if image.random_encoder else "probe"
    output = shared.folder(image.checkpoint, task, hashed=not image.random_encoder)
    source = open_source(test)
    folder = output.settle(manifest=source.fingerprint)
    features = functools.partial(_features, probed, cache or output.path.parent / "features", shared, levels)
    result = linear_probe(
        features(train, synthetic=True),
        features(valid),
        features(test),
        fractions=fractions,
        seeds=seeds,
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        smallest_class=label.smallest_class,
        inputs=_hashes(image, probed),
    )
    page = functools.partial(write_probe_page, result, pixels=source.pixels)
    publish_result(result, folder, page, probed.name, source.manifest, result.table(), options=shared)


def _open_encoder(options: EncoderOptions, test: Path, device: str) -> "ProbedEncoder":
    from medvl.eval.core.open import load_model, open_source, resolve_device
    from medvl.eval.probing.features import ProbedEncoder

    checkpoint, encoder = options.checkpoint, options.encoder
    if checkpoint is not None and encoder is None:
        open_source(test, [checkpoint])  # refuses test patients of its training data before the model is loaded
        model = load_model(checkpoint, device)
        return ProbedEncoder.from_model(model, name=f"{model.name} ({checkpoint})", random=options.random_encoder)
    if encoder is not None and checkpoint is None and not options.random_encoder:
        if options.pretrained and options.image_weights is not None:
            raise ConfigError("give --pretrained or --image-weights, not both", "conflict", field="image_weights")
        arguments: dict[str, Any] = dict(options.image_arguments)
        if options.image_size is not None:
            arguments["image_size"] = options.image_size
        probed = ProbedEncoder.from_name(encoder, pretrained=options.image_weights or options.pretrained, **arguments)
        probed.module.to(resolve_device(device))
        return probed
    message = "expected --checkpoint (with --random-encoder for the baseline) or --encoder; give exactly one"
    raise ConfigError(message, "conflict", field="checkpoint")


def _hashes(options: EncoderOptions, probed: "ProbedEncoder") -> dict[str, str | None]:
    from medvl.eval.core.results import checkpoint_sha256

    trained = None if options.random_encoder else options.checkpoint
    return {"checkpoint": None if trained is None else checkpoint_sha256(trained), "encoder": probed.sha256}


def _features(
    encoder: "ProbedEncoder",
    cache: Path,
    shared: RunOptions,
    levels: str | None,
    data: Path,
    *,
    synthetic: bool = False,
) -> "FeatureTable":
    from medvl.common.ranks import rank_and_world
    from medvl.eval.core.open import open_for_evaluation, open_source
    from medvl.eval.probing.features import encode_features
    from medvl.eval.probing.severity import ordinal_table, parse_levels

    graded = None if levels is None else parse_levels(levels)
    source = open_source(data, synthetic=synthetic)
    loader = open_for_evaluation(
        source, encoder.transform, batch=shared.batch, workers=shared.workers, ranks=rank_and_world()
    )
    table = encode_features(encoder, loader, cache=cache)
    return table if graded is None else ordinal_table(table, *graded)
