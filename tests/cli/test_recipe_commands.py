"""`medvl train`, `medvl recipes` and `medvl cards`: names, copies, launching."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.cli.recipes import copy_recipe, find_recipe, show_card, train
from medvl.errors import ConfigError
from medvl.train import OptimConfig
from medvl.train.recipe_files import launch
from medvl.train.run import Run

ROOT = Path(__file__).parents[2]
RECIPE = '''"""A recipe of one's own."""
import sys
from medvl.train.recipe_files import choose
PRESETS = {"tiny": 1}
if __name__ == "__main__":
    print("trained", *sys.argv)
'''


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        *((path.stem, path.stem) for path in sorted((ROOT / "recipes").glob("m*.py"))),
        ("convirt", "convirt_mimic"),
        ("biovil", "biovil_mimic"),
        ("biovil-t", "biovil_t_mimic"),
        ("mutual-info", "mutual_info_mimic"),
        ("vqa", "vqa_finetune"),
        ("m3ae", "m3ae_roco_medicat"),
    ],
)
def test_a_recipe_is_found_by_its_system(name: str, stem: str) -> None:
    assert find_recipe(name) == ROOT / "recipes" / f"{stem}.py"


@pytest.mark.parametrize(
    ("name", "advice"), [("biovl", "biovil"), ("convirt_mimc", "convirt_mimic"), ("?", "list")]
)
def test_an_unknown_recipe_names_the_nearest(name: str, advice: str) -> None:
    with raises(ConfigError, "unknown_name", "recipe") as caught:
        find_recipe(name)
    assert advice in str(caught.value)
    with raises(ConfigError, "not_found", "recipe"):
        find_recipe("folder/none.py")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("clip", ("siglip_mimic", "chexzero_mimic", "cxrclip_mimic", "medclip_mimic")),
        ("CLIP", ("chexzero_mimic",)),
        ("segmenter", ("dense_transfer",)),
        ("masked_text", ("continue_bert", "pubmedbert")),
        ("bert", ("berthop_openi", ", ...")),
        ("r2", ("r2gen_iu",)),
    ],
)
def test_a_word_that_is_part_of_recipes_names_all_of_them(
    name: str, named: tuple[str, ...]
) -> None:
    with raises(ConfigError, "unknown_name", "recipe") as caught:
        find_recipe(name)
    assert "did you mean" not in str(caught.value)
    assert all(one in str(caught.value) for one in named)
    assert "medvl recipes list" in str(caught.value)


def test_recipes_are_listed_with_their_presets(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes", "list"])
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines[::2]}
    assert names == {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert all(line.strip().startswith("presets: paper") for line in lines[1::2])
    cli.main(["recipes", "list", "--match", "gloria"])
    assert capsys.readouterr().out.startswith("gloria_chexpert ")


@pytest.mark.parametrize(
    ("command", "preset"),
    [("train", []), ("train", ["tiny"]), ("doctor", ["tiny"]), ("doctor", [])],
)
def test_help_of_a_recipe_names_the_command(
    command: str,
    preset: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["medvl"])  # `train` replaces it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.suppress(SystemExit):
        cli.main([command, "convirt", *preset, "--help"])
    typed = " ".join(["medvl", command, "convirt", *preset])
    assert capsys.readouterr().out.split(" [")[0] == f"usage: {typed}"


def test_a_copy_of_a_recipe_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["recipes", "copy", "convirt", str(tmp_path / "new")])
    copied = tmp_path / "new" / "convirt_mimic.py"
    assert copied.read_bytes() == (ROOT / "recipes" / "convirt_mimic.py").read_bytes()
    assert f"medvl train {copied}" in capsys.readouterr().out
    with raises(ConfigError, "exists", "dest"):
        copy_recipe("convirt", tmp_path / "new")
    copy_recipe("convirt", tmp_path / "mine.py")
    assert (tmp_path / "mine.py").is_file()


def test_cards_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["cards", "list"])
    assert "mimic-cxr " in capsys.readouterr().out
    cli.main(["cards", "show", "rsna"])
    assert capsys.readouterr().out == (ROOT / "data_cards" / "rsna.md").read_text()
    with raises(ConfigError, "unknown_name", "card"):
        show_card("rsnaa")


def test_train_runs_the_recipe_as_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.py"
    path.write_text(RECIPE)
    monkeypatch.setattr(sys, "argv", ["medvl"])
    train([str(path), "tiny", "--train.seed", "3"])
    assert capsys.readouterr().out.split() == ["trained", str(path), "tiny", "--train.seed", "3"]


@pytest.mark.parametrize("order", [["--ranks", "2", "R", "tiny"], ["R", "tiny", "--ranks", "2"]])
def test_train_starts_ranks_with_torchrun(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.py"
    path.write_text(RECIPE)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, arguments, env: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["medvl"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RANK", raising=False)
    train([str(path) if word == "R" else word for word in order])
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    assert started == [[*launcher, str(path), "tiny"]]
    monkeypatch.setenv("RANK", "0")  # a rank of torchrun trains itself
    train([str(path), "--ranks", "2"])
    assert len(started) == 1


def test_ctrl_c_in_a_recipe_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(settings: object) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    with pytest.raises(SystemExit) as ended:
        launch(prepare, {"paper": OptimConfig()}, "A recipe.")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted; run the same command again to resume\n"
