"""The rules of CONTRIBUTING.md that a machine can check: who imports whom, what is never written, how long."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "medvl").rglob("*.py"))
SCRIPTS = sorted([*(ROOT / "recipes").glob("*.py"), *(ROOT / "scripts").glob("*.py")])

# room -> rooms it may import. schema, errors and the private helpers at the top are free to all.
MAY_IMPORT = {
    "losses": set(),
    "phantom": set(),
    "data": set(),
    "encoders": set(),
    "models": {"losses", "data", "encoders"},
    "train": {"losses", "data", "encoders", "models"},
    "eval": {"losses", "data", "encoders", "models"},
    "export": {"data", "encoders", "models"},
    "cli": {"losses", "data", "encoders", "models", "train", "eval", "export", "phantom"},
}
FREE = {"schema", "errors", "common"}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "medvl").parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("medvl.")}
    return rooms


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if room in FREE:
        assert imported_rooms(path) <= FREE
        return
    if room in ("__init__", "__main__"):
        return
    strangers = imported_rooms(path) - MAY_IMPORT[room] - FREE - {room, "__version__"}
    assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "yaml"}


@pytest.mark.fault("S8")
@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_dangerous_is_called(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {module.split(".")[0] for module in modules} & FORBIDDEN_MODULES
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        for risky in ("trust_remote_code", "shell"):
            value = keywords.get(risky)
            assert value is None or (isinstance(value, ast.Constant) and value.value is False), ast.unparse(node)
        if isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, ast.unparse(node)
        if ast.unparse(node.func) == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_fit_in_the_head(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= (150 if path.parent.name == "recipes" else 400)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_silenced(path: Path) -> None:
    for silencer in ("# noqa", "# type: ignore", "filterwarnings", "strict=False)"):
        lines = [line for line in path.read_text().splitlines() if silencer in line and "zip(" not in line]
        assert not lines, f"{silencer}: {lines}"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_medvl_is_nearly_free() -> None:
    heavy = run_python("import medvl, sys; print(sorted({'torch', 'numpy', 'cv2', 'tyro'} & set(sys.modules)))")
    assert heavy == "[]"


@pytest.mark.fault("P3")
def test_encoders_come_alone() -> None:
    code = (
        "import medvl.encoders, sys\n"
        "heavy = {'webdataset', 'pydicom', 'albumentations', 'transformers', 'timm', 'open_clip', 'torchvision',"
        " 'medvl.data', 'medvl.train', 'medvl.models'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_every_public_name_resolves() -> None:
    code = (
        "import importlib\n"
        "for name in ('medvl', 'medvl.data', 'medvl.encoders', 'medvl.losses', 'medvl.models', 'medvl.train',"
        " 'medvl.eval', 'medvl.export', 'medvl.phantom'):\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__all__, name\n"
        "    for public in module.__all__:\n"
        "        getattr(module, public)\n"
        "print('ok')"
    )
    assert run_python(code) == "ok"
