"""`medvl shards webdataset`: convert tars of other projects to shards."""

import shutil
from typing import Annotated

import tyro

from medvl.cli.shards.corpora import ConversionOptions, Flat, convert, split_fractions
from medvl.data.storage.webdataset_tars import TarFields


def webdataset(
    tars: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TAR ...")],
    shared: Flat[ConversionOptions],
    fields: Flat[TarFields],
    *,
    name: str = "webdataset",
    group: str | None = None,
    splits: tuple[str, ...] = ("train=0.98", "validate=0.01", "test=0.01"),
) -> str:
    """Convert webdataset tars without a manifest (PMC-OA, BIOMEDICA, open_clip's): .jpg .txt .json of each sample.

    The images are unpacked into the private folder first, and removed from it at the end.

    Args:
        tars: paths or addresses of the tars, with webdataset's braces: 'pmc/{00000..00042}.tar'.
        shared: output, resources and storage format.
        fields: names of the members.
        name: name of the corpus.
        group: member or field of the JSON that names the patient or article, such as json:pmcid. Splits are disjoint by
            it; without it, each sample is a group of its own, and shared patients or articles cannot be noticed.
        splits: fractions of the splits.
    """
    from medvl.data.convert.private_folder import PrivateFolder
    from medvl.data.corpora import webdataset_tars as corpus

    deid = shared.deidentifier()
    unpacked = PrivateFolder(shared.run.local_out).create() / "images"
    plan = corpus.plan(tars, deid, unpacked, name=name, fields=fields, group=group, fractions=split_fractions(splits))
    lines = [convert(plan, deid, shared)]
    shutil.rmtree(unpacked)
    if group is None:
        lines.append(
            "No --group was given: patients or articles shared by splits, or with other shards, are not noticed."
        )
    return "\n".join(lines)
