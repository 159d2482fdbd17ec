"""`medvl completion`: words that a shell completes."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

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
    """The first cases in a shell, in which each starts a Python with all of the words, and all of
    them by the Python of the script.
    """
    script = scripts / "bash"
    shown = list(CASES)[:2]
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script)],
        input="".join(f"medvl {words}\n" for words in shown),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    for words, line in zip(shown, done.stdout.splitlines(), strict=True):
        assert set(line.split()) == CASES[words], words
    _, _, program = script.read_text().partition("<< 'PYTHON_EOF' || true\n")
    names: dict[str, Any] = {"__name__": "completion"}
    exec(program.partition("\nPYTHON_EOF\n")[0], names)
    for words, expected in CASES.items():
        typed = ["medvl", *words.replace("''", "").split(" ")]
        lines = names["get_completions"](typed, len(typed) - 1, names["COMPLETION_SPEC"])
        assert not [line for line in lines if "\n" in line], "a shell reads one completion a line"
        found = {line.partition("\t")[0] for line in lines}
        assert found == expected if expected else found, words


def test_zsh_reads_the_script(scripts: Path) -> None:
    text = (scripts / "zsh").read_text()
    assert text.startswith("#compdef medvl")
    assert "'vqa-rad'" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(scripts / "zsh")], check=True)
