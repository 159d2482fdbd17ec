"""Texts of the command line's help: the overview, the lists of the families, and examples."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import tyro

from medvl.common.registry import Registry
from medvl.errors import ConfigError

WIDTH = 100

OVERVIEW = """\
usage: medvl [--version] COMMAND [--quiet | --verbose] [OPTIONS]

Get data
  phantom, cards            make synthetic corpora (medvl phantom quickstart); terms of real ones
  shards                    convert a corpus, or your own table of images and reports
  verify, merge, upload     check shards, join parts of a conversion, copy to an object store
  vocab, regions            train a vocabulary; store region features beside shards
  knowledge, fit-pixelhop   build a knowledge graph; fit an encoder without gradients
Train
  recipes, train, doctor    list recipes; train one (medvl train convirt tiny); find a bottleneck
Evaluate
  eval                      evaluate a checkpoint: zero-shot, retrieval, probe, grounding, ...
  compare, benchmark        put evaluations side by side; run all systems on all tasks
Use a model
  infer, serve, generate    score images against texts, open a page in the browser, draw images
  embed                     write the embeddings of images to a Parquet file
Exchange checkpoints
  import, export            read published checkpoints; write open_clip, Hugging Face or ONNX
  consolidate, interpolate  join a checkpoint in parts; average two checkpoints
Look inside
  list, completion          list models, encoders and prompts; complete words in bash and zsh

