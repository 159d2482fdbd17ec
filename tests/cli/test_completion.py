"""`medvl completion`: words that a shell completes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from medvl.cli import main as cli

COMPLETE = """
source "$1"
while read -ra COMP_WORDS; do
    if [ "${COMP_WORDS[-1]}" = "''" ]; then COMP_WORDS[-1]=""; fi
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    "_tyro_medvl" medvl "${COMP_WORDS[$COMP_CWORD]}" ""
    echo "${COMPREPLY[@]}"
done
"""
"""Words of a line of the input, of which the last is completed -> a line of the output."""
CASES = {
    "sha": {"shards"},
    "shards vqa": {"vqa-rad", "vqa-med"},
    "eval zero-shot --checkp": {"--checkpoint"},
    "verify --dec": {"--decode"},
    "phantom mimic-cxr --pat": {"--patients"},
    "train convirt": {"convirt_mimic"},
    "train convirt_mimic ti": {"tiny"},
    "train convirt_mimic tiny --optim.l": {"--optim.lr"},
    "completion ''": set(),
    "export --to on": {"onnx"},
    "--qu": {"--quiet"},
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        text = cli.run_command("completion", [shell])
        assert text is not None
        (folder / shell).write_text(text)
    return folder


def test_bash_completes(scripts: Path) -> None:
    """All cases in one shell: reading the script takes half a second."""
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(scripts / "bash")],
        input="".join(f"medvl {words}\n" for words in CASES),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = dict(zip(CASES, done.stdout.splitlines(), strict=True))
    for words, expected in CASES.items():
        assert set(found[words].split()) >= expected, words
        if expected:
            assert set(found[words].split()) == expected, words


def test_zsh_reads_the_script(scripts: Path) -> None:
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef medvl")
    assert "'vqa-rad'" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(scripts / "zsh")], check=True)
