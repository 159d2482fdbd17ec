"""Build the documentation site and check its links; needs the extra `docs` and no network.

    bash scripts/build_docs.sh  # sets up .venv, then calls this script; the site is site/index.html
    python scripts/build_docs.py --out site

The pages come from `docs/pages`, `docs/notebooks`, `data_cards/` and the documents at the top of
the repository. The notebooks are run, so that the site shows their outputs. Three kinds of pages
are made from the code: the systems and corpora, the published numbers of the recipes, and the API
reference, one page for each package.
"""

import argparse
import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from medvl.models import list_models, system

ROOT = Path(__file__).parent.parent
FACES = (
    "medvl",
    "medvl.data",
    "medvl.encoders",
    "medvl.losses",
    "medvl.models",
    "medvl.train",
    "medvl.eval",
    "medvl.inference",
    "medvl.export",
    "medvl.phantom",
    "medvl.serve",
    "medvl.benchmark",
)
DOCUMENTS = ("RESULTS", "PERFORMANCE", "CONTRIBUTING", "CHANGELOG", "SECURITY")
FAMILIES = {
    "dual_encoders": (
        "Dual-encoders",
        "They embed images and texts apart: zero-shot classification, retrieval, grounding, "
        "linear probes.",
    ),
    "fusion_encoders": (
        "Fusion-encoders",
        "They read an image and a text together: question answering, matching, classification.",
    ),
    "volumes": (
        "Dual-encoders of volumes",
        "They embed CT or MR scans and reports apart: zero-shot classification, retrieval.",
    ),
    "report_generators": (
        "Report generators",
        "They write a report for one or two images. MedViLL does too, with `--model.objective "
        "report`.",
    ),
    "image_generation": (
        "Image generators",
        "They draw radiographs, most of them from a text. Install `medvl[generation]`.",
    ),
    "language": (
        "Text encoders",
        "They learn from text alone and start the text side of other systems.",
    ),
    "downstream": (
        "Models on a pretrained encoder",
        "They learn from annotations and start from a checkpoint of another system.",
    ),
}
"""Folder of `medvl/models` -> heading of its systems, and what they are for."""
PUBLISHED = """# Published numbers

Published numbers and the commands to reproduce them, with the paper's weights or after a run of the
preset `paper`. None of them was measured with medvl; [Results](results.md) has those. Values have
the unit of the source: percent, or a share of one. Look up numbers marked "not checked" in the
source before you quote them.

Many numbers are re-runs by other papers, as the source states. Splits, prompts and thresholds
differ between papers: compare only rows of one source. `medvl recipes numbers RECIPE` prints the
rows of one recipe.

"""
"""Introduction of the page of published numbers."""
_MODULES = ("medvl.schema", "medvl.errors")
"""Modules without a face whose public members are documented as a whole."""


def main() -> None:
    """Parse the options, build the site, report broken links."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "site", help="folder of the site; replaced if it exists"
    )
    parser.add_argument(
        "--skip-notebooks", action="store_true", help="show the notebooks without running them"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        collect(Path(folder) / "docs", run_notebooks=not options.skip_notebooks)
        config = Path(folder) / "mkdocs.yml"
        config.write_text(navigation((ROOT / "docs/mkdocs.yml").read_text(), Path(folder) / "docs"))
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--clean",
            "-f",
            str(config),
            "-d",
            str(out),
        ]
        subprocess.run(command, check=True)
    broken = broken_links(out)
    for line in broken:
        print(line, file=sys.stderr)
    print(
        f"{out / 'index.html'}: {len(list(out.rglob('*.html')))} pages, {len(broken)} broken links"
    )
    raise SystemExit(1 if broken else 0)


def collect(pages: Path, *, run_notebooks: bool) -> None:
    """Copy every page into the folder `pages`, and write the pages that are made from the code."""
    shutil.copytree(ROOT / "docs/pages", pages)
    (pages / "notebooks").mkdir()
    copy_notebook = run_notebook if run_notebooks else shutil.copy
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        copy_notebook(path, pages / "notebooks" / path.name)
    for name in ("images", "javascripts", "stylesheets"):
        shutil.copytree(ROOT / "docs" / name, pages / name)
    shutil.copytree(ROOT / "data_cards", pages / "data_cards")
    for name in DOCUMENTS:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        (pages / f"{name.lower()}.md").write_text(
            text.replace("](docs/pages/", "]("), encoding="utf-8"
        )
    for name, make_page in GENERATED.items():
        (pages / name).write_text(make_page(), encoding="utf-8")
    (pages / "api").mkdir()
    for face in FACES:
        (pages / "api" / f"{face}.md").write_text(api_page(face))
    for module in _MODULES:
        heading = "    options:\n      show_root_heading: false\n"
        (pages / "api" / f"{module}.md").write_text(f"# `{module}`\n\n::: {module}\n{heading}")


def run_notebook(source: Path, target: Path) -> None:
    """Run a notebook in an empty folder and write it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        salt = Path(folder, "salt")
        salt.write_text(f"{0:064d}\n")  # the phantom's data are not confidential
        salt.chmod(0o600)
        os.environ["MEDVL_SALT_FILE"] = str(salt)
        metadata = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=metadata).execute()
    nbformat.write(notebook, target)


