"""constraints-locked.txt, which the Docker image installs and the audit reads, fits
pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = ("wandb", "serve", "remote")
"""Extras of the image."""
ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}


def locked() -> dict[str, tuple[str, int]]:
    """Return name -> (version, number of hashes)."""
    text = (ROOT / "constraints-locked.txt").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)", text, re.MULTILINE
    )
    return {
        canonicalize_name(name): (version, hashes.count("sha256:"))
        for name, version, hashes in entries
    }


def test_every_dependency_is_locked_at_an_allowed_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    versions = locked()
    wrong = []
    for line in [*project["dependencies"], *extras, "hatchling"]:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(ENVIRONMENT):
            continue
        version, _ = versions.get(canonicalize_name(requirement.name), ("", 0))
        if not version or version not in requirement.specifier:
            wrong.append(f"{line}: locked {version or 'not at all'}; run scripts/lock.sh")
    assert wrong == []


def test_every_locked_package_has_hashes_and_no_address() -> None:
    text = (ROOT / "constraints-locked.txt").read_text(encoding="utf-8")
    versions = locked()
    assert len(versions) > 100
    assert [name for name, (_, hashes) in versions.items() if not hashes] == []
    assert not re.search(
        r"https?://|file:|--(?:extra-)?index-url|--find-links|^-", text, re.MULTILINE
    )


def test_the_torch_of_the_image_is_that_of_the_tests() -> None:
    constraints = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    for name in ("torch", "torchvision"):
        assert f"{name}=={locked()[name][0]}" in constraints.split()


def test_the_image_installs_by_hash_alone() -> None:
    lines = re.findall(r"pip install (.*)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert [
        "--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in lines
    ] == [True, True]


def test_every_extra_is_tested_alone_in_the_workflow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "docs"}
    script = (ROOT / "scripts/test_extra.sh").read_text(encoding="utf-8")
    tests = dict(re.findall(r"^ +([\w-]+)\) echo \"(tests/\S+?\.py)\"", script, re.MULTILINE))
    assert set(tests) == extras
    assert all((ROOT / path).is_file() for path in tests.values())
    workflow = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    [matrix] = re.findall(r"extra: \[(.*)\]", workflow)
    assert set(matrix.split(", ")) == extras
