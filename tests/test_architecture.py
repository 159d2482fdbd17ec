"""The rules of CONTRIBUTING.md that can be checked by reading the source: imports, forbidden
calls, sizes.
"""

import ast
import functools
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from helpers import forked

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "medvl").rglob("*.py"))
SCRIPTS = sorted(
    [
        *(ROOT / "recipes").glob("*.py"),
        *(ROOT / "scripts").rglob("*.py"),
        *(ROOT / "examples").glob("*.py"),
    ]
)
FACES = (
    *("medvl", "medvl.data", "medvl.encoders", "medvl.losses", "medvl.models"),
    *(
        "medvl.train",
        "medvl.eval",
        "medvl.inference",
        "medvl.export",
        "medvl.phantom",
        "medvl.serve",
        "medvl.benchmark",
    ),
)

FREE = {"schema", "errors", "common"}
"""What every package may import; they import nothing else of medvl."""
ROOMS: dict[str, set[str]] = {
    "losses": set(),
    "phantom": set(),
    "data": set(),
    "encoders": set(),
    "models": {"losses", "data", "encoders"},
    "train": {"losses", "data", "encoders", "models"},
    "eval": {"losses", "data", "encoders", "models", "phantom"},
    "inference": {"data", "encoders", "models", "eval"},
    "export": {"data", "encoders", "models"},
    "serve": {"losses", "data", "encoders", "models", "eval", "inference", "phantom"},
    "benchmark": {"data", "models", "train", "eval"},
    "cli": {
        *("losses", "data", "encoders", "models", "train"),
        *("eval", "inference", "export", "phantom", "serve", "benchmark"),
    },
}
"""Package -> packages that it may import."""
_DATA_READERS = {
    "annotations",
    "dicom",
    "images",
    "knowledge",
    "reports",
    "tokenizer",
    "transforms",
    "splits",
    "volumes",
}
SUBPACKAGES: dict[str, dict[str, set[str]]] = {
    "data": {
        "privacy": set(),
        "reports": {"privacy"},
        "tokenizer": set(),
        "knowledge": {"tokenizer"},
        "annotations": set(),
        "splits": set(),
        "dicom": {"privacy"},
        "images": {"dicom", "privacy"},
        "volumes": {"dicom"},
        "transforms": {"images", "reports", "tokenizer"},
        "storage": set(),
        "shards": {"images", "splits", "storage", "volumes"},
        "loading": {*_DATA_READERS, "shards", "storage"},
        "corpora": {*_DATA_READERS, "privacy", "storage"},
        "convert": {*_DATA_READERS, "privacy", "shards", "storage", "corpora"},
    },
    "encoders": {"image": set(), "text": set(), "volume": set()},
    "models": {
        "dual_encoders": set(),
        "fusion_encoders": {"dual_encoders"},
        "volumes": {"dual_encoders"},
        "downstream": {"dual_encoders", "fusion_encoders"},
        "report_generators": {"fusion_encoders"},
        "image_generation": set(),
        "language": set(),
    },
    "train": {
        "parallel": set(),
        "fault_tolerance": {"parallel"},
        "optim": {"fault_tolerance", "parallel"},
        "rewards": set(),
        "tasks": {"loop", "parallel", "rewards"},
        "loop": {"optim", "fault_tolerance", "parallel", "rewards"},
        "doctor": {"loop", "optim", "fault_tolerance", "parallel", "tasks"},
    },
    "eval": {
        "core": set(),
        "html": {"core"},
        "classification": {"core", "html"},
        "zero_shot_classification": {"core", "html", "classification"},
        "probing": {"core", "html", "classification"},
        "grounding": {"core", "html", "dense", "zero_shot_classification"},
        "retrieval": {"core", "html", "classification"},
        "dense": {"core", "html"},
        "matching": {"core", "html", "retrieval"},
        "zero_shot_masks": {"core", "html", "dense", "grounding"},
        "published": set(),
        "masked_prediction": {"core", "html"},
        "robustness": {
            "core",
            "html",
            "classification",
            "zero_shot_classification",
            "probing",
            "retrieval",
            "matching",
        },
        "vqa": {"core", "html", "retrieval", "report_generation"},
        "report_generation": {"core", "html"},
        "generation": {"core", "html", "classification", "probing"},
        "text_tasks": {"core", "html", "probing"},
        "text_retrieval": {"core", "html", "retrieval", "text_tasks"},
        "compare": {
            *(
                "core",
                "html",
                "classification",
                "retrieval",
                "dense",
                "matching",
                "vqa",
                "report_generation",
            ),
            *("generation", "text_tasks", "zero_shot_classification", "probing"),
        },
    },
    "phantom": {"population": set(), "language": {"population"}, "rendering": {"population"}},
    "export": {"importers": set(), "exporters": {"importers"}},
}
"""Package -> sub-package -> other sub-packages that it may import; files directly in the package
are not listed. The sub-packages `phantom.layouts` and `cli` end the flow, so they may import all of
theirs.
"""


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {dotted(path): path for path in SOURCES}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file: several rules look at each of them."""
    return list(ast.walk(parse(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Collect no garbage among millions of nodes, and drop them before the tests of other
    files.
    """
    gc.disable()
    yield
    parse.cache_clear()
    nodes_of.cache_clear()
    imports_of.cache_clear()
    classes.cache_clear()
    exports.cache_clear()
    gc.enable()


