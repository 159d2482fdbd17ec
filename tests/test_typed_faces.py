"""Types that a user's mypy sees: an outside script on the public faces of the installed package."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = """
import medvl
from medvl.data import open_loader
from medvl.eval import zero_shot
from medvl.train import train

reveal_type(medvl.create_model)
reveal_type(medvl.load)
reveal_type(medvl.train.train)
reveal_type(medvl.eval.zero_shot)
reveal_type(medvl.data.open_loader)
medvl.create_model(3.5)
train(learning_rate=1.0)
train().no_such_result
open_loader("shards")
zero_shot(loader=3)
"""
REVEALED = {  # line -> part of the type
    7: r"def \(.*medvl\.models\.base\.System",
    8: r"def \(.*medvl\.models\.base\.System",
    9: r"def \(.*OptimConfig.*TrainConfig.*TrainResult",
    10: r"def \(.*PromptSet.*ZeroShotResult",
    11: r"def \(.*batch: (builtins\.)?int.*Loader",
}
ERRORS = {12: "arg-type", 13: "call-arg", 14: "attr-defined", 15: "call-arg", 16: "call-arg"}


def test_mypy_of_an_outside_script_sees_the_types(tmp_path: Path) -> None:
    script = tmp_path / "outside.py"
    script.write_text(SCRIPT)
    quick = (
        "--no-site-packages",
        "--ignore-missing-imports",
    )  # no types of torch, whose analysis takes a minute
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        *quick,
        "--cache-dir=/dev/null",
        str(script),
    ]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    lines: dict[int, str] = {}
    for number, text in re.findall(r"outside\.py:(\d+): (.*)$", run.stdout, re.MULTILINE):
        lines[int(number)] = lines.get(int(number), "") + text
    for number, pattern in REVEALED.items():
        assert re.search(pattern, lines.get(number, "")), run.stdout + run.stderr
        assert "Any" not in lines[number].split(" -> ")[-1], lines[number]
    for number, code in ERRORS.items():
        assert f"[{code}]" in lines.get(number, ""), run.stdout + run.stderr
