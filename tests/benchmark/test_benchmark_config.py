"""Files of benchmarks: values, errors with the nearest name, the systems and runs that they
plan.
"""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import tyro
from helpers.errors import raises

from medvl.benchmark import (
    BenchmarkConfig,
    CorpusConfig,
    Plan,
    list_benchmarks,
    plan,
    plan_runs,
    read_benchmark,
)
from medvl.benchmark.config import MakeStep
from medvl.benchmark.plan import missing_steps
from medvl.benchmark.settings import with_settings
from medvl.benchmark.tasks import command_arguments, question_size
from medvl.cli import main as cli
from medvl.cli.benchmark import ChangeOptions
from medvl.errors import ConfigError, CorpusError
from medvl.models import MRM, DualEncoder, FusionModel, list_models, system
from medvl.train import quickstart

FILE = """
name = "mine"
systems = ["convirt", "clip"]
tasks = ["zero-shot"]
[budget]
steps = 3
batch = 8
[[corpora]]
name = "own"
root = "$OWN_DATA"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def planned(config: BenchmarkConfig, out: Path) -> Plan:
    """Return the plan with a corpus that needs no environment."""
    corpora = tuple(dataclasses.replace(corpus, root=None) for corpus in config.corpora)
    return plan_runs(dataclasses.replace(config, corpora=corpora), out)


def test_a_file_is_read_and_its_values_can_be_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    config = read_benchmark(path, {"budget.steps": 7, "corpora.0.root": "elsewhere"})
    assert (config.budget.steps, config.budget.batch) == (7, 8)
    assert config.corpora == (CorpusConfig(name="own", root="elsewhere"),)


@pytest.mark.parametrize(
    ("old", "new", "code", "field"),
    [
        ("steps = 3", "stepps = 3", "unknown_name", "budget.stepps"),
        ("steps = 3", "steps = 0", "out_of_range", "budget.steps"),
        ("steps = 3", 'steps = "3"', "wrong_type", "budget.steps"),
        ('name = "mine"', "", "missing", "name"),
        ('"clip"]', '"convirt"]', "conflict", "systems"),
        ("[budget]", "seeds = []\n[budget]", "empty", "seeds"),
        ("[budget]", "shares = [1.5]\n[budget]", "out_of_range", "shares"),
        ("steps = 3", "workers = -1", "out_of_range", "budget.workers"),
        ("[budget]", "evaluation.batch = 0\n[budget]", "out_of_range", "evaluation.batch"),
        (
            "[budget]",
            "evaluation.label_shares = [0.0]\n[budget]",
            "out_of_range",
            "evaluation.label_shares",
        ),
        ('name = "own"', 'name = "../own"', "malformed", "corpora.0.name"),
        ("[budget]", "[budget", "malformed", "benchmark"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, code: str, field: str) -> None:
    with raises(ConfigError, code, field):
        read_benchmark(write(tmp_path, FILE.replace(old, new)))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("eval probe --out {out", "malformed"),
        ("eval probe --out '{out}", "malformed"),
        ("eval probe --test {pair}/test", "unknown_name"),
        ("eval probe --test {masks}/test --out {out}", None),
    ],
)
def test_commands_have_known_placeholders(tmp_path: Path, command: str, code: str | None) -> None:
    column = {"title": "t", "metric": "m", "targets": ["all"]}
    changes = {"commands": [{"name": "mine", "command": command, "columns": [column]}]}
    if code is None:
        assert read_benchmark(write(tmp_path, FILE), changes).commands[0].command == command
    else:
        with raises(ConfigError, code, "commands.0.command"):
            read_benchmark(write(tmp_path, FILE), changes)


def test_errors_name_the_file(tmp_path: Path) -> None:
    with raises(ConfigError, "missing", "name", names="mine.toml"):
        read_benchmark(write(tmp_path, ""))


def test_missing_files_presets_and_places_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "not_found", "benchmark"):
        read_benchmark(tmp_path / "none.toml")
    with raises(ConfigError, "unknown_name", "benchmark", names="phantom-quick"):
        read_benchmark("phantom-quik")
    with raises(ConfigError, "out_of_range", "corpora.3.root"):
        read_benchmark("phantom-quick", {"corpora.3.root": "x"})
    with raises(ConfigError, "wrong_type", "name.x.y"):
        read_benchmark("phantom-quick", {"name.x.y": "x"})


def test_a_corpus_names_steps_that_benchmarks_share(tmp_path: Path) -> None:
    own = MakeStep(creates="own", run=("vocab --data {root}/a --out {root}/b",))
    make = (
        'make = ["phantom-pairs", { creates = "own", run = ["vocab --data {root}/a --out {root}/b"] }, '
        '"vocabulary"]'
    )
    [corpus] = read_benchmark(
        write(tmp_path, f"{FILE}{make}\n"), {"corpora.0.make.2.creates": "mine"}
    ).corpora
    pairs, second, vocabulary = corpus.make
    assert (pairs.creates, second, vocabulary.creates) == ("shards/test/manifest.json", own, "mine")
    with raises(ConfigError, "unknown_name", "corpora.0.make.1", names="phantom-pairs"):
        read_benchmark(write(tmp_path, f'{FILE}make = ["vocabulary", "phantom-pair"]\n'))
    for wrong in (
        "corpora = 3",
        "corpora = [3]",
        'corpora = [{ name = "x", make = "vocabulary" }]',
    ):
        with raises(ConfigError, "wrong_type"):
            read_benchmark(write(tmp_path, f'name = "mine"\n{wrong}\n'))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"systems": ["convert"]}, "systems"),
        ({"tasks": ["zeroshot"]}, "tasks"),
        ({"settings": {"dual": {"model": {"image_sise": 64}}}}, "settings.dual.model.image_sise"),
        ({"settings": {"duel": {}}}, "settings.duel"),
        ({"preset": "tine"}, "preset"),
        ({"columns": {"prob": []}}, "columns"),
        ({"corpora.0.prompts": "chexpert_ensembl"}, "corpora.0.prompts"),
        ({"commands": [{"name": "c", "command": "eval", "columns": [], "corpora": ["our"]}]}, "commands.0.corpora"),
        ({"settings": {"clip": {"init_from": "run:convrt"}}}, "settings.clip.init_from"),
        ({"settings": {"dual": {"model": {"image_weights": "run:convrt"}}}}, "settings.dual.model.image_weights"),
        ({"starts": [{"name": "s", "settings": {"init_from": "run:convrt"}}]}, "starts.s.init_from"),
        ({"systems": ["m3ae"], "tasks": ["reranking"], "evaluation.shortlist_system": "convrt"},
         "evaluation.shortlist_system"),
    ],
)  # fmt: skip
def test_unknown_names_of_a_plan_are_refused(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    config = read_benchmark(write(tmp_path, FILE), {"corpora.0.root": "x", **changes})
    with raises(ConfigError, "unknown_name", field):
        plan_runs(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"systems": ["-convirt"]}, "empty", "systems"),
        ({"tasks": ["questions"]}, "empty", "tasks"),
        ({"systems": ["report"], "tasks": ["all"]}, "empty", "tasks"),
        ({"variants": [{"name": "clip", "system": "convirt"}]}, "conflict", "variants.0.name"),
        ({"variants": [{"name": "same", "system": "clip"}], "systems": ["clip", "same"]}, "conflict", "systems"),
        ({"starts": [{"name": "one"}, {"name": "other"}]}, "conflict", "systems"),
        ({"settings": {"clip": {"init_from": "run:convirt"}, "convirt": {"init_from": "run:clip"}}}, "conflict",
         "settings"),
        ({"settings": {"clip": {"init_from": "run:clip"}}}, "conflict", "settings"),
        ({"settings": {"clip": {"init_from": "run:dual"}}}, "unsupported", "settings.clip.init_from"),
        ({"commands": [{"name": "probe", "command": "eval", "columns": []}]}, "conflict", "commands.0.name"),
        ({"columns": {"zero-shot": [{"title": "zero-shot "
                                              "AUROC", "metric": "auroc", "targets": ["CT"]}]}}, "conflict",
         "columns"),
    ],
)  # fmt: skip
def test_plans_without_runs_or_with_equal_names_are_refused(
    tmp_path: Path, changes: dict[str, object], code: str, field: str
) -> None:
    config = read_benchmark(write(tmp_path, FILE), {"corpora.0.root": "x", **changes})
    with raises(ConfigError, code, field):
        plan_runs(config, tmp_path)


def test_systems_are_left_out_wherever_they_are_named(tmp_path: Path) -> None:
    for systems in (["dual", "-convirt"], ["-convirt", "dual"], ["convirt", "-convirt", "clip"]):
        names = {
            run.name
            for run in planned(
                read_benchmark(write(tmp_path, FILE), {"systems": systems}), tmp_path
            ).runs
        }
        assert "clip" in names
        assert "convirt" not in names


def test_settings_of_a_variant_replace_the_budget(tmp_path: Path) -> None:
    """The guide's example: a larger batch than that of the benchmark."""
    variant = {"name": "large", "system": "convirt", "settings": {"train": {"global_batch": 256}}}
    changes = {"variants": [variant], "systems": ["convirt", "large"]}
    runs = planned(read_benchmark(write(tmp_path, FILE), changes), tmp_path).runs
    assert {run.name: run.settings["train"]["global_batch"] for run in runs} == {
        "convirt": 8,
        "large": 256,
    }