def for_files(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[str], None]]:
    """Make a test of one file a test of each folder: three thousand tests would take longer than
    what they look at.
    """
    files: dict[str, list[Path]] = {}
    for path in paths:
        files.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)

    def decorate(check: Callable[[Path], None]) -> Callable[[str], None]:
        def test(folder: str) -> None:
            for path in files[folder]:
                try:
                    check(path)
                except AssertionError as error:
                    raise AssertionError(f"{path.relative_to(ROOT)}: {error}") from error

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return pytest.mark.parametrize("folder", files)(test)

    return decorate


@functools.cache
def imports_of(path: Path, *, typing_only: bool = True) -> list[tuple[str, str | None]]:
    """(module, name) of every import of medvl in a file, wherever it is written."""
    found: list[tuple[str, str | None]] = []
    skipped = set()
    if not typing_only:
        blocks = [node for node in nodes_of(path) if isinstance(node, ast.If)]
        skipped = {
            id(part)
            for block in blocks
            if "TYPE_CHECKING" in ast.unparse(block.test)
            for part in ast.walk(block)
        }
    for node in nodes_of(path):
        if id(node) in skipped:
            continue
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "medvl"
        ):
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [
                (alias.name, None) for alias in node.names if alias.name.split(".")[0] == "medvl"
            ]
    return found


@functools.cache
def exports() -> dict[tuple[str, str], str]:
    """(package, public name) -> module that defines it, of the packages whose names are imported
    on first use.
    """
    homes = {}
    for face in FACES:
        for node in parse(MODULES[face]).body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for part in node.body:
                    if isinstance(part, ast.ImportFrom) and part.module:
                        homes |= {
                            (face, alias.asname or alias.name): part.module for alias in part.names
                        }
    return homes


def target(module: str, name: str | None) -> str:
    """The file that an import reads: a submodule, the home of a lazily exported name, or the
    module itself.
    """
    if name is not None:
        if f"{module}.{name}" in MODULES:
            return f"{module}.{name}"
        return exports().get((module, name), module)
    return module


def places(module: str) -> tuple[str, str]:
    """(package, sub-package) of a module, both without `medvl`."""
    parts = [*module.split(".")[1:], "", ""]
    return parts[0], parts[1]


@for_files(SOURCES)
def test_imports_follow_the_rooms(path: Path) -> None:
    if path.name in ("__init__.py", "__main__.py") and path.parent.name == "medvl":
        return
    room, part = places(dotted(path))
    for module, name in imports_of(path):
        other, other_part = places(target(module, name))
        if other in FREE or other == "":
            continue
        assert room not in FREE, f"{path.relative_to(ROOT)} imports {module}"
        if other != room:
            assert other in ROOMS[room], f"{path.relative_to(ROOT)} imports {module}.{name}"
            continue
        borders = SUBPACKAGES.get(room, {})
        if part in borders and other_part in borders and other_part != part:
            assert other_part in borders[part], f"{path.relative_to(ROOT)} imports {module}.{name}"


