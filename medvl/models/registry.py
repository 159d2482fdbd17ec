"""Names of systems and the classes behind them.

A system registers itself when its module is imported:

    @register_system("convirt")
    class ConVIRT(DualEncoder):
        Config = ConVIRTConfig
        ...

medvl's own modules are imported on first use. Another package adds systems with the entry point
group `medvl.systems`, for example in its pyproject.toml:

    [project.entry-points."medvl.systems"]
    my_system = "my_package.my_system:MySystem"
"""

import fnmatch
from collections.abc import Callable
from typing import TypeVar

from medvl.common.config_io import nearest
from medvl.common.registry import Registry
from medvl.errors import ConfigError
from medvl.models.base import System

_MODULES = {
    "albef": "medvl.models.fusion_encoders.albef",
    "albert_text": "medvl.models.language.masked_text",
    "arl": "medvl.models.fusion_encoders.arl",
    "autoencoder": "medvl.models.image_generation.autoencoder",
    "berthop": "medvl.models.fusion_encoders.berthop",
    "biovil": "medvl.models.dual_encoders.biovil",
    "bfspr": "medvl.models.dual_encoders.bfspr",
    "biovil_t": "medvl.models.dual_encoders.biovil_t",
    "carzero": "medvl.models.dual_encoders.carzero",
    "causal_lm": "medvl.models.report_generators.causal_lm",
    "change_classifier": "medvl.models.downstream.classifier",
    "chexzero": "medvl.models.dual_encoders.chexzero",
    "choices": "medvl.models.downstream.ranking",
    "classifier": "medvl.models.downstream.classifier",
    "clip": "medvl.models.dual_encoders.clip",
    "colipri": "medvl.models.volumes.colipri",
    "convirt": "medvl.models.dual_encoders.convirt",
    "ct_clip": "medvl.models.volumes.ct_clip",
    "cxrclip": "medvl.models.dual_encoders.cxrclip",
    "cxrmate": "medvl.models.report_generators.cxrmate",
    "detector": "medvl.models.downstream.detector",
    "dual_stream": "medvl.models.fusion_encoders.streams",
    "fused_classifier": "medvl.models.downstream.fused_classifier",
    "fvlm": "medvl.models.volumes.fvlm",
    "gloria": "medvl.models.dual_encoders.gloria",
    "hlip": "medvl.models.volumes.hlip",
    "kad": "medvl.models.dual_encoders.kad",
    "kebert": "medvl.models.language.kebert",
    "latent_diffusion": "medvl.models.image_generation.latent_diffusion",
    "local_analysis": "medvl.models.dual_encoders.lovt",
    "lovt": "medvl.models.dual_encoders.lovt",
    "lvit": "medvl.models.downstream.lvit",
    "m2i2": "medvl.models.fusion_encoders.m2i2",
    "lxmert": "medvl.models.fusion_encoders.lxmert",
    "m3ae": "medvl.models.fusion_encoders.m3ae",
    "masked_text": "medvl.models.language.masked_text",
    "mavl": "medvl.models.dual_encoders.mavl",
    "medclip": "medvl.models.dual_encoders.medclip",
    "medklip": "medvl.models.dual_encoders.medklip",
    "medvill": "medvl.models.fusion_encoders.medvill",
    "mgca": "medvl.models.dual_encoders.mgca",
    "mixed": "medvl.models.fusion_encoders.mixed",
    "mrm": "medvl.models.fusion_encoders.mrm",
    "mumc": "medvl.models.fusion_encoders.mumc",
    "mutual_info": "medvl.models.dual_encoders.mutual_info",
    "pixelbert": "medvl.models.fusion_encoders.pixelbert",
    "ptunifier": "medvl.models.fusion_encoders.ptunifier",
    "r2gen": "medvl.models.report_generators.r2gen",
    "radzero": "medvl.models.dual_encoders.radzero",
    "retrieval": "medvl.models.downstream.ranking",
    "roentgen": "medvl.models.image_generation.latent_diffusion",
    "segmenter": "medvl.models.downstream.dense",
    "siglip": "medvl.models.dual_encoders.siglip",
    "single_stream": "medvl.models.fusion_encoders.streams",
    "umrl": "medvl.models.dual_encoders.umrl",
    "uniter": "medvl.models.fusion_encoders.uniter",
    "vilt": "medvl.models.fusion_encoders.vilt",
    "visualbert": "medvl.models.fusion_encoders.visualbert",
    "vqa": "medvl.models.downstream.vqa.model",
}
"""Name of a built-in system -> module that defines it."""

SYSTEMS: Registry[System] = Registry(
    "medvl.models.base:System",
    kind="system",
    modules=_MODULES,
    group="medvl.systems",
    decorator="register_system",
)
"""The systems by name."""

Class = TypeVar("Class", bound=type[System])


def register_system(name: str) -> Callable[[Class], Class]:
    """Register the decorated `System` under `name` and its `Config` as the configuration of that
    system.

    Raises ConfigError where the name belongs to another class, or the class has no `Config` of its
    own.
    """

    def register(cls: Class) -> Class:
        SYSTEMS.check(name, cls)
        if vars(cls.Config).get("system", name) != name:
            message = (
                f"{cls.__name__} needs a Config of its own: {cls.Config.__name__} is "
                f"{cls.Config.system!r}'s"
            )
            raise ConfigError(message, "conflict", field="Config")
        SYSTEMS.register(name, cls)
        cls.Config.system = name
        return cls

    return register


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the systems that match a wildcard, sorted. Imports none of them."""
    return sorted(fnmatch.filter(SYSTEMS.names(), pattern))


def system(name: str) -> type[System]:
    """Return the class of a system. Imports its module if needed.

    Raises ConfigError where no system has this name, or its entry point does not load.
    """
    if name not in SYSTEMS.names():
        message = f"no system or checkpoint is named {name!r}: {nearest(name, list_models())}"
        raise ConfigError(message, "unknown_name", field="name")
    return SYSTEMS.get(name)
