"""Published numbers: every recipe has some or a reason, their commands give them, and the page
is that of the file.
"""

import contextlib
import csv
import functools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from helpers.errors import raises
from helpers.script_modules import load_script

from medvl.cli import main as cli
from medvl.cli.shards import corpora as conversion
from medvl.data import Corpus, Manifest
from medvl.data.corpora.boxes_and_masks import lvit_layout, rsna
from medvl.data.corpora.figures import roco
from medvl.data.corpora.labels import chexpert, nih_cxr14
from medvl.data.corpora.reports import mimic_cxr, openi
from medvl.data.splits import DEFAULT_FRACTIONS
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import Evaluation, load_prompts, published_numbers
from medvl.eval.published.numbers import published_markdown, without_numbers
from medvl.eval.zero_shot_classification.prompts import COMPETING
from medvl.eval.zero_shot_classification.protocol import _text_functions
from medvl.models.registry import system as system_of
from medvl.phantom import write_chexpert
from medvl.schema import COMPETITION_FINDINGS, FINDINGS
from medvl.train.recipe_files import choose, find_recipe

ROOT = Path(__file__).parents[3]
RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.py")}
THREE = tuple(DEFAULT_FRACTIONS)
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("nih-cxr14", "covidx", "rsna", "siim", "object-cxr", "chestxdet10", "padchest", "openi"),
        THREE,
    ),
    **dict.fromkeys(("slake", "vqa-med", "path-vqa", "iu-xray", "r2gen-mimic"), THREE),
    **dict.fromkeys(("chexpert-5x200", "mimic-5x200"), THREE),
    **dict.fromkeys(("mimic-cxr", "mimic-cxr-ap"), mimic_cxr.SPLITS),
    "chexpert": chexpert.SPLITS,
    "chexpert-split": ("train", "validate"),
    "qata": lvit_layout.SPLITS,
    "roco": roco.SPLITS,
    "ms-cxr": ("test",),
    "vqa-rad": ("mixed",),
}
"""Folder of shards -> the splits that its converter writes."""
LABELS: Mapping[str, tuple[str, ...]] = {
    "chexpert": FINDINGS,
    "nih-cxr14": nih_cxr14.LABELS,
    "openi": openi.LABELS,
    "rsna": rsna.LABELS,
}
"""Shards with a label No Finding -> all their labels; those of PadChest, which are hundreds, are
left to a note.
"""
METRICS = {
    "zero-shot": r"AUROC|F1|accuracy",
    "zero-shot-masks": "Dice",
    "probe": "AUROC",
    "classify": "AUROC",
    "detection": "mAP",
    "segmentation": "Dice|IoU",
    "grounding": "contrast-to-noise ratio|mIoU|pointing game",
    "retrieval": "recall@1",
    "vqa": "accuracy",
    "report-generation": "BLEU-4|METEOR|ROUGE-L",
    "text": r"(entity|macro word|micro) F1|Pearson correlation|accuracy|BLURB score",
}
"""Evaluator -> beginning of the metrics that it gives."""


def test_every_recipe_has_numbers_or_a_reason() -> None:
    with_numbers, without = (
        {number.recipe for number in published_numbers()},
        set(without_numbers()),
    )
    assert with_numbers | without == RECIPES, (
        "add rows, or a reason, to medvl/eval/published/published_numbers.json"
    )
    assert not with_numbers & without
    assert all(without_numbers().values())


def test_numbers_are_complete_and_named_once() -> None:
    numbers = published_numbers()
    names = [(one.recipe, one.source, one.dataset, one.split, one.metric) for one in numbers]
    assert len(set(names)) == len(names)
    for one in numbers:
        assert all(
            isinstance(text, str) and text
            for text in (one.source, one.dataset, one.split, one.metric)
        ), one
        assert isinstance(one.checked, bool)
        assert math.isfinite(one.value)
        assert one.value > 0
        assert one.command.startswith("medvl ")
        assert "medvl eval " in one.command, one
    texts = "".join((ROOT / f"recipes/{name}.py").read_text(encoding="utf-8") for name in RECIPES)
    commands = [one.command for one in numbers]
    own = {run for command in commands for run in re.findall(r"--train.run-dir (\S+)", command)}
    runs = {run for command in commands for run in re.findall(r"runs/[\w-]+", command)} - own
    assert {run for run in runs if f'"{run}"' not in texts} == set(), "no recipe writes these runs"


def steps() -> list[tuple[str, list[str]]]:
    """Return every distinct command of the numbers, split into arguments, with its recipe."""
    commands = dict.fromkeys(
        (one.recipe, command)
        for one in published_numbers()
        for command in one.command.split(" && ")
    )
    return [(recipe, shlex.split(command)) for recipe, command in commands]


@functools.cache
def presets(recipe: str) -> Mapping[str, Any]:
    path = find_recipe(recipe)
    return cast("Mapping[str, Any]", load_script(path.stem, path.parent).PRESETS)


