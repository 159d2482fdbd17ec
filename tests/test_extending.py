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


COMMANDS = """
import json
from pathlib import Path

from medvl.benchmark.config import BenchmarkConfig, CorpusConfig
from medvl.benchmark.tasks import columns_of, fitting_tasks
from medvl.cli.main import main

where = ["--data", "shards/test", "--workers", "0", "--resamples", "20", "--device", "cpu"]
main(["eval", "--help"])
for run in ("smooth", "validated"):
    main(["eval", "own-text", "--checkpoint", f"runs/{run}", *where, "--out", f"own/{run}"])
main(["compare", "own/smooth", "own/validated", "--out", "compared"])
(compared,) = json.loads(Path("compared/comparison.json").read_text())
(row,) = compared["rows"]
assert compared["protocol"] == {"name": "own_text", "version": 1}, compared["protocol"]
assert row["name"].startswith("own_text"), row
assert row["differences"][0]["low"] is not None, "the runs are paired"
corpus = CorpusConfig(name="captions", pairs="shards")
config = BenchmarkConfig(name="ours", corpora=(corpus,))
assert "own-text" in fitting_tasks(config, "smooth_convirt", "dual", corpus)
assert "own-text" not in fitting_tasks(config, "label_stream", "fusion", corpus)
assert [column.title for column in columns_of(config)["own-text"]] == ["own text"]
main(["eval", "own-text", "--help"])
"""


def test_every_part_of_the_outside_package_works(tmp_path: Path) -> None:
    install(tmp_path)
    salt = tmp_path / "salt"
    salt.write_text(f"{'ab' * 32}\n")  # one that puts patients into every split
    salt.chmod(0o600)
    (tmp_path / "steps.py").write_text("\n".join([*STEPS, COMMANDS]), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    run = forked.run(
        [sys.executable, "steps.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.returncode == 0, run.stderr
    assert "'train': " in run.stdout
    listed = "own-text Evaluate whether an image is nearer to its own text than to another one."
    assert listed in " ".join(run.stdout.split())
    assert "places between an image and the other text" in run.stdout
    assert list((tmp_path / "runs/smooth/eval").glob("step-*/own_text/results.json"))
    page = (tmp_path / "own/smooth/index.html").read_text(encoding="utf-8")
    assert "Own text: smooth_convirt" in page
    assert "own_text" in page


def test_the_page_imports_from_the_faces_only() -> None:
    for text in [*STEPS, *(text for title, text in FILES.items() if title.endswith(".py"))]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("medvl"):
                assert node.module in FACES, node.module


def test_each_extension_is_one_short_file() -> None:
    assert {
        len(text.splitlines()) < 70 for title, text in FILES.items() if title.endswith(".py")
    } == {True}
