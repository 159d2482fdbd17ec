"""`docs/pages/extending.md` as a package of its own: its files are written, its entry points
installed, its code run.
"""

import ast
import os
import re
import sys
import tomllib
from pathlib import Path

from helpers import forked

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/pages/extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in BLOCK.finditer(PAGE)]
FILES = {title: text for _, title, text in BLOCKS if title}
STEPS = [text for language, title, text in BLOCKS if language == "python" and not title]
FACES = {
    *("medvl", "medvl.data", "medvl.encoders", "medvl.losses", "medvl.models"),
    *("medvl.train", "medvl.eval", "medvl.errors", "medvl.schema"),
}


def install(folder: Path) -> None:
    """Write the package and the metadata that an installation would write."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    metadata = folder / f"my_medvl-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("".join(lines))


def test_every_part_of_the_outside_package_works(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "steps.py").write_text("\n".join(STEPS), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    run = forked.run(
        [sys.executable, "steps.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.returncode == 0, run.stderr
    assert "'train': " in run.stdout
    assert "matching" in run.stdout
    assert list((tmp_path / "runs/smooth/eval").glob("step-*/matching/results.json"))


def test_the_page_imports_from_the_faces_only() -> None:
    for text in [*STEPS, *(text for title, text in FILES.items() if title.endswith(".py"))]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("medvl"):
                assert node.module in FACES, node.module


def test_each_extension_is_one_short_file() -> None:
    assert {
        len(text.splitlines()) < 70 for title, text in FILES.items() if title.endswith(".py")
    } == {True}
