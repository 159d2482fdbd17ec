"""The wheel alone: built, installed without the checkout, and used from synthetic data to an
evaluation.
"""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# Building and installing the wheel, and two new processes that import torch from the start.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROGRAM = """
from medvl.cli.main import main
from medvl.cli.recipes import find_recipe
import medvl

print(medvl.__file__, find_recipe("convirt"))
main("phantom quickstart --patients 22 --size 48 --seed 10 --workers 1".split())
main(["train", "convirt", "tiny", *"--train.epochs 1 --train.global-batch 16 --train.best-metric loss "
      "--train.best-mode min --data.workers 0".split()])
main("eval zero-shot --checkpoint quickstart/convirt/best --data quickstart/shards/test "
     "--resamples 20 --workers 0".split())
"""
"""Commands in one process, whose imports take longer than they do."""
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    here = importlib.util.find_spec("hatchling") is not None
    command = [
        *PIP,
        "wheel",
        "--no-deps",
        *(["--no-build-isolation"] if here else []),
        "--wheel-dir",
        folder,
        ROOT,
    ]
    built = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    if built.returncode and not here and "hatchling" in built.stderr:
        pytest.skip("hatchling is not installed, and no index has it")
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("medvl-*.whl")
    return path


def test_wheel_holds_recipes_and_data_cards(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, kind in (("recipes", "py"), ("data_cards", "md")):
        stored = {f"medvl/{folder}/{path.name}" for path in (ROOT / folder).glob(f"*.{kind}")}
        assert stored
        assert stored <= names
    assert not [name for name in names if name.startswith(("recipes/", "tests/", "scripts/"))]


def test_installed_wheel_trains_and_evaluates_outside_of_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    """The dependencies are those of this environment; medvl is the wheel's."""
    installed, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    command = [*PIP, "install", "--no-deps", "--no-compile", "--target", str(installed), str(wheel)]
    subprocess.run(command, check=True, cwd=home, timeout=300)
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [*words], cwd=home, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = run(sys.executable, str(installed / "bin" / "medvl"), "recipes", "list")
    assert "convirt" in listed
    paths = run(sys.executable, "-c", PROGRAM).splitlines()[0].split()
    assert all(path.startswith(str(installed)) for path in paths)
    (results,) = home.glob("quickstart/convirt/eval/step-*/zero_shot")
    assert json.loads((results / "results.json").read_text())["metrics"]
    assert (results / "index.html").is_file()