@pytest.mark.parametrize("room", ["medvl.models.dual_encoders.", "medvl.models.fusion_encoders."])
def test_bases_of_systems_import_parts_and_no_system(room: str) -> None:
    borders = {
        "bases": {"bases", "parts"},
        "parts": {"parts"},
    }
    shared = {name: path for name, path in MODULES.items() if name.startswith(room)}
    shared = {
        name: path
        for name, path in shared.items()
        if name.removeprefix(room).split(".")[0] in borders
    }
    assert len(shared) > 5
    for name, path in shared.items():
        allowed = borders[name.removeprefix(room).split(".")[0]]
        for module, imported in imports_of(path, typing_only=False):
            found = target(module, imported)
            assert (
                not found.startswith(room) or found.removeprefix(room).split(".")[0] in allowed
            ), f"{name}: {found}"


def test_no_file_imports_itself_through_others() -> None:
    """Strongly connected components of the import graph, imports inside of functions included."""
    graph = {
        name: {target(module, imported) for module, imported in imports_of(path, typing_only=False)}
        & MODULES.keys()
        for name, path in MODULES.items()
    }
    for face in FACES:
        graph[face] = set()  # a face imports on first use
    reach: dict[str, set[str]] = {}

    def reachable(start: str) -> set[str]:
        if start not in reach:
            seen, queue = set(), list(graph[start])
            while queue:
                name = queue.pop()
                if name not in seen:
                    seen.add(name)
                    queue += graph[name]
            reach[start] = seen
        return reach[start]

    circles = {
        frozenset(other for other in reachable(name) if name in reachable(other)) for name in graph
    } - {frozenset()}
    assert not circles, [sorted(circle) for circle in circles]


@for_files(SCRIPTS)
def test_programs_import_from_the_faces(path: Path) -> None:
    """The benchmark may reach into the part that it measures, and so may what makes the demo or
    pools the items of folds.
    """
    if path.parent.name in ("lines", "measure") or path.name in (
        "benchmark.py",
        "boxes_nih.py",
        "fuzz_readers.py",
        "make_demo.py",
        "soak.py",
        "fault_matrix.py",
    ):
        return
    modules = {module for module, _ in imports_of(path)} - {
        *FACES,
        "medvl.data.corpora",
        "medvl.errors",
        "medvl.schema",
    }
    assert not [
        module for module in sorted(modules) if module.rpartition(".")[0] != "medvl.data.corpora"
    ]


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "yaml"}


@pytest.mark.fault("S8")
@for_files(SOURCES + SCRIPTS)
def test_nothing_dangerous_is_called(path: Path) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            assert not {module.split(".")[0] for module in modules} & FORBIDDEN_MODULES
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        for risky in ("trust_remote_code", "shell"):
            value = keywords.get(risky)
            assert value is None or (isinstance(value, ast.Constant) and value.value is False), (
                ast.unparse(node)
            )
        if isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, ast.unparse(node)
        if ast.unparse(node.func) == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", ast.unparse(node)