`medvl COMMAND --help` lists options with an example; `medvl train RECIPE --help`, settings."""

GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phantom": {
        "Start here": ("quickstart",),
        "Reports and captions": (
            "mimic-cxr",
            "mimic-cxr-jpg",
            "openi",
            "padchest",
            "chexpert-plus",
            "rexgradient",
            "padchest-gr",
            "candid-ptx",
            "bimcv-covid19",
            "roco",
            "medicat",
        ),
        "Labels, boxes and masks": (
            "chest-imagenome",
            *("chexpert", "brax", "rsna", "siim", "qata", "vindr-cxr", "vindr-pcxr"),
            *("chestxdet10", "chestxdet", "object-cxr", "vindr-mammo", "embed-mammo"),
            *("ms-cxr", "ms-cxr-t"),
        ),
        "Questions": (
            "vqa-rad",
            "slake",
            "rexvqa",
            "pmc-vqa",
            "mimic-cxr-vqa",
            "cxr-qba",
            "diff-vqa",
            "gemex",
        ),
        "Volumes": ("ct-rate", "rad-chestct", "merlin", "inspect", "volumes"),
        "Knowledge and pictures": ("umls", "contact-sheet", "example"),
    },
    "shards": {
        "Reports and captions": (
            *("mimic-cxr", "chexpert-plus", "rexgradient", "openi", "padchest", "padchest-gr"),
            *("candid-ptx", "bimcv-covid19", "roco", "medicat", "melinda"),
            *("r2gen-annotation", "medvill-jsonl", "m3ae-arrow"),
        ),
        "Labels": ("chexpert", "nih-cxr14", "covidx", "brax", "odir"),
        "Boxes and masks": (
            *("ms-cxr", "ms-cxr-t", "rsna", "siim", "vindr-cxr", "vindr-pcxr", "chestxdet10"),
            *("chestxdet", "object-cxr", "chest-imagenome", "qata", "mosmed", "monuseg"),
            *("vindr-mammo", "embed-mammo"),
        ),
        "Questions": (
            *("vqa-rad", "slake", "vqa-med", "path-vqa", "rexvqa", "pmc-vqa", "mimic-cxr-vqa"),
            *("cxr-qba", "diff-vqa", "gemex"),
        ),
        "Volumes": ("ct-rate", "rad-chestct", "merlin", "inspect", "volumes"),
        "Text and knowledge": ("text", "concepts"),
        "Your own data and the hub": ("table", "parquet", "webdataset", "generated"),
    },
    "eval": {
        "Findings": ("zero-shot", "classify", "probe", "neighbours", "robustness", "calibrate"),
        "Before and after training": ("before-after",),
        "Retrieval and matching": (
            *("retrieval", "class-retrieval", "make-retrieval-list", "matching"),
        ),
        "Places": ("grounding", "volume-grounding", "detection", "segmentation", "zero-shot-masks"),
        "Reports, questions and change": (
            *("report-generation", "vqa", "multiple-choice", "change"),
        ),
        "Text and generated images": (
            *("text", "text-retrieval", "masked-prediction", "generation"),
        ),
    },
    "knowledge": {
        "Graphs": ("build", "train", "find"),
        "Statements of reports": ("radgraph", "statements"),
    },
    "recipes": {"Recipes": ("list", "copy", "numbers")},
    "cards": {"Data cards": ("list", "show")},
}
"""Family -> title -> its commands. Commands of other packages are listed last."""

_EXAMPLES: Mapping[str, str] = {
    "phantom quickstart": "--out quickstart",
    "phantom umls": "--out umls",
    "phantom contact-sheet": "--out sheet.png",
    "phantom example": "--out chest.png",
    "shards mimic-cxr": "--root MIMIC-CXR --views PA AP --out shards/mimic-cxr",
    "shards chexpert-plus": "--root CheXpert-Plus --exclude 5x200.csv --out shards/chexpert-plus",
    "shards rexgradient": "--root ReXGradient-160K --views PA AP --out shards/rexgradient",
    "shards padchest-gr": "--root PadChest-GR --language english --out shards/padchest-gr",
    "shards ct-rate": "--root CT-RATE --size 112 336 336 --spacing 3 1 1 --out shards/ct-rate",
    "shards volumes": "--table volumes.csv --image-column path --patient-column patient "
    "--text-column report --out shards/ct",
    "shards chest-imagenome": "--root Chest-ImaGenome --images MIMIC-CXR-JPG "
    "--without shards/ms-cxr/test --out shards/chest-imagenome",
    "shards roco": "--root ROCO --references roco_references --out shards/roco",
    "shards medicat": "--root MedICaT --radiology-only --out shards/medicat",
    "shards odir": "--root ODIR-5K --short-side 224 --out shards/odir",
    "shards openi": "--root Open-i --views PA --out shards/openi",
    "shards slake": "--root SLAKE --language en --out shards/slake",
    "shards medvill-jsonl": "--root openi --source openi --out shards/medvill",
    "shards text": "--sources pubmed --name pubmed --out shards/pubmed",
    "shards concepts": "--knowledge graph --out shards/concepts",
    "shards table": "--table rows.csv --image-column path --patient-column patient "
    "--text-column report --out shards/ours",
    "shards parquet": "--files 'hf://datasets/OWNER/NAME/data/*.parquet' --text-column caption "
    "--rows-are-patients --out shards/figures",
    "shards webdataset": "--tars 'pmc_oa/{000..099}.tar' --name pmc-oa --out shards/pmc-oa",
    "shards generated": "--root generated --out shards/generated",
    "eval calibrate": "--checkpoint runs/convirt/best --data shards/chexpert/valid",
    "eval before-after": "--start start --trained runs/ours --data shards/ours/test",
    "eval class-retrieval": "--checkpoint runs/convirt/best --data lists/8x200 "
    "--candidates lists/8x200.csv",
    "eval make-retrieval-list": "--data shards/mimic-cxr/test --out lists/mimic-cxr",
    "eval text-retrieval": "--encoder minilm --pretrained --data shards/mimic-cxr/test "
    "--out eval/minilm",
    "eval text": "--checkpoint runs/pubmedbert/best --data blurb --task all",
    "eval probe": "--checkpoint runs/convirt/best --train shards/rsna/train "
    "--valid shards/rsna/validate --test shards/rsna/test",
    "eval neighbours": "--checkpoint runs/convirt/best --train shards/rsna/train "
    "--valid shards/rsna/validate --test shards/rsna/test",
    "eval generation": "--generated generated --train shards/mimic-cxr/train "
    "--test shards/mimic-cxr/test --classifier runs/convirt/best --out runs/generation",
    "eval robustness": "--checkpoint runs/convirt/best --data shards/mimic-cxr/test",
    "knowledge build": "--umls UMLS --out graph",
    "knowledge train": "--knowledge graph",
    "knowledge find": "--knowledge graph --text 'No pleural effusion.'",
    "knowledge radgraph": "--file radgraph.json --out statements.jsonl",
    "knowledge statements": "--file statements.jsonl --out hashed.jsonl",
    "recipes list": "--match gloria",
    "recipes copy": "convirt mine.py",
    "recipes numbers": "convirt",
    "cards list": "",
    "cards show": "mimic-cxr",
    "merge": "shards/mimic-cxr parts/1 parts/2",
    "upload": "shards/mimic-cxr s3://hospital/shards/mimic-cxr",
    "vocab": "--data shards/mimic-cxr/train --out vocab",
    "fit-pixelhop": "--data shards/openi/train --out pixelhop",
    "verify": "shards/mimic-cxr --against shards/chexpert",
    "regions": "--data shards/mimic-cxr --detector grid:resnet50 --weights published",
    "infer": "scan.dcm --checkpoint runs/convirt --texts 'pleural effusion' edema",
    "embed": "--checkpoint runs/convirt --data shards/mimic-cxr --out mimic-cxr.parquet",
    "generate": "--checkpoint runs/roentgen --prompt 'Left pleural effusion.' --out generated",
    "compare": "runs/convirt runs/gloria --out comparison",
    "benchmark": "mine.toml --out benchmark --dry-run",
    "serve": "--checkpoint runs/convirt --port 8080",
    "import": "gloria chexpert_resnet50.ckpt --out checkpoints/gloria",
    "export": "--checkpoint runs/convirt/best --to huggingface",
    "consolidate": "--checkpoint runs/convirt --out exported/convirt",
    "interpolate": "checkpoints/siglip runs/siglip/best --share 0.5 --out checkpoints/between",
    "list": "prompts --match 'chexpert*'",
    "completion": "bash > ~/.local/share/bash-completion/completions/medvl",
    "train": "convirt tiny --optim.lr 3e-4",
    "doctor": "convirt tiny --seconds 5",
}
"""Command -> arguments of its example, where `example` has no rule for it."""

_RULES: Mapping[str, str] = {
    "phantom": "--out phantom/{name} --patients 100",
    "shards": "--root {name} --out shards/{name}",
    "eval": "--checkpoint runs/convirt/best --data shards/mimic-cxr/test",
}
"""Family -> arguments of the examples of its commands."""


def example(name: str) -> str:
    """Return the example of a command, such as `shards rsna`; empty for an unknown family."""
    family, _, command = name.partition(" ")
    arguments = _EXAMPLES.get(name, _RULES.get(family, "").format(name=command))
    return f"medvl {name} {arguments}".strip() if name in _EXAMPLES or family in _RULES else ""


def describe(name: str, function: Callable[..., Any]) -> str:
    """Return the text above the options of a command: its docstring without the arguments, and
    its example.
    """
    text = re.split(r"\n(?:Args|Returns|Raises)\b.*", inspect.getdoc(function) or "")[0].strip()
    return "\n\n".join(
        filter(None, [text, f"Example: {shown}" if (shown := example(name)) else ""])
    )


def family_help(family: str, commands: Mapping[str, Callable[..., Any]]) -> str:
    """Return the list of a family's commands, by the groups of `GROUPS`."""
    groups = {title: list(names) for title, names in GROUPS.get(family, {}).items()}
    known = {name for names in groups.values() for name in names}
    others = [name for name in commands if name not in known]
    if others:
        groups["Others"] = others
    lines = [f"usage: medvl {family} COMMAND [--quiet | --verbose] [OPTIONS]"]
    width = max(map(len, commands))
    for title, names in groups.items():
        lines += ["", title]
        for name in filter(commands.__contains__, names):
            lines += textwrap.wrap(
                f"{name:{width}}  {summary(commands[name])}",
                width=WIDTH,
                initial_indent="  ",
                subsequent_indent=" " * (width + 4),
            )
    return "\n".join([*lines, "", f"Options and an example: medvl {family} COMMAND --help"])