def test_a_variable_that_is_not_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OWN_DATA", raising=False)
    with raises(ConfigError, "missing", "corpora.own.root", names="$OWN_DATA"):
        plan_runs(read_benchmark(write(tmp_path, FILE)), tmp_path)


def test_values_of_variables_stay_one_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with spaces; a variable that is not set is named without the rest of the command."""
    monkeypatch.setenv("OWN_DATA", str(tmp_path / "my images"))
    make = (
        'make = [{ creates = "a", run = ["shards table --root ${OWN_DATA}/x --out {root} '
        "--name 'a b'\"] }]\n"
    )
    path = write(tmp_path, f"{FILE}{make}")
    corpus = plan_runs(read_benchmark(path), tmp_path).runs[0].corpus
    expected = [
        "shards",
        "table",
        "--root",
        f"{tmp_path}/my images/x",
        "--out",
        f"{tmp_path}/my images",
        "--name",
        "a b",
    ]
    assert missing_steps(corpus) == [expected]
    cli.main(
        ["benchmark", str(path), "--dry-run", "--seconds", "0", "--out", str(tmp_path / "out")]
    )
    assert f"medvl {shlex.join(expected)}\n" in capsys.readouterr().out
    text = path.read_text().replace("${OWN_DATA}/x", "$NOWHERE")
    with raises(ConfigError, "missing", "corpora.own.make", names="has no $NOWHERE;"):
        missing_steps(plan_runs(read_benchmark(write(tmp_path, text)), tmp_path).runs[0].corpus)


@pytest.mark.parametrize(
    ("preset", "systems", "tasks", "made"),
    [
        ("phantom-full", ["convirt", "gloria"], ["zero-shot"], "shards vocab"),
        ("phantom-full", ["convirt"], ["zero-shot", "grounding"], "shards vocab ms-cxr-shards"),
        ("phantom-full", ["convirt"], ["change"], "shards vocab ms-cxr-t-shards"),
        ("phantom-full", ["convirt"], ["robustness"], "shards vocab site-1-shards"),
        ("phantom-full", ["r2gen"], ["reports"], "openi-words"),
        ("phantom-full", ["convirt"], ["multiple-choice"], "shards vocab choices"),
        ("phantom-quick", ["arl"], ["matching"], "shards vocab knowledge"),
        ("phantom-quick", ["vilt"], ["questions"], "shards vocab vqa vqa-valid"),
    ],
)
def test_only_data_that_the_runs_read_are_made(
    preset: str, systems: list[str], tasks: list[str], made: str, tmp_path: Path
) -> None:
    plan = planned(
        read_benchmark(preset, {"systems": systems, "tasks": tasks, "seeds": [0]}), tmp_path
    )
    corpus = plan.runs[0].corpus
    steps = missing_steps(corpus, plan.runs)
    wanted = [step for step in corpus.make if step.creates.split("/")[0] in made.split()]
    assert steps == [
        shlex.split(line.replace("{root}", str(corpus.root)))
        for step in wanted
        for line in step.run
    ]
    assert len(missing_steps(corpus)) > len(steps)


def test_every_system_is_in_the_phantom_or_has_a_reason(tmp_path: Path) -> None:
    plan = planned(read_benchmark("phantom-quick"), tmp_path)
    kinds = (DualEncoder, FusionModel, MRM)
    registered = {
        name
        for name in list_models()
        if issubclass(system(name), kinds) and name != "local_analysis"
    }
    runs = {run.system for run in plan.runs}
    assert registered <= runs | plan.left_out.keys()
    assert {"convirt", "clip", "umrl", "albef", "vilt", "r2gen"} <= runs
    assert len({run.key for run in plan.runs}) == len(plan.runs)
    for run in plan.runs:
        assert run.settings["train"]["steps"] == (700 if run.name == "convirt-long" else 250)
        is_joined = run.family == "fusion" and run.name != "vilt"
        assert run.settings["init_from"] == ("run:convirt-long" if is_joined else None)
        if run.family == "dual":
            assert (
                run.settings["model"]["image_encoder"],
                run.settings["model"]["image_size"],
            ) == ("resnet_tiny", 96)
    [mrm] = [run for run in plan.runs if run.name == "mrm"]
    tasks = ("probe", "neighbours", "probe robustness")
    assert (mrm.family, mrm.tasks) == ("records", tasks)
    [umrl] = [run for run in plan.runs if run.name == "umrl"]
    names = [run.name for run in plan.runs]
    assert umrl.needs == {"convirt": plan.runs[names.index("convirt")].key}
    assert names.index("convirt") < names.index("umrl")


def test_images_of_masked_records_are_as_large_as_their_pixels(tmp_path: Path) -> None:
    changes = {"systems": ["mrm"], "tasks": ["probe"], "preset": "paper"}
    config = read_benchmark(write(tmp_path, FILE), changes)
    assert config.budget.augmentation == "weak"
    [run] = planned(config, tmp_path).runs
    assert (run.settings["model"]["image_size"], run.settings["data"]["image"]["size"]) == (
        224,
        448,
    )


def test_a_start_replaces_the_settings_of_a_system(tmp_path: Path) -> None:
    settings = {"gloria": {"init_from": "run:convirt"}}
    starts = [{"name": "of the system"}, {"name": "others", "settings": {"init_from": "run:mgca"}}]
    config = read_benchmark(
        write(tmp_path, FILE), {"systems": ["gloria"], "settings": settings, "starts": starts}
    )
    found = {
        run.start: run.settings["init_from"]
        for run in planned(config, tmp_path).runs
        if run.name == "gloria"
    }
    assert found == {"of the system": "run:convirt", "others": "run:mgca"}


def test_a_system_with_other_encoders_than_its_start_is_refused(tmp_path: Path) -> None:
    settings = {"albef": {"init_from": "run:convirt", "model": {"image_encoder": "resnet50"}}}
    config = read_benchmark(write(tmp_path, FILE), {"systems": ["albef"], "settings": settings})
    with pytest.raises(
        ConfigError, match="convirt, whose image_encoder is 'resnet_tiny'"
    ) as caught:
        planned(config, tmp_path)
    assert caught.value.field == "settings.albef.model.image_encoder"


def test_fusion_encoders_of_real_images_have_the_encoders_of_their_start(tmp_path: Path) -> None:
    plan = planned(read_benchmark("real-small"), tmp_path)
    starts = {run.key: run for run in plan.runs}
    started = [run for run in plan.runs if run.settings["init_from"] == "run:convirt"]
    assert {run.name for run in started} == {"m3ae", "albef", "pixelbert"}
    for run in started:
        [start] = [starts[key].settings["model"] for key in run.needs.values()]
        for field in ("image_encoder", "text_encoder", "image_size"):
            assert run.settings["model"][field] == start[field]


def test_tables_of_all_evaluations_on_real_images_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[str] = []
    monkeypatch.setattr(plan, "write_table", lambda name, folder: tables.append(name))
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    runs = planned(read_benchmark("real-small", {"systems": ["convirt"]}), tmp_path).runs
    chest = [run for run in runs if run.corpus.name == "chest"]
    with raises(CorpusError, "not_found", "corpora.pairs"):  # as no command makes shards here
        plan.make_corpus(chest[0].corpus, lambda arguments: None, runs=chest)
    assert tables == ["chest", "nih", "paediatric", "boxes", "structures", "lungs", "openi"]


def test_weights_of_a_start_reach_a_system_through_the_run_that_it_starts_from(
    tmp_path: Path,
) -> None:
    weights = str(tmp_path / "weights.safetensors")
    starts = [{"name": "own", "pixel_mean": 0.5, "settings": {"model": {"image_weights": weights}}}]
    settings = {"gloria": {"init_from": "run:convirt"}}
    config = read_benchmark(
        write(tmp_path, FILE), {"systems": ["gloria"], "settings": settings, "starts": starts}
    )
    models = {run.name: run.settings["model"] for run in planned(config, tmp_path).runs}
    assert (models["convirt"]["image_weights"], models["gloria"]["image_weights"]) == (
        weights,
        None,
    )
    assert models["convirt"]["image_arguments"]["mean"] == models["gloria"]["pixel_mean"] == 0.5


@pytest.mark.parametrize("preset", list_benchmarks())
def test_every_preset_plans(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEDVL_REAL_DATA", "MIMIC_SHARDS"):
        monkeypatch.setenv(name, str(tmp_path))
    config = read_benchmark(preset, {"systems": ["convirt"], "seeds": [0]})
    assert plan_runs(config, tmp_path).runs


def test_the_preset_for_mimic_reads_every_corpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MIMIC_SHARDS", str(tmp_path))
    config = read_benchmark("mimic", {"systems": ["convirt", "m3ae"], "seeds": [0]})
    plan = plan_runs(config, tmp_path)
    [corpus] = config.corpora
    read = [
        corpus.pairs,
        corpus.phrases,
        corpus.questions,
        *(command.command for command in config.commands),
    ]
    names = (
        "mimic-cxr",
        "chexpert",
        "rsna",
        "siim",
        "nih-cxr14",
        "padchest",
        "vindr-cxr",
        "ms-cxr",
        "vqa-rad",
        "slake",
    )
    assert [
        name for name in (*names, "roco", "openi") if not any(name in str(text) for text in read)
    ] == []
    tasks = {task for run in plan.runs for task in run.tasks}
    assert tasks >= {"grounding", "questions", *(command.name for command in config.commands)}


def test_zero_shot_columns_of_the_preset_for_mimic_have_the_same_classes() -> None:
    """Without labels or prompts, systems that are trained on statements would have all labels of
    the corpus.
    """
    zero_shot = [
        one for one in read_benchmark("mimic").commands if one.command.startswith("eval zero-shot")
    ]
    assert [one.name for one in zero_shot] == ["CheXpert", "NIH", "PadChest", "VinDr"]
    for one in zero_shot:
        assert "--labels " in one.command or one.columns[0].targets[0] == "macro_competition"


def test_keys_depend_on_what_changes_the_weights_only(tmp_path: Path) -> None:
    config = planned(
        read_benchmark(write(tmp_path, FILE), {"systems": ["convirt"]}), tmp_path
    ).config

    def key(**changes: object) -> str:
        [run] = plan_runs(dataclasses.replace(config, **changes), tmp_path / "elsewhere").runs
        return run.key

    assert key() == key(name="other", tasks=("retrieval",))
    assert key() == key(evaluation=dataclasses.replace(config.evaluation, resamples=9))
    assert key() == key(budget=dataclasses.replace(config.budget, workers=3))
    different = [
        key(),
        key(seeds=(1,)),
        key(shares=(0.1,)),
        key(budget=dataclasses.replace(config.budget, steps=4)),
        key(settings={"convirt": {"optim": {"lr": 0.5}}}),
    ]
    assert len(set(different)) == len(different)


def test_settings_replace_fields_of_nested_configs() -> None:
    changed = with_settings(quickstart.TRAIN, {"epochs": 3, "run_dir": "elsewhere"}, "train")
    assert (changed.epochs, changed.run_dir) == (3, Path("elsewhere"))
    optim = with_settings(quickstart.OPTIM, {"schedule": {"warmup_steps": 7}}, "optim")
    assert optim.schedule == dataclasses.replace(quickstart.OPTIM.schedule, warmup_steps=7)
    linear = with_settings(
        quickstart.OPTIM, {"schedule": {"kind": "Linear", "warmup_steps": 7}}, "optim"
    )
    assert type(linear.schedule).__name__ == "Linear"
    with raises(ConfigError, "wrong_type", "optim.lr"):
        with_settings(quickstart.OPTIM, {"lr": "fast"}, "optim")


def test_values_can_be_replaced_by_several_options() -> None:
    options = tyro.cli(
        ChangeOptions, args=["--set", "budget.steps=7", "seeds=[1, 2]", "--set", "name=mine"]
    )
    assert options.changes() == {"budget.steps": 7, "seeds": [1, 2], "name": "mine"}


def test_the_dry_run_names_models_that_cannot_be_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without data, whose vocabularies (UMRL, R2Gen) are made later; runs of equal models are
    all named.
    """
    settings = {
        "clip.model.image_encoder": "resnet_tinny",
        "gloria.model.text_arguments": {"num_hidden_layer": 1},
    }
    text = FILE.replace('"clip"', '"clip", "gloria", "umrl"').replace(
        "$OWN_DATA", str(tmp_path / "data")
    )
    lines = [
        f"settings.{name} = {json.dumps(value).replace(':', ' =')}"
        for name, value in settings.items()
    ]
    path = write(
        tmp_path, text.replace("[budget]", "\n".join(["seeds = [0, 1]", *lines, "[budget]"]))
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main(
            ["benchmark", str(path), "--dry-run", "--seconds", "0", "--out", str(tmp_path / "out")]
        )
    assert stopped.value.code == 1
    printed = capsys.readouterr().out.splitlines()
    wrong = {line.split()[1]: line for line in printed if "wrong settings: " in line}
    assert set(wrong) == {"clip,", "gloria,"}
    assert "resnet_tiny" in wrong["clip,"]
    assert sum("wrong settings: " in line for line in printed) == 4
    assert "8 runs: 0 finished, 0 failed, 8 to do, 4 with wrong settings" in "\n".join(printed)


def test_questions_of_systems_that_number_cells_have_the_size_of_their_pretraining(
    tmp_path: Path,
) -> None:
    """VisualBERT does where its settings say so."""
    changes = {
        "systems": ["visualbert", "medvill", "m3ae"],
        "settings.fusion.model.image_size": 160,
    }
    plan = plan_runs(read_benchmark("phantom-quick", changes), tmp_path)
    sizes = {run.name: question_size(run) for run in plan.runs}
    assert (sizes["visualbert"], sizes["medvill"], sizes["m3ae"]) == (160, 160, 112)


@pytest.mark.parametrize(("name", "size"), [("medvill", 512), ("m3ae", 384)])
def test_questions_of_a_command_have_the_size_that_a_system_reads(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MedViLL numbers the cells of its grid, so that it is fine-tuned at the size of its
    pretraining.
    """
    monkeypatch.setenv("MIMIC_SHARDS", str(tmp_path))
    plan = plan_runs(read_benchmark("mimic", {"systems": [name], "seeds": [0]}), tmp_path)
    [run] = [run for run in plan.runs if run.name == name]
    arguments = command_arguments(run, "SLAKE")
    assert arguments[arguments.index("--data.image.size") + 1] == str(size)
