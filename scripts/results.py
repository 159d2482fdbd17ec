"""Tables of the parts of `scripts/reproduce_results.sh`, from their `results.json`.

    python scripts/results.py            # print the tables of all finished parts, as Markdown
    python scripts/results.py --folder quickstart

`RESULTS.md` quotes a row of each. `medvl benchmark` writes its own tables.
"""

import argparse
import dataclasses
import datetime
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medvl.errors import EvaluationError
from medvl.eval import MetricRow, Results, read_results

ROOT = Path(__file__).parent.parent
FINDINGS = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
_MEAN = ("auroc", "macro_competition")
_F1 = ("f1", "macro of five")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A table: a column for each results folder, a row for each metric."""

    name: str
    columns: Mapping[str, str]
    """Title -> folder under quickstart/."""
    rows: Mapping[str, tuple[str, ...]]
    """Title -> (metric, target), or (metric, target, subgroup)."""
    corner: str = ""


TABLES = (
    Table(
        name="zero-shot",
        corner="AUROC",
        columns={"zero-shot": "zero-shot"},
        rows={finding: ("auroc", finding) for finding in FINDINGS} | {"mean of the five": _MEAN},
    ),
    Table(
        name="probe",
        corner="linear probe, mean AUROC of the five",
        columns={"ConVIRT": "probe"},
        rows={
            f"{share} of the labels": (f"auroc@{share}", "macro_competition")
            for share in ("1%", "10%", "100%")
        },
    ),
    Table(
        name="grounding",
        corner="phrases of other patients",
        columns={"ConVIRT": "grounding-convirt", "GLoRIA from ConVIRT": "grounding-gloria"},
        rows={
            "pointing game": ("pointing_game", "overall"),
            "contrast to noise": ("cnr", "overall"),
            "mean IoU": ("miou", "overall"),
        },
    ),
    Table(
        name="systems",
        corner="zero-shot, mean AUROC of the five",
        columns={
            "ConVIRT": "zero-shot",
            "GLoRIA from ConVIRT": "zero-shot-gloria",
            "CheXzero": "zero-shot-chexzero",
        },
        rows={"mean of the five": _MEAN},
    ),
    Table(
        name="volumes",
        corner="zero-shot of chest CTs, mean AUROC",
        columns={
            "HLIP": "zero-shot-hlip",
            "CT-CLIP": "zero-shot-ct_clip",
            "COLIPRI": "zero-shot-colipri",
        },
        rows={"seven findings": ("auroc", "macro")},
    ),
    Table(
        name="vqa",
        corner="accuracy",
        columns={"M3AE": "vqa-m3ae-answers", "MedViLL": "vqa-medvill-answers"},
        rows={part: ("accuracy", part) for part in ("overall", "closed", "open")},
    ),
    Table(
        name="choices",
        corner="accuracy, four options",
        columns={
            "causal language model": "choice-results",
            "fusion-encoder": "choice-results-fusion",
        },
        rows={
            "with its image": ("accuracy", "overall"),
            "text only": ("accuracy", "overall", "control: text_only"),
            "another patient's image": ("accuracy", "overall", "control: image_swapped"),
            "asked in other words": ("accuracy", "overall", "control: question_reworded"),
        },
    ),
    Table(
        name="reports",
        corner="F1 of five findings",
        columns={"MedViLL": "reports"},
        rows={
            "greedy, against the truth": (*_F1, "against labels"),
            "beam search, against the truth": (*_F1, "beam search, against labels"),
            "consensus, against the truth": (*_F1, "consensus, against labels"),
            "the reference, against the truth": (*_F1, "reference, against labels"),
            "greedy, against the reference": _F1,
            "beam search, against the reference": (*_F1, "beam search"),
            "consensus, against the reference": (*_F1, "consensus"),
            "the report of another image, against the reference": (*_F1, "baseline: other images"),
            "one report for all images, against the reference": (*_F1, "baseline: one report"),
        },
    ),
    Table(
        name="dense",
        corner="on a frozen ConVIRT",
        columns={"detection": "detection-results", "segmentation": "segmentation-results"},
        rows={
            "mean AP, IoU 0.40 to 0.75": ("ap_rsna", "macro"),
            "Dice, images with a mask": ("dice_masked", "overall"),
        },
    ),
    Table(
        name="generation",
        corner="256 impressions of test patients",
        columns={"latent diffusion": "generation"},
        rows={
            "prompted findings, AUROC, mean of the five": (*_MEAN, "guidance 5"),
            **{
                f"prompted findings, AUROC, {finding}": ("auroc", finding, "guidance 5")
                for finding in FINDINGS
            },
            "the same at guidance 3, mean of the five": (*_MEAN, "guidance 3"),
            "the same at guidance 1, mean of the five": (*_MEAN, "guidance 1"),
            "real images of the prompts, mean of the five": (*_MEAN, "real"),
            "real images after the autoencoder, mean of the five": (*_MEAN, "reconstructed"),
            "shuffled prompts, mean of the five": (*_MEAN, "shuffled prompts"),
            "asserted against negated findings, AUROC": (
                "negation_auroc",
                "macro_competition",
                "guidance 5",
            ),
            "left against right, AUROC": ("side_auroc", "macro", "guidance 5"),
            "share too near to a training image, pixels": ("too_near", "pixels", "guidance 5"),
            "share too near to a training image, features": ("too_near", "features", "guidance 5"),
        },
    ),
    Table(
        name="generation-text",
        corner="text encoder of the generator",
        columns={
            "ConVIRT's, frozen": "generation",
            "ConVIRT's, trained on": "generation-text",
            "random, frozen": "generation-random",
        },
        rows={
            "prompted findings, AUROC, mean of the five": (*_MEAN, "guidance 5"),
            "the same at guidance 3": (*_MEAN, "guidance 3"),
            "asserted against negated findings, AUROC": (
                "negation_auroc",
                "macro_competition",
                "guidance 5",
            ),
            "left against right, AUROC": ("side_auroc", "macro", "guidance 5"),
        },
    ),
    Table(
        name="generation-use",
        corner="linear probe, mean AUROC of the five",
        columns={"973 real test images": "generation-use"},
        rows={
            f"{share} of the patients, {images}": (f"{metric}@{share}", "macro_competition", images)
            for share in ("1%", "10%", "100%")
            for metric, images in (
                ("use_auroc", "real"),
                ("use_auroc", "real and synthetic"),
                ("use_auroc_gain", "both minus real"),
            )
        }
        | {"synthetic images alone": ("use_auroc@0%", "macro_competition", "synthetic")},
    ),
    Table(
        name="generation-copies",
        corner="share too near to a training image",
        columns={"trained on 5,485 images": "generation", "on 46 images": "generation-few"},
        rows={
            name: ("too_near", name, "guidance 3")
            for name in ("pixels", "pixels, relative", "features", "features, relative")
        },
    ),
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "quickstart", help="folder of the results"
    )
    folder = parser.parse_args().folder
    for table in TABLES:
        columns = read_columns(table, folder)
        if columns:
            commits = commits_of(columns.values())
            print(f"{table.name}\n{render(table, columns)}\n\n{provenance(commits)}\n")


def commits_of(results: Iterable[Results]) -> list[str]:
    """Return the commits that evaluations have recorded."""
    return sorted({one.packages["medvl"].partition("+")[2] for one in results} - {""})


def read_columns(table: Table, folder: Path) -> dict[str, Results]:
    """Return the results of the columns that exist."""
    paths = {title: folder / name / "results.json" for title, name in table.columns.items()}
    return {title: read_results(path) for title, path in paths.items() if path.is_file()}


def render(table: Table, columns: Mapping[str, Results]) -> str:
    """Return the table as Markdown: value and 95 % interval of each cell."""
    head = f"| {table.corner} | {' | '.join(columns)} |"
    body = [
        f"| {title} | {' | '.join(cell(results, *row) for results in columns.values())} |"
        for title, row in table.rows.items()
    ]
    return "\n".join([head, "|" + "---|" * (len(columns) + 1), *body])


def cell(results: Results, metric: str, target: str, subgroup: str = "") -> str:
    """Return one number with its interval, where it has one; empty where the evaluation has no
    such row.
    """
    try:
        row: MetricRow = results.row(metric, target, subgroup)
    except EvaluationError:
        return ""
    if math.isnan(row.value):
        return "–"
    return (
        f"{row.value:.3f}"
        if math.isnan(row.low)
        else f"{row.value:.3f} [{row.low:.3f}, {row.high:.3f}]"
    )


def provenance(commits: Sequence[str]) -> str:
    """Return the commits of the evaluations, and the date and the processor of this call."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    machine = model.group(1) if model else platform.processor()
    return (
        f"Commits {', '.join(commits) or 'unknown'}, {datetime.date.today().isoformat()}, "
        f"{machine}."
    )


if __name__ == "__main__":
    main()
