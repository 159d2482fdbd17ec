"""`medvl phantom`: the phantom world in the layouts of the real corpora. Each command returns
the text to print.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medvl.cli.shards import commands, corpora
from medvl.common.files import write_atomic
from medvl.data.convert.options import ShardOptions, ShardRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhantomOptions:
    """Size and seed of the corpus."""

    patients: int = 400
    """number of patients; each has one or more images, on average 2.3 of frontal images, 0.7 in
    SIIM, 2.5 in VQA
    """
    size: int = 512
    """height and width of the images in pixels; the longer side in VQA corpora"""
    seed: int = 0
    """seed of the world; corpora with the same seed have the same patients, so evaluate on
    another seed
    """
    workers: int | None = None
    """processes; default one per core"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewsOptions(PhantomOptions):
    """Size and seed of a corpus with lateral views."""

    frontal_only: bool = False
    """leave out lateral views, which saves time; the frontal ones are the same"""
    site: int = 0
    """hospital whose devices took the images, 1, 2, ...; patients and reports are the same. 0:
    no shift
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class QataOptions(PhantomOptions):
    """Size and seed of the stand-in of QaTa-COV19."""

    distractors: int = 0
    """most opacities of an image that look like infected areas and are neither in the mask nor
    in the text
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class VolumeOptions:
    """Size and seed of the chest CTs."""

    patients: int = 40
    """number of patients"""
    shape: tuple[int, int, int] = (32, 64, 64)
    """voxels along (z, y, x) of a field of 30 x 36 x 36 cm"""
    seed: int = 0
    """seed of the population; evaluate on another one"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReconstructionOptions(VolumeOptions):
    """Size and seed of the chest CTs, several for each scan."""

    reconstructions: int = 2
    """volumes of a scan, which share its report"""
    organ_masks: bool = False
    """write the organs of each volume to organ_masks/, with the numbers of TotalSegmentator 2"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeriesOptions(ReconstructionOptions):
    """Size and seed of the chest CTs, and their files."""

    reconstructions: int = 1
    """volumes of a scan, which share its report"""
    dicom: bool = False
    """write DICOM series beside the NIfTI files"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOptions(PhantomOptions):
    """Size and seed of the corpus, and the wordings of its questions."""

    forms: int = 1
    """wordings of each question, 1 to 6; images, options and answers are the same"""


def _command(
    layout: str,
    summary: str,
    following: str,
    *,
    out: str = "output folder",
    kind: type[PhantomOptions | VolumeOptions] = PhantomOptions,
    **options: int,
) -> Callable[..., str]:
    """Return the command that writes one layout.

    Args:
        layout: suffix of the function of `medvl.phantom`.
        summary: the corpus, for the help.
        following: the next command to print; {out} is replaced by the output folder.
        out: help of the output folder.
        kind: the options.
        options: default options.
    """
    make: Any = kind
    defaults = make(**options)
    note = (
        "; each patient is an article with one or more figures"
        if layout in ("roco", "medicat")
        else ""
    )

    def write(out: Path, options: PhantomOptions | VolumeOptions = defaults) -> str:
        from medvl import phantom

        getattr(phantom, f"write_{layout}")(out, **dataclasses.asdict(options))
        return f"Wrote {out}. Next: {following.format(out=out)}"

    write.__name__ = layout
    write.__annotations__["options"] = kind
    write.__doc__ = f"""Write the phantom world as {summary}.

    Args:
        out: {out}.
        options: size and seed of the corpus{note}.
    """
    return write


def umls(out: Path) -> str:
    """Write the phantom's ontology as a UMLS release: names, relations, semantic types.

    Args:
        out: output folder of META/.
    """
    from medvl import phantom

    phantom.write_umls(out)
    return f"Wrote {out}. Next: medvl knowledge build --umls {out} --out {out}-graph"


def contact_sheet(out: Path, *, seed: int = 0) -> str:
    """Draw a sheet with every finding at every severity.

    Args:
        out: PNG file.
        seed: seed of the world.
    """
    from medvl import phantom

    phantom.contact_sheet(phantom.World(seed=seed), out)
    return f"Wrote {out}"


def example(out: Path, *, size: int = 512) -> str:
    """Draw one radiograph, and print the impression of its report.

    Args:
        out: PNG, JPEG or DICOM file, by its suffix.
        size: longer side in pixels.
    """
    from medvl import phantom

    impression = phantom.write_example(out, size=size)
    return f"Wrote {out}. Its report: {impression}"


def _shards(corpus: str, arguments: str = "") -> str:
    return f"medvl shards {corpus} --root {{out}}{arguments} --out {{out}}-shards"


_OWN_VOLUMES = (
    "medvl shards volumes --table {out}/volumes.csv --image-column path --patient-column patient "
    "--study-column study --text-column findings impression --out {out}-shards"
)
_FIGURES = "figures of case reports with captions and references to them"
_VQA_RAD = "VQA-RAD: radiographs, CT and MR slices, and questions that need the image"
_CHEXPERT = "python scripts/zeroshot_chexpert.py --checkpoint RUN --root {out}/CheXpert-v1.0-small"
_JPG = "MIMIC-CXR-JPG 2.0.0, with the reports beside the images"

COMMANDS: dict[str, Callable[..., str]] = {
    "mimic-cxr": _command(
        "mimic_cxr",
        "MIMIC-CXR 2.0.0: DICOM files, reports and tables",
        _shards("mimic-cxr"),
        kind=ViewsOptions,
    ),
    "mimic-cxr-jpg": _command("mimic_cxr_jpg", _JPG, _shards("mimic-cxr"), kind=ViewsOptions),
    "ms-cxr": _command(
        "ms_cxr",
        "MS-CXR: phrases with boxes, images beside the table",
        _shards("ms-cxr"),
        patients=100,
        seed=30,
    ),
    "ms-cxr-t": _command(
        "ms_cxr_t",
        "MS-CXR-T: pairs of images and how findings changed, images beside the table",
        _shards("ms-cxr-t"),
        patients=200,
        seed=33,
    ),
    "chest-imagenome": _command(
        "chest_imagenome",
        "Chest ImaGenome: scene graphs of regions, images and tables of MIMIC-CXR beside them",
        _shards("chest-imagenome"),
        patients=100,
    ),
    "chexpert": _command(
        "chexpert",
        "CheXpert-v1.0-small",
        _CHEXPERT,
        out="folder for CheXpert-v1.0-small/",
        size=320,
        seed=1,
    ),
    "chexpert-plus": _command(
        "chexpert_plus",
        "CheXpert Plus: a table of reports, labels in JSON and PNG files",
        _shards("chexpert-plus"),
        size=320,
        seed=1,
    ),
    "rexgradient": _command(
        "rexgradient",
        "ReXGradient-160K: metadata in JSON and PNG files",
        _shards("rexgradient"),
        seed=47,
    ),
    "rexvqa": _command(
        "rexvqa",
        "ReXVQA: questions with four options, and the images and metadata of ReXGradient",
        _shards("rexvqa"),
        kind=ChoiceOptions,
        seed=47,
    ),
    "pmc-vqa": _command(
        "pmc_vqa", "PMC-VQA: figures with questions of four options", _shards("pmc-vqa"), seed=49
    ),
    "mimic-cxr-vqa": _command(
        "mimic_cxr_vqa",
        "MIMIC-CXR-VQA: questions with lists of answers, and the images of MIMIC-CXR-JPG",
        _shards("mimic-cxr-vqa"),
    ),
    "cxr-qba": _command(
        "cxr_qba",
        "MIMIC-Ext-CXR-QBA: questions with structured answers, and MIMIC-CXR-JPG's images",
        _shards("cxr-qba"),
    ),
    "diff-vqa": _command(
        "diff_vqa",
        "Medical-Diff-VQA: questions about pairs of dates, and MIMIC-CXR-JPG's images",
        _shards("diff-vqa"),
    ),
    "gemex": _command(
        "gemex",
        "GEMeX: questions whose answers have boxes, and MIMIC-CXR-JPG's images",
        _shards("gemex"),
    ),
    "brax": _command("brax", "BRAX: PNG files and a table of labels", _shards("brax"), seed=48),
    "rsna": _command(
        "rsna",
        "the RSNA pneumonia challenge: images with boxes of opacities",
        _shards("rsna"),
        size=1024,
        seed=40,
    ),
    "siim": _command(
        "siim",
        "the SIIM-ACR pneumothorax challenge: images with masks",
        _shards("siim"),
        size=1024,
        seed=41,
    ),
    "qata": _command(
        "qata",
        "QaTa-COV19 in LViT's layout: images, masks, and texts that name their places",
        _shards("qata"),
        kind=QataOptions,
        size=224,
        seed=46,
    ),
    "vindr-cxr": _command(
        "vindr_cxr",
        "VinDr-CXR: DICOM files with labels and boxes of three readers",
        _shards("vindr-cxr"),
        size=1024,
        seed=42,
    ),
    "chestxdet10": _command(
        "chestxdet10",
        "ChestX-Det10: images with boxes of findings in JSON",
        _shards("chestxdet10"),
        size=1024,
        seed=44,
    ),
    "chestxdet": _command(
        "chestxdet",
        "ChestX-Det: images with boxes and outlines of findings in JSON",
        _shards("chestxdet"),
        size=1024,
        seed=44,
    ),
    "vindr-pcxr": _command(
        "vindr_pcxr",
        "VinDr-PCXR: DICOM files of children with labels and boxes",
        _shards("vindr-pcxr"),
        size=1024,
        seed=49,
    ),
    "vindr-mammo": _command(
        "vindr_mammo",
        "VinDr-Mammo: mammograms in DICOM files with boxes, BI-RADS and density",
        _shards("vindr-mammo"),
        patients=100,
        seed=52,
    ),
    "embed-mammo": _command(
        "embed_mammo",
        "EMBED: mammograms in DICOM files, tables of images and of findings of breasts",
        _shards("embed-mammo"),
        patients=100,
        seed=53,
    ),
    "object-cxr": _command(
        "object_cxr",
        "Object-CXR: images with shapes of foreign objects",
        _shards("object-cxr"),
        size=1024,
        seed=45,
    ),
    "openi": _command(
        "openi", "Open-i: PNG files, XML reports and MeSH terms", _shards("openi"), seed=46
    ),
    "padchest": _command(
        "padchest", "PadChest: 16-bit PNG files and a table", _shards("padchest"), seed=43
    ),
    "padchest-gr": _command(
        "padchest_gr",
        "PadChest-GR: reports with boxes for sentences, 16-bit PNG files and prior images",
        _shards("padchest-gr"),
        patients=100,
        seed=43,
    ),
    "candid-ptx": _command(
        "candid_ptx",
        "CANDID-PTX: images with reports, and masks in three tables",
        _shards("candid-ptx"),
        seed=50,
    ),
    "bimcv-covid19": _command(
        "bimcv_covid19",
        "BIMCV-COVID19+: 16-bit PNG files and reports in Spanish, with translations",
        _shards("bimcv-covid19"),
        seed=51,
    ),
    "roco": _command(
        "roco",
        f"ROCO: {_FIGURES}",
        _shards("roco", " --references {out}/roco_references"),
        out="output folder of data/ and roco_references/",
        seed=10,
    ),
    "medicat": _command(
        "medicat",
        f"MedICaT: {_FIGURES}",
        _shards("medicat", " --radiology-only"),
        out="output folder of the table of figures and figures/",
        seed=11,
    ),
    "vqa-rad": _command(
        "vqa_rad",
        _VQA_RAD,
        _shards("vqa-rad"),
        out="output folder of trainset.json, testset.json and images/",
        seed=20,
    ),
    "slake": _command(
        "slake",
        "SLAKE, with English questions",
        _shards("slake"),
        out="output folder of train.json, validate.json, test.json and imgs/",
        seed=21,
    ),
    "ct-rate": _command(
        "ct_rate",
        "CT-RATE: chest CTs of both releases with their tables",
        _shards("ct-rate"),
        kind=ReconstructionOptions,
    ),
    "rad-chestct": _command(
        "rad_chestct",
        "RAD-ChestCT: chest CTs as NumPy archives, and labels by place",
        _shards("rad-chestct"),
        kind=VolumeOptions,
    ),
    "merlin": _command(
        "merlin",
        "Merlin: CTs as NIfTI files, findings and labels",
        _shards("merlin"),
        kind=VolumeOptions,
    ),
    "inspect": _command(
        "inspect",
        "INSPECT: CTs as NIfTI files, impressions and labels",
        _shards("inspect"),
        kind=VolumeOptions,
    ),
    "volumes": _command(
        "volumes",
        "a folder of chest CTs with a table of reports and labels",
        _OWN_VOLUMES,
        kind=SeriesOptions,
    ),
    "umls": umls,
    "contact-sheet": contact_sheet,
    "example": example,
}


# `medvl phantom quickstart`: the synthetic data of the recipes' presets `tiny`.

_DEFAULTS = ViewsOptions(patients=2800, size=256, frontal_only=True)


def quickstart(out: Path = Path("quickstart"), options: ViewsOptions = _DEFAULTS) -> str:
    """Write the phantom MIMIC-CXR of the presets tiny as DICOM, its shards and a vocabulary: about
    two minutes.

    Steps that are done are not repeated.

    Args:
        out: output folder; the presets read quickstart/ in the working directory.
        options: size and seed of the corpus; fewer patients for a trial of the software.
    """
    from medvl.data.corpora.reports.mimic_cxr import MimicCXR

    out.mkdir(parents=True, exist_ok=True)
    salt = out / "salt"
    # phantom data are not confidential; a fixed salt gives the same order everywhere
    if not salt.exists():
        write_atomic(salt, f"{0:064d}\n", permissions=0o600)
    corpus = out / "mimic-cxr"
    of_shards = out / "shards"
    write = COMMANDS["mimic-cxr"]
    write(corpus, options)
    run = ShardRun(out=of_shards, salt_file=salt, workers=options.workers)
    shared = corpora.ConversionOptions(run=run, options=ShardOptions(short_side=160))
    made = [
        corpora.convert_corpus(MimicCXR(root=corpus, views=("PA", "AP")), shared),
        commands.vocab(of_shards / "train", out / "vocab", size=4000),
    ]
    return "\n".join([*made, "Next: medvl train convirt tiny"])


FAMILY: dict[str, Callable[..., str]] = {"quickstart": quickstart, **COMMANDS}
"""Name after `medvl phantom` -> function."""
