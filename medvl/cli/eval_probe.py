"""`medvl eval probe`: what labels can be read off an image encoder's features by a line."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.cli.eval_common import default_folder, load_model, publish, refuse_seen
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.eval.probing.evaluate import ProbeResult
    from medvl.eval.probing.features import FeatureTable, ProbedEncoder


def probe(
    train: Path,
    valid: Path,
    test: Path,
    *,
    checkpoint: Path | None = None,
    encoder: str | None = None,
    pretrained: bool = False,
    image_size: int | None = None,
    random_encoder: bool = False,
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0),
    seeds: int = 5,
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore",
    missing: Literal["ignore", "negative"] = "negative",
    threshold_rule: Literal["f1", "mcc", "youden"] = "f1",
    resamples: int = 1000,
    cache: Path | None = None,
    out: Path | None = None,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Linear probe of an image encoder at fractions of the labels, with intervals and a page.

    Args:
        train: folder of shards with labels to fit on.
        valid: folder of shards of other patients, on which penalty and thresholds are chosen.
        test: folder of shards of yet other patients, that the encoder was not trained on.
        checkpoint: folder of a checkpoint of any system with an image encoder.
        encoder: name of an image encoder instead, such as resnet50, at random weights.
        pretrained: that encoder at its published weights.
        image_size: side of that encoder's images, where it can be chosen.
        random_encoder: draw the weights of the checkpoint's encoder anew: what the probe has without pretraining.
        fractions: of the training patients whose labels are used.
        seeds: draws of each fraction below 1.
        uncertain: what a label of -1 counts as.
        missing: what an absent label counts as.
        threshold_rule: what thresholds maximise on the validation images.
        resamples: of the bootstrap.
        cache: folder of kept features; default features beside the folder of the results.
        out: gets results.json, predictions.jsonl and index.html; default eval/probe in the checkpoint's run.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.eval import LabelPolicy, linear_probe

    probed = _choose(checkpoint, encoder, pretrained, image_size, random_encoder, test, device)
    folder = _folder(out, checkpoint, random_encoder)
    read = functools.partial(_features, probed, cache or folder.parent / "features", batch, workers)
    result = linear_probe(
        *map(read, (train, valid, test)),
        fractions=fractions,
        seeds=seeds,
        policy=LabelPolicy(uncertain=uncertain, missing=missing),
        threshold_rule=threshold_rule,
        resamples=resamples,
        inputs=_hashes(probed, None if random_encoder else checkpoint),
    )
    _publish(result, folder, probed.name, test)


def _publish(result: "ProbeResult", folder: Path, model: str, test: Path) -> None:
    from medvl.data.shards.format import ShardSource
    from medvl.eval.probing.page import write_probe_page

    source = ShardSource(test)
    page = functools.partial(write_probe_page, pixels=source.pixels)
    publish(result, folder, page, model=model, source=source, table=result.table())


def _hashes(encoder: "ProbedEncoder", checkpoint: Path | None) -> dict[str, str | None]:
    from medvl.eval.core.results import checkpoint_sha256

    weights = None if checkpoint is None else checkpoint_sha256(checkpoint)
    return {"checkpoint": weights, "encoder": encoder.sha256}


def _choose(
    checkpoint: Path | None,
    encoder: str | None,
    pretrained: bool,
    image_size: int | None,
    random_encoder: bool,
    test: Path,
    device: str,
) -> "ProbedEncoder":
    from medvl.data.shards.format import ShardSource
    from medvl.eval.probing.features import ProbedEncoder

    if encoder is not None and checkpoint is None and not random_encoder:
        return _named(encoder, pretrained, image_size, device)
    if checkpoint is None or encoder is not None:
        raise ConfigError(
            "name a --checkpoint, with --random-encoder for its baseline, or an --encoder, which is random unless "
            "--pretrained"
        )
    refuse_seen(checkpoint, ShardSource(test))
    model = load_model(checkpoint, device)
    return ProbedEncoder.of(model, name=f"{model.name} ({checkpoint})", random=random_encoder)


def _folder(out: Path | None, checkpoint: Path | None, random_encoder: bool) -> Path:
    if out is not None:
        return out
    if checkpoint is None:
        raise ConfigError("--encoder needs --out: there is no run to put the results in")
    return default_folder(checkpoint, "probe_random" if random_encoder else "probe")


def _named(encoder: str, pretrained: bool, image_size: int | None, device: str) -> "ProbedEncoder":
    import torch

    from medvl.eval.probing.features import ProbedEncoder

    probed = ProbedEncoder.named(encoder, pretrained=pretrained, image_size=image_size)
    probed.module.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    return probed


def _features(encoder: "ProbedEncoder", cache: Path, batch: int, workers: int, data: Path) -> "FeatureTable":
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.subset import no_text
    from medvl.data.shards.format import ShardSource
    from medvl.data.transforms.text import WholeText
    from medvl.eval.probing.features import encode_features

    loader = open_loader(
        ShardSource(data),
        batch=batch,
        image=encoder.transform,
        text=WholeText(),
        tokenizer=no_text,
        train=False,
        workers=workers,
    )
    return encode_features(encoder, loader, cache=cache)
