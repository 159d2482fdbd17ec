"""`scripts/compare_dual.py`: which systems it finds, one run from data to table, runs that fail."""

import argparse
import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises
from helpers.script_modules import SCRIPTS, load_script

from medvl.cli import main as cli
from medvl.errors import ConfigError, EvaluationError
from medvl.models import ConVIRTConfig, DualEncoder, FusionModel, list_models, system

TINY = "--patients 22 --side 96 --steps 2 --batch 8 --workers 0 --resamples 5 --systems convirt"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with its commands in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("MEDVL_SALT_FILE", "")  # so that it is restored
    monkeypatch.delenv("MEDVL_SALT_FILE")
    load_script("results")
    runs = load_script("compare_runs")
    monkeypatch.setattr(runs, "medvl", lambda *arguments: cli.main(list(map(str, arguments))))
    for name in ("compare_table", "compare_dual_tasks", "compare_extras"):
        load_script(name)
    return load_script("compare_dual")


def run(script: Any, arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["compare_dual.py", *arguments.split()])
    status: int = script.main()
    return status


def convirt(script: Any, name: str = "convirt") -> Any:
    return script.make_run(name, script.Preset(recipe=Path("r.py"), preset="tiny", config=ConVIRTConfig), 0)


def test_every_registered_dual_encoder_has_a_preset_or_a_reason(script: Any) -> None:
    presets = script.presets_by_system()
    known = {name for name in list_models() if issubclass(system(name), DualEncoder)}
    assert known - set(script.REASONS) <= presets.keys()
    assert {"chexzero", "clip", "convirt", "gloria", "siglip"} <= {name for name, preset in presets.items() if preset}
    assert "albef" not in presets
    assert presets["clip"].config.system == "clip"
    assert presets["clip"].recipe == presets["chexzero"].recipe
    assert script.selected("all", presets) == list(presets)
    with raises(ConfigError, "unknown_name", "systems"):
        script.selected("convirt,nothing", presets)


def test_every_system_takes_the_common_encoders(script: Any, tmp_path: Path) -> None:
    runs = sys.modules["compare_runs"]
    sizes = runs.Sizes(data=tmp_path, patients=1, side=1, steps=3, batch=4, workers=0, resamples=0)
    for name, preset in script.presets_by_system().items():
        if preset is None:
            continue
        presets = runpy.run_path(str(preset.recipe))["PRESETS"]
        settings = runs.settings_of(runs.make_run(name, preset, 5), sizes, presets[preset.preset])
        encoders = runs.ENCODERS | ({"text_encoder": "static"} if settings.model.system == "umrl" else {})
        assert {key: getattr(settings.model, key) for key in runs.ENCODERS} == encoders
        assert type(settings.model) is preset.config
        assert (settings.init_from, settings.pretrained, settings.data.valid) == (None, False, None)
        assert (settings.train.steps, settings.train.global_batch, settings.train.seed) == (3, 4, 5)


