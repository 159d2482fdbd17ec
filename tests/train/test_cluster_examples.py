"""The examples for clusters: valid files, options that torchrun and the recipes have, and names
that agree.
"""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from medvl.cli.recipes import find_recipe, load_recipe

EXAMPLES = Path(__file__).parent.parent.parent / "examples/cluster"
SLURM, KUBERNETES = EXAMPLES / "slurm.sbatch", EXAMPLES / "kubernetes.yaml"
ELASTIC = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def slurm_commands() -> list[list[str]]:
    """Return the words after `torchrun` of each command of the batch script."""
    joined = SLURM.read_text().replace("\\\n", " ")
    lines = [
        line.partition(" torchrun ")[2].rstrip("& ")
        for line in joined.splitlines()
        if line.startswith("srun ")
    ]
    return [shlex.split(line.replace("$SLURM_NNODES", "4")) for line in lines]


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    return service, job


def kubernetes_command() -> list[str]:
    _, job = kubernetes()
    program, *words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert program == "torchrun"
    return words


def test_batch_script_is_valid_and_saves_before_its_time_is_over() -> None:
    checked = subprocess.run(
        ["bash", "-n", str(SLURM)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    text = SLURM.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert {"nodes", "requeue", "signal", "time"} <= set(options)
    assert options["signal"].startswith("B:TERM@")
    assert f"export {ELASTIC}=1" in text


def test_job_names_its_rendezvous() -> None:
    service, job = kubernetes()
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    options = get_args_parser().parse_args(kubernetes_command())
    port = service["spec"]["ports"][0]["port"]
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:{port}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(options.nnodes)
    (container,) = pod["containers"]
    assert {"name": ELASTIC, "value": "1"} in container["env"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.parametrize(
    "words", [*slurm_commands(), kubernetes_command()], ids=lambda words: words[-1][:20]
)
def test_commands_are_those_of_torchrun_and_medvl(words: list[str]) -> None:
    options = get_args_parser().parse_args(words)
    assert (options.training_script, options.module) == ("medvl", True)
    assert options.rdzv_backend == "c10d"
    command, name, *settings = options.training_script_args
    if command == "doctor":
        assert (name, settings[0]) == ("nodes", "--storage")
        return
    assert command == "train"
    assert options.max_restarts > 0
    _, chosen = load_recipe(find_recipe(name), settings)
    assert str(chosen.train.run_dir).endswith("/runs/convirt")
    assert chosen.train.checkpoint_every == 500
