"""`medvl eval class-retrieval`, and `medvl eval listed`, which writes down what it is made of."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medvl.cli.eval_common import default_folder, load_model, open_shards, print_report
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.eval.retrieval.candidate_lists import RetrievalList


def class_retrieval(
    checkpoint: Path,
    data: Path,
    *,
    listed: Path | None = None,
    ks: tuple[int, ...] = (5, 10, 50),
    out: Path | None = None,
    resamples: int = 1000,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Precision at k of the images, or texts, nearest to an image or a text: by their labels, or over a pinned list.

    Args:
        checkpoint: folder of a checkpoint of a dual-encoder.
        data: folder of shards with labels, of patients that the model was not trained on.
        listed: candidates and queries that `medvl eval listed` wrote down, such as CheXpert 8x200; default every image
            against those of all other patients.
        ks: how many of the nearest are looked at.
        out: gets results.json and index.html; default eval/class_retrieval or eval/image_retrieval in the run.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.data.shards.format import ShardSource
    from medvl.eval.core.results import format_table, write_results
    from medvl.eval.retrieval import by_class as protocols
    from medvl.eval.retrieval.by_class_page import write_class_retrieval_page
    from medvl.eval.retrieval.candidate_lists import RetrievalList
    from medvl.models import DualEncoder

    pinned = None if listed is None else RetrievalList.read(listed)
    model = load_model(checkpoint, device)
    if not isinstance(model, DualEncoder):
        raise ConfigError(f"{checkpoint} is a {model.name}, which compares nothing: name a dual-encoder")
    loader = open_shards(model, checkpoint, data, batch, workers)
    if pinned is not None:
        loader = _only(loader, pinned, model, batch, workers)
    if pinned is None:
        results = protocols.image_retrieval(model, loader, ks=ks, resamples=resamples, checkpoint=checkpoint)
    else:
        results = protocols.class_retrieval(model, loader, pinned, ks=ks, resamples=resamples, checkpoint=checkpoint)
    folder = out or default_folder(checkpoint, results.protocol)
    paths = write_results(results, folder)
    manifest = ShardSource(data).manifest
    page = write_class_retrieval_page(
        results,
        folder / "index.html",
        model=f"{model.name} ({checkpoint})",
        data=f"{manifest.corpus}, split {manifest.split}",
        date=datetime.date.today().isoformat(),
    )
    print_report(format_table(results.rows), [*paths, page])


def _only(loader: Any, pinned: "RetrievalList", model: Any, batch: int, workers: int) -> Any:
    """A loader over the images of the list alone: a folder may hold a hundred times as many."""
    from medvl.data.loading.loader import open_loader
    from medvl.data.loading.subset import Subset
    from medvl.data.transforms.text import WholeText

    source, wanted = loader.source, pinned.keys
    return open_loader(
        Subset(source, [position for position in range(len(source)) if source.key(position) in wanted]),
        batch=batch,
        image=model.transform,
        text=WholeText(),
        tokenizer=model.tokenizer,
        train=False,
        workers=workers,
    )


def listed(
    out: Path,
    *,
    data: Path | None = None,
    per_class: int = 200,
    classes: tuple[str, ...] = (),
    seed: int = 0,
    chexpert_8x200: Path | None = None,
    salt_file: Path | None = None,
) -> str:
    """Write down candidates and queries for class-retrieval: drawn once from shards, or as published.

    Args:
        out: the file.
        data: folder of shards to draw from: images that show one class alone, as in GLoRIA's 5x200.
        per_class: images of each class.
        classes: default the five of the CheXpert competition.
        seed: of the draw.
        chexpert_8x200: instead of drawing, the folder of ConVIRT's published lists (image-retrieval/ and
            text-retrieval/).
        salt_file: what the shards of CheXpert were hashed with; default $MEDVL_SALT_FILE or ~/.config/medvl/salt.
    """
    from medvl.data.privacy.deidentify import Deidentifier, default_salt_file
    from medvl.data.shards.format import ShardSource
    from medvl.eval.retrieval.candidate_lists import draw_list, read_chexpert_8x200
    from medvl.schema import COMPETITION_FINDINGS

    if (data is None) == (chexpert_8x200 is None):
        raise ConfigError("name --data to draw from, or --chexpert-8x200: one of them")
    if data is not None:
        made = draw_list(ShardSource(data), classes=classes or COMPETITION_FINDINGS, per_class=per_class, seed=seed)
    else:
        assert chexpert_8x200 is not None
        made = read_chexpert_8x200(chexpert_8x200, Deidentifier.from_file(salt_file or default_salt_file()))
    made.write(out)
    return (
        f"Wrote {out}: {made.name}, {len(made.candidates)} candidates, {len(made.image_queries)} image queries and "
        f"{len(made.text_queries)} text queries of {len(made.classes)} classes, sha256 {made.sha256[:12]}"
    )