@pytest.mark.slow
def test_run_from_data_to_table(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"{TINY} --data {tmp_path}"
    sizes = script.Sizes(data=tmp_path, patients=22, side=96, steps=2, batch=8, workers=0, resamples=5)
    script.make_data(sizes, ())
    assert run(script, f"{arguments} --only convirt-0", monkeypatch) == 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(script, f"{arguments} --dry-run", monkeypatch) == 0
    assert (
        capsys.readouterr().out
        == "convirt-0: convirt_mimic.py tiny, zero-shot, retrieval, grounding, probe, finished\n"
    )
    assert run(script, arguments, monkeypatch) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == times
    _, head, line, trained, at_random, *_ = capsys.readouterr().out.splitlines()
    columns = [text.strip() for text in head.strip("|").split("|")]
    assert columns == ["", *script.COLUMNS.metrics, "pairs/s", "memory, GiB"]
    assert line == "|" + "---|" * len(columns)
    assert trained.startswith("| convirt | ")
    assert at_random.startswith("| convirt, at random | ")
    assert trained.count("[") == at_random.count("[") >= 4  # so few patients lack some findings


def test_a_failed_run_is_reported_and_the_others_go_on(script: Any, tmp_path: Path) -> None:
    runs = {name: convirt(script, name) for name in ("one", "two")}
    sizes = script.Sizes(data=tmp_path, patients=1, side=1, steps=1, batch=1, workers=0, resamples=0)
    program = "import sys; sys.exit('error: no memory' if sys.argv[1] == 'one' else 0)"
    failed = script.failures(runs, sizes, [sys.executable, "-c", program])
    assert failed == {"one": "error: no memory"}
    table = script.COLUMNS.table(
        [convirt(script)], tmp_path, {"umrl": "trains on features"}, {"convirt-0": "error: no memory"}
    )
    assert "| convirt | – | – |" in table
    assert "| umrl | – | – |" in table
    assert "convirt: failed: error: no memory." in table
    assert "umrl: trains on features." in table


def test_an_evaluation_that_does_not_apply_is_a_dash_with_its_reason(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = sys.modules["compare_runs"]

    def refuse(code: str) -> Any:
        def evaluate(*_: Any) -> None:
            raise EvaluationError("no grid of patches", code)

        return evaluate

    folder = convirt(script).results(tmp_path, "trained", "grounding")
    runs.evaluate(refuse("unsupported"), tmp_path, None, folder)
    assert runs.is_evaluated(folder)
    notes: dict[str, str] = {}
    columns = script.Columns({name: m for name, m in script.COLUMNS.metrics.items() if m[0] == "grounding"})
    assert list(columns.scores(convirt(script), "trained", tmp_path, notes)) == ["–", "–"]
    assert set(notes.values()) == {"no grid of patches"}
    with raises(EvaluationError, "empty"):
        runs.evaluate(refuse("empty"), tmp_path, None, folder)


def test_extras_share_the_run_of_their_system(script: Any) -> None:
    preset = script.Preset(recipe=Path("r.py"), preset="tiny", config=ConVIRTConfig)
    extras = script.extra_runs({"biovil_t": preset, "medclip": preset, "convirt": preset, "umrl": None}, [0, 1])
    main = dataclasses.replace(convirt(script), name="biovil_t")
    planned = script.merged([main, *extras])
    assert planned["biovil_t-0"].tasks == (*main.tasks, "change", "change-without-prior")
    assert planned["biovil_t-1"].tasks == ("change", "change-without-prior")
    assert planned["medclip-tenth-0"].train[0] == planned["convirt-tenth-0"].train[0]


def test_umrl_takes_the_image_encoder_of_convirts_run(script: Any, tmp_path: Path) -> None:
    runs = sys.modules["compare_runs"]
    presets = script.presets_by_system()
    extras = [run for run in script.extra_runs(presets, [3]) if run.config.system == "umrl"]
    assert {run.name for run in extras} == {"umrl-ea", "umrl-ea-adv"}
    planned = script.merged([*script.prerequisites(extras, presets), *extras])
    assert next(iter(planned)) == "convirt-3"
    assert planned["convirt-3"].tasks == ()
    sizes = runs.Sizes(data=tmp_path, patients=1, side=1, steps=3, batch=4, workers=0, resamples=0)
    for run in extras:
        settings = runs.settings_of(run, sizes, runpy.run_path(str(run.recipe))["PRESETS"][run.preset])
        assert settings.image_from == sizes.home / "convirt-3/run/last"
        assert (settings.model.paired_share, settings.model.text_encoder) == (0.01, "static")
        assert (settings.model.adversarial_weight > 0) == (run.name == "umrl-ea-adv")


def test_fusion_encoders_are_listed_with_the_convirt_that_makes_shortlists(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load_script("compare_fusion_tasks")
    fusion = load_script("compare_fusion")
    assert run(fusion, f"--dry-run --data {tmp_path}", monkeypatch) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("convirt-0: ")
    known = {name for name in list_models() if issubclass(system(name), FusionModel)}
    named = {line.split(":")[0].removesuffix("-0") for line in others}
    assert {"m3ae", "medvill"} <= named
    assert {name.split("-")[0] for name in named} <= known
    assert not named & set(fusion.LEFT_OUT)


def test_comparison_on_real_data_starts_all_systems_alike(script: Any, tmp_path: Path) -> None:
    real, runs = load_script("compare_real_dual"), sys.modules["compare_runs"]
    options = argparse.Namespace(starts=["imagenet"], systems=real.SYSTEMS, seeds=[0])
    sizes = runs.Sizes(data=tmp_path, patients=0, side=0, steps=3, batch=4, workers=0, resamples=0)
    for run in real.planned(options, tmp_path):
        settings = runs.settings_of(run, sizes, runpy.run_path(str(run.recipe))["PRESETS"][run.preset])
        image = {**settings.model.image_arguments, **vars(settings.model)}
        assert image["image_encoder"] == "timm:mobilenetv2_035"
        assert (image.get("mean", image.get("pixel_mean")), image.get("std", image.get("pixel_std"))) == (0.5, 0.5)
        assert settings.model.image_weights.startswith(str(tmp_path))
        assert run.tasks == ("labels", "retrieval")
    row = {"image": "i.jpg", "case_id": "c", "caption": "A mass.", "split": "val", "location_category": "Head"}
    (tmp_path / "medpix").mkdir()
    (tmp_path / "medpix/captions.jsonl").write_text(json.dumps({**row, "modality_type": "CT"}) + "\n")
    (found,) = real.medpix(tmp_path)
    assert (found["image"], found["split"], found["Head"], found["MR"]) == ("medpix/i.jpg", "validate", 1, 0)


def test_all_tables_have_their_place_in_the_document() -> None:
    text = (SCRIPTS.parent / "RESULTS.md").read_text(encoding="utf-8")
    for name in ("dual-encoders", "dual-encoder-options", "fusion-encoders"):
        assert f"<!-- table {name} -->" in text
