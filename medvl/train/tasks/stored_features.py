"""Training on the stored output of a frozen image encoder in place of images (`DataConfig.image_features`)."""

import json
from typing import TYPE_CHECKING, Any

from medvl.common.untrusted import parse_json
from medvl.data.loading.sources import region_manifest_of
from medvl.data.transforms.image import EvalTransform
from medvl.encoders.pretrained import weights_sha256
from medvl.errors import ConfigError
from medvl.models.downstream.regions.grid import grid_settings

if TYPE_CHECKING:
    from medvl.train.tasks.pretraining import DataConfig

_FIELD = "data.image_features"


def check_can_read_features(data: "DataConfig", model: Any) -> None:
    """Raise ConfigError unless a model and the settings of its data allow stored features in place of images.

    The system must train from its image encoder's output alone ("unsupported"), and the encoder must be frozen. Regions
    of a detector, and another transform than the model's own, such as an augmentation, exclude them ("conflict").
    """
    if not getattr(model, "reads_features", False):
        message = f"{model.name} does not train from stored features; leave {_FIELD} out"
        raise ConfigError(message, "unsupported", field=_FIELD)
    if any(parameter.requires_grad for parameter in model.image_encoder.parameters()):
        message = "the image encoder is trained, so that its features change: freeze it (model.frozen_image True)"
        raise ConfigError(f"{message}, or leave {_FIELD} out", "conflict", field=_FIELD)
    if data.regions is not None:
        message = f"data.regions and {_FIELD} are both in place of images; leave one out"
        raise ConfigError(message, "conflict", field=_FIELD)
    if not (isinstance(data.image, EvalTransform) and data.image == model.transform):
        message = f"stored features are of images without augmentation: set data.image to {_named(model.transform)}"
        raise ConfigError(f"{message}, or leave {_FIELD} out", "conflict", field="data.image")


def check_features(model: Any, source: Any) -> dict[str, Any]:
    """Return the entry for `describe` of the features beside a source, which are those of the model's image encoder.

    Raises ConfigError ("mismatch") if they are of another encoder, image size, transform or weights, or lack a token.
    """
    manifest = region_manifest_of(source)
    assert manifest is not None, "the source was opened with its regions"
    settings = grid_settings(model.image_encoder, model.transform, all_tokens=True)
    ours = parse_json(json.dumps(settings))
    differing = [name for name in ours if manifest.settings.get(name) != ours[name]]
    if not differing and manifest.detector_sha256 != weights_sha256(model.image_encoder, settings):
        differing = ["weights"]
    if differing:
        pairs = [f"{name} {manifest.settings.get(name)}, expected {ours[name]}" for name in differing if name in ours]
        message = f"{manifest.detector} has other {', '.join(differing)} than the model's frozen image encoder"
        advice = "run `medvl regions --all-tokens` with the model's encoder, weights, image size and fit"
        raise ConfigError("; ".join([message, *pairs, advice]), "mismatch", field=_FIELD)
    return {"image_features": manifest.summary()}


def _named(transform: EvalTransform) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in transform.settings().items() if value)
    return f"EvalTransform({settings})"
