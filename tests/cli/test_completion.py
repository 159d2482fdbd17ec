"""`medvl completion`: words that a shell completes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from medvl.cli import main as cli

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
"_tyro_medvl" medvl "${COMP_WORDS[$COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        text = cli.run_command("completion", [shell])
        assert text is not None
        (folder / shell).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sha"], {"shards"}),
        (["shards", "vqa"], {"vqa-rad", "vqa-med"}),
        (["eval", "zero-shot", "--checkp"], {"--checkpoint"}),
        (["verify", "--dec"], {"--decode"}),
        (["phantom", "mimic-cxr", "--pat"], {"--patients"}),
        (["train", "convirt"], {"convirt_mimic"}),
        (["train", "convirt_mimic", "ti"], {"tiny"}),
        (["train", "convirt_mimic", "tiny", "--optim.l"], {"--optim.lr"}),
        (["completion", ""], set()),
        (["export", "--to", "on"], {"onnx"}),
        (["--qu"], {"--quiet"}),
    ],
)
def test_bash_completes(words: list[str], expected: set[str], scripts: Path) -> None:
    command = ["bash", "-c", COMPLETE, "bash", str(scripts / "bash"), "medvl", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = {line for line in done.stdout.splitlines() if line}
    assert found >= expected
    if expected:
        assert found == expected


def test_zsh_reads_the_script(scripts: Path) -> None:
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef medvl")
    assert "'vqa-rad'" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(scripts / "zsh")], check=True)
