"""The notebooks of the documentation run from top to bottom in an empty folder."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import forked

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SMALLER = {
    "zero_shot": {
        "--patients 90 --size 128": "--patients 24 --size 96 --workers 1",
        "--short-side 96": "--short-side 96 --workers 1",
        "steps=40": "steps=6",
        "resamples=200": "resamples=20",
    },
    "vqa": {
        "--patients 40 --size 96": "--patients 24 --size 96 --workers 1",
        "--short-side 96": "--short-side 96 --workers 1",
        "--resamples 200": "--resamples 20",
        "steps=12": "steps=4",
    },
    "own_data": {
        "--short-side 96": "--short-side 96 --workers 1",
        "range(60)": "range(40)",
        "steps=20, validate_every=10": "steps=6, validate_every=3",
    },
    "encoders": {"range(80)": "range(16)", "range(50)": "range(5)"},
}
"""Notebook -> what a reader sees results with, and sizes with which the same code runs in seconds.
A process for each core takes longer to start than one takes for these sizes.
"""


# Each trains and evaluates; a process has the libraries already.
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    program = "\n\n".join(code)
    for shown, smaller in SMALLER.get(path.stem, {}).items():
        assert shown in program, shown
        program = program.replace(shown, smaller)
    (tmp_path / "notebook.py").write_text(program, encoding="utf-8")
    (tmp_path / "salt").write_text("5a" * 32 + "\n", encoding="ascii")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "MPLBACKEND": "Agg",
        "MEDVL_SALT_FILE": str(tmp_path / "salt"),
    }
    run = forked.run([sys.executable, "notebook.py"], cwd=tmp_path, env=environment, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


def test_four_notebooks_are_on_the_site() -> None:
    navigation = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    assert [path.stem for path in NOTEBOOKS] == ["encoders", "own_data", "vqa", "zero_shot"]
    assert all(f"notebooks/{path.name}" in navigation for path in NOTEBOOKS)
