"""Imports inside the phantom: a pipeline from population over language and rendering to layouts."""

import ast
from pathlib import Path

import medvl.phantom

ALLOWED = {
    "population": {"population"},
    "language": {"language", "population"},
    "rendering": {"rendering", "population"},
    "layouts": {"layouts", "language", "rendering", "population"},
}


def test_imports_go_one_way() -> None:
    root = Path(medvl.phantom.__file__).parent
    for package, allowed in ALLOWED.items():
        paths = [path for path in (root / package).glob("*.py") if path.name != "__init__.py"]
        assert paths, package
        for path in paths:
            modules = {
                node.module
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.ImportFrom) and node.module is not None
            }
            rooms = {name.split(".")[2] for name in modules if name.startswith("medvl.phantom.")}
            assert rooms <= allowed | {"geometry", "seeds"}, path