@functools.cache
def settings_of(recipe: str, *arguments: str) -> Any:
    """Return what `medvl train RECIPE arguments` trains with."""
    return choose(presets(recipe), arguments)


def test_every_command_is_one_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def evaluate(evaluation: Evaluation, options: Any) -> NoReturn:
        parsed.append(evaluation.name)
        raise ConfigError("parsed", "unsupported")

    monkeypatch.setattr("medvl.eval.evaluation.run_evaluation", evaluate)

    def convert(corpus: Corpus, shared: Any) -> None:
        parsed.append(corpus.corpus)

    monkeypatch.setattr(conversion, "convert_corpus", convert)
    for _, (program, command, name, *arguments) in steps():
        assert program == "medvl"
        if command == "train":
            assert settings_of(name, *arguments) is not None
        else:
            with contextlib.suppress(SystemExit):
                cli.main([command, name, *arguments])
            assert parsed.pop() == name


def test_systems_have_the_similarity_that_their_prompts_need() -> None:
    for recipe, arguments in steps():
        if arguments[1:3] != ["eval", "zero-shot"]:
            continue
        prompts = load_prompts(arguments[arguments.index("--prompts") + 1])
        model: Any = system_of(presets(recipe)["paper"].model.system)
        _text_functions(model, prompts)
        assert prompts.ensemble != "embedding_mean_raw" or hasattr(model, "unnormalized_text"), (
            recipe
        )


def test_commands_give_the_metric_of_their_row() -> None:
    """Decisions need validation images or competing classes, shares of the labels a run of their
    own.
    """
    for one in published_numbers():
        arguments = shlex.split(one.command)
        if "zero-shot" in arguments:
            prompts = load_prompts(arguments[arguments.index("--prompts") + 1])
            top_1 = prompts.scoring in COMPETING and "5x200" in one.dataset
            if one.metric.startswith(("F1", "accuracy")):
                assert top_1 or "--valid" in arguments, one
            if "5x200" in one.dataset:
                assert sorted(prompts.classes) == sorted(COMPETITION_FINDINGS), one
            if "NIH" in one.dataset and prompts.other_classes is not None:
                chosen = arguments[arguments.index("--labels") + 1 :]
                assert sorted([*chosen, "No Finding"]) == sorted(nih_cxr14.LABELS)
        if "vqa" in arguments:
            (data,) = {path.split("/")[1] for path in arguments if path.startswith("shards/")}
            checkpoint = arguments[len(arguments) - arguments[::-1].index("--checkpoint")]
            assert checkpoint.endswith(f"-{data}/best"), (
                "questions are answered by a model fine-tuned on them"
            )
        share = re.search(r", (1|10) %", one.metric)
        if share is not None and "train" in arguments:
            assert (
                arguments[arguments.index("--data.fraction") + 1] == f"{int(share[1]) / 100:g}"
            ), one
    stale = [
        one
        for one in published_numbers()
        if "--prompts statements" in one.command and "prompt file" in one.note
    ]
    assert not stale, "statements has a sentence of every label"


def values_of(option: str, arguments: list[str]) -> tuple[str, ...]:
    """Return the values after an option, up to the next one; none where the option is not given."""
    if option not in arguments:
        return ()
    values = arguments[arguments.index(option) + 1 :]
    return tuple(
        values[
            : next(
                (place for place, text in enumerate(values) if text.startswith("--")), len(values)
            )
        ]
    )


def test_commands_read_splits_that_converters_write() -> None:
    for recipe, arguments in steps():
        for path in arguments:
            if path.startswith("shards/") and arguments[1] != "shards":
                _, name, split = path.split("/")
                assert split in SPLITS[name], f"{recipe}: no converter writes {path}"
    for one in published_numbers():
        if "200 validation patients" in one.split:
            assert "shards/chexpert/valid" in one.command.split(" && ")[-1], one
            assert "--out shards/chexpert-split" in one.command, (
                "validation patients are split off the training table"
            )


def test_trainings_of_other_settings_have_other_run_folders() -> None:
    """The evaluation of a row reads the folder of its own training."""
    trained: dict[Path, str] = {}
    for one in published_numbers():
        *_, evaluated = commands = one.command.split(" && ")
        for command in commands:
            _, kind, recipe, *arguments = shlex.split(command)
            if kind == "train":
                folder = settings_of(recipe, *arguments).train.run_dir
                assert trained.setdefault(folder, command) == command, folder
                assert values_of("--checkpoint", shlex.split(evaluated)) == (f"{folder}/best",), one


def test_classifiers_learn_the_labels_of_their_data_at_the_size_of_the_encoder() -> None:
    nih = tuple(name for name in nih_cxr14.LABELS if name != "No Finding")
    labels = {"chexpert-split": COMPETITION_FINDINGS, "nih-cxr14": nih, "rsna": ("Pneumonia",)}
    for _, arguments in steps():
        if arguments[1:3] == ["train", "linear_probe"]:
            settings = settings_of("linear_probe", *arguments[3:])
            assert sorted(settings.data.labels) == sorted(labels[settings.data.train.parts[1]]), (
                arguments
            )
            assert settings.data.image is None, (
                "images have the size and the fit of the encoder's pretraining"
            )