def systems_page() -> str:
    """Return the page of all systems and corpora, from the registry, the recipes and the data
    cards.
    """
    recipes = recipes_by_system()
    rows: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in list_models():
        cls = system(name)
        sentence = first_paragraph(cls.__doc__).partition(". ")[0].rstrip(".")
        objective = re.sub(r" \([^()]*section[^()]*\)", "", sentence)
        family = cls.__module__.split(".")[2]
        rows[family].append(f"| `{name}` | {objective} | {recipe_cell(recipes[name])} |")
    lines = ["# Systems and corpora", "", "`medvl.create_model(NAME)` builds a system.", ""]
    for family, (title, text) in FAMILIES.items():
        lines += [
            f"## {title}",
            "",
            text,
            "",
            "| system | objectives | recipes |",
            "|---|---|---|",
            *rows[family],
            "",
        ]
    lines += [
        "Recipes that train them:",
        "",
        *(f"- `{name}`: {text}" for name, text in recipes[""].items()),
        "",
    ]
    lines += ["## Corpora", ""]
    lines += [
        "`medvl cards show NAME` prints a card.",
        "",
        "| card | corpus | command |",
        "|---|---|---|",
    ]
    for path in sorted((ROOT / "data_cards").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        command = re.search(rf"medvl shards {path.stem}\b", text) or re.search(
            r"medvl (?:eval|knowledge) [\w-]+", text
        )
        lines.append(
            f"| [{path.stem}](data_cards/{path.name}) | {title} | "
            f"{f'`{command.group()}`' if command else ''} |"
        )
    return "\n".join([*lines, ""])


def recipes_by_system() -> Mapping[str, Mapping[str, str]]:
    """Return the recipes that train each system, "" for those that start from a checkpoint, and
    their first lines.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted((ROOT / "recipes").glob("*.py")):
        recipe = runpy.run_path(str(path))
        summary = first_paragraph(recipe["__doc__"])
        for preset in recipe["PRESETS"].values():
            model = getattr(preset, "model", None)
            found["" if model is None else model.system][path.stem] = summary
    return found


def recipe_cell(recipes: Mapping[str, str]) -> str:
    """Return recipes and their summaries as the cell of a table, with links to arXiv."""
    lines = [f"`{name}`: {summary}" for name, summary in recipes.items()]
    return re.sub(
        r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", "<br>".join(lines)
    )


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def api_page(face: str) -> str:
    """Return the Markdown of one package: its docstring, then a heading and a docstring for each
    public name.
    """
    package = importlib.import_module(face)
    lines = [f"# `{face}`", "", (package.__doc__ or "").strip(), ""]
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        module = getattr(value, "__module__", None)
        if module is None or not module.startswith("medvl."):
            continue  # a subpackage, a constant: its own page or docstring has it
        lines += [f"::: {module}.{getattr(value, '__qualname__', name)}", ""]
    return "\n".join(lines)


def navigation(config: str, pages: Path) -> str:
    """Return the configuration with the folders of its navigation replaced by their pages."""

    def listed(match: re.Match[str]) -> str:
        indent, title, folder = match.groups()
        files = sorted((pages / folder).glob("*.md"))
        return f"{indent}- {title}:\n" + "\n".join(
            f"{indent}    - {folder}{path.name}" for path in files
        )

    return re.sub(r"^( *)- ([\w ]+): (\w+/)$", listed, config, flags=re.MULTILINE)


class _Page(HTMLParser):
    """Ids, local links, and what one page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what the tag defines and what it points to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if name not in ("href", "src") or not value:
                continue
            if urlsplit(value).scheme in ("", "data") and not value.startswith("//"):
                self.links += [] if value.startswith("data:") else [value]
            elif tag not in ("a", "area", "base") and dict(attrs).get("rel") != "canonical":
                self.foreign.append(value)


def published_page() -> str:
    """Return the page of published numbers: an introduction and the output of `medvl recipes
    numbers --markdown`.
    """
    command = [sys.executable, "-m", "medvl", "recipes", "numbers", "--markdown"]
    return PUBLISHED + subprocess.run(command, check=True, capture_output=True, text=True).stdout


GENERATED: Mapping[str, Callable[[], str]] = {
    "systems.md": systems_page,
    "published-numbers.md": published_page,
}
"""Page of the site -> function that returns its Markdown."""


def broken_links(site: Path) -> list[str]:
    """Return one line for each local link that leads to no file or heading, and for each file of
    another host.
    """
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        broken += [
            f"{path.relative_to(site)}: loads {address} from another host"
            for address in page.foreign
        ]
        if path.name == "404.html":
            continue  # its links are those of the site's root
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: no file {link}")
            elif (
                anchor
                and target in pages
                and anchor not in pages[target].ids
                and not anchor.startswith("__")
            ):
                broken.append(f"{path.relative_to(site)}: no heading {link}")
    return broken


if __name__ == "__main__":
    main()
