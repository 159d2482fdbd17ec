"""Which systems there are, and how one is made."""

import dataclasses
import difflib
import fnmatch
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.encoders.presets import TEXT_PRESETS
from medvl.encoders.text.builders import uses_canonical_text, uses_clip_tokenizer
from medvl.errors import ConfigError
from medvl.models.base import System

_SYSTEMS = {
    "albef": "medvl.models.fusion_encoders.albef:ALBEF",
    "chexzero": "medvl.models.dual_encoders.chexzero:CheXzero",
    "clip": "medvl.models.dual_encoders.clip:CLIP",
    "classifier": "medvl.models.downstream.classifier:Classifier",
    "convirt": "medvl.models.dual_encoders.convirt:ConVIRT",
    "detector": "medvl.models.downstream.detector:Detector",
    "dual_stream": "medvl.models.fusion_encoders.streams:DualStreamModel",
    "gloria": "medvl.models.dual_encoders.gloria:GLoRIA",
    "m3ae": "medvl.models.fusion_encoders.m3ae:M3AE",
    "medvill": "medvl.models.fusion_encoders.medvill:MedViLL",
    "segmenter": "medvl.models.downstream.segmenter:Segmenter",
    "siglip": "medvl.models.dual_encoders.siglip:SigLIP",
    "single_stream": "medvl.models.fusion_encoders.streams:SingleStreamModel",
    "vqa": "medvl.models.downstream.vqa.model:VQA",
}
"""name -> module:class, imported on first use."""


def list_models(pattern: str = "*") -> list[str]:
    """Names of the systems that match a wildcard, sorted."""
    return sorted(fnmatch.filter(_SYSTEMS, pattern))


def system(name: str) -> type[System]:
    """The class of a system. Raises ConfigError naming the nearest known name."""
    if name not in _SYSTEMS:
        near = difflib.get_close_matches(name, _SYSTEMS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(list_models())}"
        raise ConfigError(f"no system is called {name!r}: {hint} A folder of a checkpoint can be given as well.")
    module, _, attribute = _SYSTEMS[name].partition(":")
    found: type[System] = getattr(importlib.import_module(module), attribute)
    return found


def create_model(
    name: Any,
    *,
    pretrained: bool | None = None,
    tokenizer: Tokenizer | Path | str | None = None,
    **settings: Any,
) -> System:
    """A system by name, by its configuration, or from a checkpoint directory.

    Args:
        name: "convirt", ...; or a configuration such as `ConVIRTConfig(...)`; or the folder of a checkpoint.
        pretrained: True starts both encoders from their presets' published weights (hub, pinned revision); None and
            False initialise at random from torch's generator and never touch the network.
        tokenizer: the tokenizer or its folder. Default: with `pretrained`, the text encoder's own from the hub; else
            none, and the model takes token ids only.
        settings: fields of the system's configuration that differ from the published ones.

    Raises:
        ConfigError: the name or a setting is unknown, or the tokenizer does not fit the text encoder.
        WeightsError: pretrained weights cannot be had or do not fit.
    """
    if isinstance(name, str | Path) and Path(name).is_dir():
        if settings or pretrained is not None or tokenizer is not None:
            raise ConfigError(f"{name} is a checkpoint: its settings and tokenizer are its own")
        from medvl.models.checkpoint import load

        return load(name)
    cls, config = _configuration(name, settings)
    if tokenizer is None and pretrained:
        tokenizer = _tokenizer_of_preset(config)
    if isinstance(tokenizer, str | Path):
        family, _, model = getattr(config, "text_encoder", "").partition(":")
        canonical = family == "open_clip" and uses_canonical_text(model)
        tokenizer = load_tokenizer(tokenizer, max_tokens=config.max_tokens, cleaning="canonical" if canonical else None)
    if tokenizer is not None:
        config = _fit_vocabulary(config, tokenizer, bool(pretrained))
    return cls.build(config, pretrained=bool(pretrained), tokenizer=tokenizer)


def _configuration(name: Any, settings: Mapping[str, Any]) -> tuple[type[System], Any]:
    if isinstance(name, str | Path):
        cls = system(str(name))
        _check_settings(str(name), cls.Config, settings)
        return cls, cls.Config(**settings)
    if getattr(name, "system", None) not in _SYSTEMS:
        raise ConfigError(f"a {type(name).__name__} is not the configuration of a system")
    cls = system(name.system)  # this one alone is imported
    _check_settings(cls.name, cls.Config, settings)
    return cls, cls.Config(**{**vars(name), **settings})


def _check_settings(name: str, config: type, settings: Mapping[str, Any]) -> None:
    fields = [field.name for field in dataclasses.fields(config)]
    for setting in settings:
        if setting not in fields:
            near = difflib.get_close_matches(setting, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields)}"
            raise ConfigError(f"{name} has no setting {setting!r}: {hint}")


def _tokenizer_of_preset(config: Any) -> Tokenizer | None:
    preset = TEXT_PRESETS.get(getattr(config, "text_encoder", ""))
    if preset is None:
        family, _, model = config.text_encoder.partition(":")
        clip = family == "open_clip" and uses_clip_tokenizer(model)
        return load_tokenizer("clip", max_tokens=config.max_tokens) if clip else None
    if preset.tokenizer is not None:
        return load_tokenizer(preset.tokenizer, max_tokens=config.max_tokens)
    if preset.hub_id is None:
        return None
    return load_tokenizer(preset.hub_id, revision=preset.revision, max_tokens=config.max_tokens)


def _fit_vocabulary(config: Any, tokenizer: Tokenizer, pretrained: bool) -> Any:
    """The text encoder gets as many embeddings as the tokenizer has ids, unless published weights fix the number."""
    if config.vocab_size is None and not pretrained:
        return dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the text encoder {config.vocab_size} embeddings: "
            "they do not belong together"
        )
    return config