def test_evaluators_give_the_metrics_or_the_note_says_which() -> None:
    for one in published_numbers():
        evaluator = shlex.split(one.command.split(" && ")[-1])[2]
        given = re.match(METRICS[evaluator], one.metric) is not None
        assert given != one.note.startswith("the command gives "), one


def test_means_leave_no_finding_out() -> None:
    for one in published_numbers():
        arguments = shlex.split(one.command.split(" && ")[-1])
        data = next((path.split("/")[1] for path in arguments if path.startswith("shards/")), "")
        if arguments[2] == "zero-shot" and data in LABELS:
            chosen = values_of("--labels", arguments)
            assert chosen, one
            assert "No Finding" not in chosen, one
            load_prompts(values_of("--prompts", arguments)[0]).for_labels(LABELS[data], chosen)
        elif arguments[2] == "zero-shot" and data == "padchest":
            assert "leave No Finding" in one.note, one
        elif arguments[2] == "probe" and data == "rsna":
            assert "row Pneumonia" in one.note, one
        elif arguments[2] == "classify" and data == "openi":
            assert "row macro counts No Finding" in one.note, one


def test_options_that_the_data_need() -> None:
    for recipe, arguments in steps():
        if "shards/openi/test" in arguments and arguments[2] in ("zero-shot", "classify"):
            assert values_of("--missing", arguments) == ("ignore",), (
                "reports without MeSH terms have no labels"
            )
        if recipe == "r2gen_iu":
            assert values_of("--sections", arguments) == ("findings",), "R2Gen writes findings"


def test_records_of_mrm_are_fine_tuned() -> None:
    numbers = published_numbers("mrm_mimic")
    assert all("fine-tuned" in one.metric for one in numbers)
    of_table = [one for one in numbers if one.source.startswith("G2D")]
    assert {one.value for one in of_table} == {88.5, 88.7, 91.3, 92.7, 93.3}
    assert all("linear classification" in one.note for one in of_table)


def test_validation_patients_are_split_off_the_training_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the commands is that of the data card; here on the phantom, with a larger
    share of fewer patients.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEDVL_SALT_FILE", str(tmp_path / "salt"))
    release = write_chexpert(tmp_path, patients=60, size=32, workers=1)
    with (release / "train.csv").open(encoding="utf-8") as file:
        rows = [{**row, "Patient": row["Path"].split("/")[2]} for row in csv.DictReader(file)]
    with Path("chexpert_train.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    (step,) = {tuple(words) for _, words in steps() if words[1] == "shards"}
    card = (ROOT / "data_cards/chexpert.md").read_text(encoding="utf-8").replace("\\\n", " ")
    assert list(step) in [
        shlex.split(line) for line in re.findall(r"^    (medvl .*)", card, re.MULTILINE)
    ]
    shares = {"train=0.9775": "train=0.7", "validate=0.0225": "validate=0.3"}
    cli.main([*(shares.get(word, word) for word in step[1:]), "--workers", "1", "--new-salt"])
    cli.main(
        [
            "shards",
            "chexpert",
            "--root",
            str(release),
            "--frontal-only",
            "--out",
            "shards/chexpert",
            "--workers",
            "1",
        ]
    )
    train, validate = (
        Manifest.read(Path("shards/chexpert-split") / split) for split in SPLITS["chexpert-split"]
    )
    official = Manifest.read(Path("shards/chexpert/train"))
    assert train.label_names == COMPETITION_FINDINGS
    assert train.samples + validate.samples == official.samples
    assert set(train.patients) | set(validate.patients) == set(official.patients)
    assert not set(train.patients) & set(validate.patients)


def test_the_page_has_the_numbers_of_the_file() -> None:
    page = load_script("build_docs").published_page()
    assert page.endswith("\n\n" + published_markdown(published_numbers(), without_numbers()))
    assert "\n## convirt_mimic\n" in page


def test_recipes_show_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes", "numbers", "carzero"])
    printed = capsys.readouterr().out
    assert "0.923    CheXpert, test, 500 patients, five findings: AUROC, zero-shot" in printed
    assert (
        "medvl eval zero-shot --checkpoint runs/carzero-mimic/best --data shards/chexpert/test"
        in printed
    )
    cli.main(["recipes", "numbers", "umrl"])
    assert "umrl_mimic: no numbers; results are plots" in capsys.readouterr().out
    cli.main(["list", "recipes", "--match", "*mimic"])
    printed = capsys.readouterr().out
    assert "carzero_mimic: CARZero" in printed
    assert "0.923    CheXpert, test, 500 patients, five findings: AUROC, zero-shot" in printed
    assert "umrl_mimic: no numbers; results are plots" in printed
    assert "r2gen_iu" not in printed
    cli.main(["recipes", "list", "--match", "carzero"])
    assert "published numbers: 9" in capsys.readouterr().out
    with raises(EvaluationError, "unknown_name", "recipe"):
        published_numbers("carzer")
