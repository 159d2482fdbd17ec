"""Names of systems: built-in ones, registered ones, and those of other packages."""

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises

from medvl.common.config_io import from_dict
from medvl.common.registry import entry_points
from medvl.errors import ConfigError
from medvl.models import create_model, registry
from medvl.models.base import System, SystemConfig
from medvl.models.dual_encoders.convirt import ConVIRT, ConVIRTConfig
from medvl.models.registry import list_models, register_system, system

TINY: dict[str, Any] = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 64,
    "projection_dim": 8,
    "frozen_text_layers": 0,
}
OUTSIDE = """
import dataclasses
from medvl.models.dual_encoders.convirt import ConVIRT, ConVIRTConfig
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(ConVIRTConfig):
    extra: int = 1


@register_system("outside")
class Outside(ConVIRT):
    Config = OutsideConfig
"""


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    entry_points.cache_clear()
    yield
    entry_points.cache_clear()
    for name in set(registry.SYSTEMS.imported) - set(registry.SYSTEMS.modules):
        del registry.SYSTEMS.imported[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with four entry points, one of which works."""
    (tmp_path / "outside_systems.py").write_text(OUTSIDE)
    metadata = tmp_path / "outside_systems-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outside-systems\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[medvl.systems]\n"
        "outside = outside_systems:Outside\n"
        "broken = no_such_module:Broken\n"
        "misnamed = outside_systems:Outside\n"
        "function = outside_systems:register_system\n"
        "convirt = outside_systems:Outside\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("outside_systems", None)


def test_list_models_imports_no_model_code() -> None:
    code = (
        "import medvl, sys; medvl.list_models(); print([n for n in sys.modules if "
        "'_encoders.' in n and 'medvl.models' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(registry.SYSTEMS.modules))
def test_every_built_in_module_registers_its_system(name: str) -> None:
    cls = system(name)
    assert issubclass(cls, System)
    assert (cls.name, cls.Config.system) == (name, name)


FORMER = {
    "albef": {"itc_weight": 1.0},
    "albert_text": {"pair_weight": 1.0},
    "arl": {"whole_entities": True, "max_entities": 24, "graph_dropout": 0.2},
    "autoencoder": {"l1_weight": 1.0, "l2_weight": 1.0, "edge_weight": 0.5, "kl_weight": 1e-3},
    "bfspr": {"report_weight": 1.0},
    "cxrclip": {"image_weight": 1.0, "text_weight": 0.5},
    "kad": {"contrast_weight": 1.0, "report_weight": 1.0},
    "lvit": {"lv_weight": 0.1},
    "lxmert": {"region_probability": 0.15},
    "m2i2": {"itc_weight": 1.0},
    "masked_text": {"pair_weight": 1.0},
    "mrm": {"contrast_scale": 1 / 0.03},
    "mumc": {"itc_weight": 1.0},
    "ptunifier": {"itc_weight": 0.1},
    "uniter": {"region_probability": 0.15, "wpa_weight": 0.1},
    "vilt": {"wpa_weight": 0.1},
}
"""Fields that checkpoints of earlier versions have, with the values that are constants now."""


@pytest.mark.parametrize("name", FORMER)
def test_settings_with_former_fields_are_read(name: str) -> None:
    config = system(name).Config
    needed: dict[str, Any] = {"labels": ("edema",)} if name == "lvit" else {}
    assert from_dict(config, {**needed, **FORMER[name]}) == config(**needed)
    for field in FORMER[name]:
        with raises(ConfigError, "unsupported", field):
            from_dict(config, {**needed, field: 0.75})


def test_a_config_creates_its_own_system() -> None:
    assert type(create_model(ConVIRTConfig(**TINY))) is ConVIRT


def test_an_entry_point_adds_a_system(package: None) -> None:
    assert "outside" in list_models()
    model = create_model("outside", **TINY, extra=2)
    assert (model.name, model.config.extra) == ("outside", 2)
    assert create_model(model.config).name == "outside"


def test_a_broken_entry_point_fails_on_its_own_use_only(package: None) -> None:
    with raises(ConfigError, "unsupported", names="no_such_module:Broken"):
        system("broken")
    for name in ("misnamed", "function"):
        with raises(ConfigError, "wrong_type", names=name):
            system(name)
    assert system("outside").name == "outside"


def test_an_entry_point_cannot_replace_a_built_in_system(package: None) -> None:
    assert system("convirt") is ConVIRT


def test_a_system_defined_in_a_script_is_created_by_name() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class MineConfig(ConVIRTConfig):
        pass

    @register_system("mine")
    class Mine(ConVIRT):
        Config = MineConfig

    assert type(create_model("mine", **TINY)) is Mine
    assert "mine" in list_models("mi*")
    assert ConVIRTConfig.system == "convirt"


def test_a_name_and_a_config_belong_to_one_class() -> None:
    class Config(SystemConfig):
        pass

    for taken in ("convirt", "albef"):
        with raises(ConfigError, "exists", "name"):
            register_system(taken)(type("Other", (ConVIRT,), {"Config": Config}))
    with raises(ConfigError, "conflict", "Config"):
        register_system("other")(type("Other", (ConVIRT,), {}))
