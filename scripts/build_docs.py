"""Build the documentation site and check its links; needs the extra `docs` and no network.

    bash scripts/build_docs.sh                  # sets up .venv, then calls this script; the site is site/index.html
    python scripts/build_docs.py --out site

The pages come from `docs/pages`, `docs/notebooks`, `data_cards/` and the documents at the top of the repository. The
notebooks are run, so that the site shows their outputs. The API reference has one page for each package, with the
public names of its face and their docstrings.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
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
DOCUMENTS = ("RESULTS", "PERFORMANCE", "RELIABILITY", "CONTRIBUTING", "CHANGELOG", "SECURITY")
_MODULES = ("medvl.schema", "medvl.errors")
"""Modules without a face whose public members are documented as a whole."""


def main() -> None:
    """Parse the options, build the site, report broken links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site; replaced if it exists")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        collect(Path(folder) / "docs")
        config = Path(folder) / "mkdocs.yml"
        config.write_text(navigation((ROOT / "docs/mkdocs.yml").read_text(), Path(folder) / "docs"))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(config), "-d", str(out)]
        subprocess.run(command, check=True)
    broken = broken_links(out)
    for line in broken:
        print(line, file=sys.stderr)
    print(f"{out / 'index.html'}: {len(list(out.rglob('*.html')))} pages, {len(broken)} broken links")
    raise SystemExit(1 if broken else 0)


def collect(pages: Path) -> None:
    """Copy every page into the folder `pages` and write the API reference there."""
    shutil.copytree(ROOT / "docs/pages", pages)
    (pages / "notebooks").mkdir()
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        run_notebook(path, pages / "notebooks" / path.name)
    shutil.copytree(ROOT / "docs/images", pages / "images")
    shutil.copytree(ROOT / "docs/javascripts", pages / "javascripts")
    shutil.copytree(ROOT / "data_cards", pages / "data_cards")
    for name in DOCUMENTS:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        (pages / f"{name.lower()}.md").write_text(text.replace("](docs/pages/", "]("), encoding="utf-8")
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


def api_page(face: str) -> str:
    """Return the Markdown of one package: its docstring, then a heading and a docstring for each public name."""
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
        return f"{indent}- {title}:\n" + "\n".join(f"{indent}    - {folder}{path.name}" for path in files)

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


def broken_links(site: Path) -> list[str]:
    """Return one line for each local link that leads to no file or heading, and for each file of another host."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        broken += [f"{path.relative_to(site)}: loads {address} from another host" for address in page.foreign]
        if path.name == "404.html":
            continue  # its links are those of the site's root
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: no file {link}")
            elif anchor and target in pages and anchor not in pages[target].ids and not anchor.startswith("__"):
                broken.append(f"{path.relative_to(site)}: no heading {link}")
    return broken


if __name__ == "__main__":
    main()
