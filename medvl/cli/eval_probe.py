"""`medvl eval probe`: a linear probe of an image encoder."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.cli.eval_common import LabelOptions, RunOptions, print_results
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.eval.probing.features import FeatureTable, ProbedEncoder


def probe(
    train: Path,
    valid: Path,
    test: Path,
    shared: RunOptions,
    label: LabelOptions,
    *,
    checkpoint: Path | None = None,
    encoder: str | None = None,
    pretrained: bool = False,
    image_size: int | None = None,
    random_encoder: bool = False,
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    cache: Path | None = None,
) -> None:
    """Evaluate an image encoder by a linear probe at fractions of the labels, with intervals and a page.

    Args:
        train: folder of shards with labels, on which the probe is fitted.
        valid: folder of shards of other patients, on which penalty and thresholds are chosen.
        test: folder of shards of further patients, that the encoder was not trained on.
        checkpoint: folder of a checkpoint of any system with an image encoder.
        encoder: name of an image encoder instead of a checkpoint, such as resnet50; random weights.
        pretrained: use the published weights of --encoder.
        image_size: image size of --encoder, where it can be chosen.
        random_encoder: reinitialise the encoder of the checkpoint, as a baseline without pretraining.
        fractions: fractions of the training patients whose labels are used.
        seeds: random subsets per fraction below 1.
        cache: folder of cached features; default `features` beside the output folder.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.core.publish import publish
    from medvl.eval.core.results import checkpoint_sha256
    from medvl.eval.probing.evaluate import linear_probe
    from medvl.eval.probing.page import write_probe_page

    if checkpoint is not None and encoder is None:
        open_source(test, [checkpoint])  # before the model is loaded: refuses patients of its training data
        probed = _from_checkpoint(checkpoint, random_encoder, shared.device)
    elif encoder is not None and checkpoint is None and not random_encoder:
        probed = _from_name(encoder, pretrained, image_size, shared.device)
    else:
        raise ConfigError(
            "expected --checkpoint (with --random-encoder for the baseline) or --encoder; give exactly one",
            "conflict",
            field="checkpoint",
        )
    folder = _output_folder(shared.out, checkpoint, random_encoder)
    features = functools.partial(_features, probed, cache or folder.parent / "features", shared)
    result = linear_probe(
        *map(features, (train, valid, test)),
        fractions=fractions,
        seeds=seeds,
        policy=label.policy(),
        threshold_rule=label.threshold_rule,
        resamples=shared.resamples,
        inputs={
            "checkpoint": None if checkpoint is None or random_encoder else checkpoint_sha256(checkpoint),
            "encoder": probed.sha256,
        },
    )
    source = open_source(test)
    paths = publish(
        result.results,
        folder,
        predictions=result.predictions(),
        write_page=functools.partial(write_probe_page, result, pixels=source.pixels),
        model=probed.name,
        manifest=source.manifest,
    )
    print_results(result.table(), paths)


def _from_checkpoint(checkpoint: Path, random_encoder: bool, device: str) -> "ProbedEncoder":
    from medvl.eval.core.open import load_model
    from medvl.eval.probing.features import ProbedEncoder

    model = load_model(checkpoint, device)
    return ProbedEncoder.from_model(model, name=f"{model.name} ({checkpoint})", random=random_encoder)


def _from_name(encoder: str, pretrained: bool, image_size: int | None, device: str) -> "ProbedEncoder":
    from medvl.eval.core.open import resolve_device
    from medvl.eval.probing.features import ProbedEncoder

    probed = ProbedEncoder.from_name(encoder, pretrained=pretrained, image_size=image_size)
    probed.module.to(resolve_device(device))
    return probed


def _output_folder(out: Path | None, checkpoint: Path | None, random_encoder: bool) -> Path:
    from medvl.eval.core.publish import default_folder

    if out is not None:
        return out
    if checkpoint is None:
        raise ConfigError("--encoder needs --out: there is no run to hold the results", "missing", field="out")
    return default_folder(checkpoint, "probe_random" if random_encoder else "probe")


def _features(encoder: "ProbedEncoder", cache: Path, shared: RunOptions, data: Path) -> "FeatureTable":
    from medvl.eval.core.open import open_for_evaluation, open_source
    from medvl.eval.probing.features import encode_features

    loader = open_for_evaluation(open_source(data), encoder.transform, batch=shared.batch, workers=shared.workers)
    return encode_features(encoder, loader, cache=cache)