def summary(function: Callable[..., Any]) -> str:
    """Return the first sentence of a function's docstring."""
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


# Families of commands that are made from classes: `medvl shards` and `medvl eval`.

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
"""A dataclass whose fields become options without a prefix: --out, not --run.out."""


class ClassCommands(Mapping[str, Callable[..., Any]]):
    """Name of a command -> its function, made from the class of this name on first use.

    The function of a class whose package cannot be imported raises the error.

    Args:
        registry: the classes.
        command: function that returns the function of a class by its name.
        others: commands without a class.
    """

    def __init__(
        self,
        registry: Registry[Any],
        command: Callable[[str], Callable[..., Any]],
        others: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._registry = registry
        self._command = command
        self._others = dict(others or {})

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of a command. Raises ConfigError where its package does not load."""
        return self._others[name] if name in self._others else self._command(name)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self:
            raise KeyError(name)
        try:
            return self.function(name)
        except ConfigError:
            return self.summaries()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._others or name in self._registry.names()

    def __iter__(self) -> Iterator[str]:
        yield from self._registry.names()
        yield from self._others

    def __len__(self) -> int:
        return len(self._registry.names()) + len(self._others)

    def is_own(self, name: str) -> bool:
        """Return whether a command is medvl's own, and not that of another package."""
        return name in self._registry.modules or name in self._others

    def summaries(self) -> dict[str, Callable[..., Any]]:
        """Return functions whose docstrings are the summaries, for lists. Imports no class."""
        return {name: self._summary(name) for name in self._registry.names()} | self._others

    def _summary(self, name: str) -> Callable[..., Any]:
        def command() -> Any:
            return self._command(name)()

        command.__doc__ = self._registry.summary(name)
        return command