def test_rooms_have_at_most_twenty_files() -> None:
    """The `__init__.py` is not counted; a fuller room gets sub-packages, each named by a noun."""
    rooms = Counter(
        str(path.parent.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py"
    )
    assert {room: files for room, files in rooms.items() if files > 20} == {}


@for_files(SOURCES + SCRIPTS)
def test_files_and_functions_are_short(path: Path) -> None:
    """The docstring of a function is not counted. Recipes have commands in one line, to be copied;
    ruff checks no line without a blank, such as a regular expression.
    """
    lines = path.read_text().splitlines()
    is_recipe = path.parent.name == "recipes"
    assert len(lines) <= (200 if is_recipe else 600)
    assert is_recipe or max(map(len, lines), default=0) <= 100
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert node.end_lineno - first.lineno < 80, f"{node.name} is too long"


@functools.cache
def classes() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """Name of each class of medvl -> names of its bases, and of its methods with a docstring.

    Classes of one name are taken together.
    """
    found: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                others, known = found.get(node.name, ((), frozenset()))
                bases = tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                documented = {method.name for method in methods if ast.get_docstring(method)}
                found[node.name] = (others + bases, known | documented)
    return found


def overrides(bases: Iterable[str], method: str) -> bool:
    """Return whether a base class documents a method; those of other libraries document theirs."""
    for base in bases:
        if base not in classes():
            if base not in ("Protocol", "ABC", "Generic", "object"):
                return True
        elif method in classes()[base][1] or overrides(classes()[base][0], method):
            return True
    return False


def undocumented(body: list[ast.stmt], bases: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield public functions without a docstring, and those of public classes.

    Overloads share the docstring of their function, and overrides that of their base class.
    """
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names = classes()[node.name][0]
            yield from (f"{node.name}.{name}" for name in undocumented(node.body, names))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            overload = "overload" in map(ast.unparse, node.decorator_list)
            if not (overload or ast.get_docstring(node) or overrides(bases, node.name)):
                yield node.name


def test_public_functions_have_docstrings() -> None:
    lacking = {
        str(path.relative_to(ROOT)): list(undocumented(parse(path).body)) for path in SOURCES
    }
    assert {path: names for path, names in lacking.items() if names} == {}


@pytest.mark.parametrize(
    "kind", ["dual_encoders", "fusion_encoders", "report_generators", "volumes"]
)
def test_a_system_is_one_file(kind: str) -> None:
    """A file beside `bases` and `parts` registers the system of its name; LoVT's settings without
    local losses and the two kinds of streams have no files of their own.
    """
    systems = {
        str(path.relative_to(ROOT)): re.findall(r'@register_system\("(\w+)"', path.read_text())
        for path in SOURCES
        if path.parent == ROOT / "medvl/models" / kind and path.stem not in ("__init__", "base")
    }
    shared = {"lovt": ["local_analysis", "lovt"], "streams": ["single_stream", "dual_stream"]}
    assert systems
    assert {path: sorted(names) for path, names in systems.items()} == {
        path: sorted(shared.get(Path(path).stem, [Path(path).stem])) for path in systems
    }


@for_files(SOURCES + SCRIPTS)
def test_nothing_is_silenced(path: Path) -> None:
    for silencer in ("# noqa", "# type: ignore", "filterwarnings", "strict=False)"):
        lines = [
            line
            for line in path.read_text().splitlines()
            if silencer in line and "zip(" not in line
        ]
        assert not lines, f"{silencer}: {lines}"


def test_tests_do_not_import_tests() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.split(".")[-1].startswith("test_"), path
                assert node.module != "conftest", path


def test_tests_replace_attributes_of_modules_in_a_context() -> None:
    """By monkeypatch or mock.patch.object, never by an assignment, which would last."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes = nodes_of(path)
        names = {
            (alias.asname or alias.name).split(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node).split(".")[0] not in names, (
                    f"{path}: {ast.unparse(node)} is assigned to"
                )


def test_tests_mirror_the_packages() -> None:
    """A folder of tests has the name of the package or module that it tests; `data/odd` tests
    all by public names.
    """
    folders = {
        path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")
    }
    folders -= {Path("data/odd")}
    homes = {folder: ROOT / "medvl" / folder for folder in folders}
    assert [
        str(folder)
        for folder, home in homes.items()
        if not (home.is_dir() or home.with_suffix(".py").is_file())
    ] == []


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_medvl_is_nearly_free() -> None:
    heavy = run_python(
        "import medvl, sys; print(sorted({'torch', 'numpy', 'cv2', 'tyro'} & set(sys.modules)))"
    )
    assert heavy == "[]"


@pytest.mark.fault("P3")
def test_encoders_can_be_imported_alone() -> None:
    code = (
        "import medvl.encoders, sys\n"
        "heavy = {'webdataset', 'pydicom', 'albumentations', 'transformers', 'timm', "
        "'open_clip', 'torchvision',"
        " 'medvl.data', 'medvl.train', 'medvl.models'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_embedding_imports_what_it_uses_alone() -> None:
    """Libraries that take memory in `medvl embed` and in every loader process, for other images and
    other work.
    """
    code = (
        "import medvl.inference.embeddings, sys\n"
        "heavy = {'pydicom', 'albumentations', 'scipy', 'sklearn', 'matplotlib', 'open_clip', "
        "'timm', 'transformers', 'medvl.train'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_no_public_name_is_hidden_by_a_package() -> None:
    """Importing a sub-package sets it as an attribute, in place of a public function of the same
    name.
    """
    hidden = [
        f"{face}.{name}"
        for (face, name), home in exports().items()
        if f"{face}.{name}" in MODULES and home != face
    ]
    assert hidden == []


def test_every_public_name_can_be_imported() -> None:
    code = (
        "import importlib\n"
        f"for name in {FACES!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__all__, name\n"
        "    for public in module.__all__:\n"
        "        getattr(module, public)\n"
        "print('ok')"
    )
    assert forked.run([sys.executable, "-c", code]).stdout == "ok\n"
