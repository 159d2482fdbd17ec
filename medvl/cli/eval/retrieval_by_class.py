"""`medvl eval class-retrieval` and `medvl eval make-retrieval-list`: retrieval of images by their labels."""

import functools
from pathlib import Path
from typing import Literal

from medvl.cli.eval.options import EvalOptions, open_evaluation, publish_result
from medvl.errors import ConfigError


def class_retrieval(shared: EvalOptions, *, candidates: Path | None = None, ks: tuple[int, ...] = (5, 10, 50)) -> None:
    """Evaluate precision at k of the images or texts nearest to a query, by labels or over a fixed candidate list.

    The checkpoint is a dual-encoder; the shards have labels. Default folders are eval/class_retrieval with a list and
    eval/image_retrieval without.

    Args:
        candidates: candidates and queries from `medvl eval make-retrieval-list`, such as CheXpert 8x200; default every
            image against the images of all other patients.
        ks: numbers of nearest candidates.
    """
    from medvl.data.loading.subset import Subset
    from medvl.eval.retrieval import by_class
    from medvl.eval.retrieval.by_class_page import write_class_retrieval_page
    from medvl.eval.retrieval.candidate_lists import RetrievalList
    from medvl.models import DualEncoder

    fixed = None if candidates is None else RetrievalList.read(candidates)
    output = shared.folder(shared.checkpoint, "image_retrieval" if fixed is None else "class_retrieval")
    model, source, read = open_evaluation(shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True)
    resamples, checkpoint = shared.resamples, shared.checkpoint
    if fixed is None:
        folder = output.settle(manifest=source.fingerprint)
        result = by_class.image_retrieval(model, read(source), ks=ks, resamples=resamples, checkpoint=checkpoint)
    else:  # a folder may hold a hundred times as many images as the list
        keys = fixed.keys
        listed = Subset(source, [position for position in range(len(source)) if source.key(position) in keys])
        folder = output.settle(manifest=listed.fingerprint)
        result = by_class.class_retrieval(model, read(listed), fixed, ks=ks, resamples=resamples, checkpoint=checkpoint)
    page = functools.partial(write_class_retrieval_page, result.results)
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared)


def make_retrieval_list(
    out: Path,
    *,
    data: Path | None = None,
    per_class: int = 200,
    classes: tuple[str, ...] = (),
    exclusive: Literal["all_labels", "classes"] = "all_labels",
    views: Literal["frontal", "all"] = "frontal",
    seed: int = 0,
    chexpert_8x200: Path | None = None,
    salt_file: Path | None = None,
) -> str:
    """Write candidates and queries for class-retrieval: sampled once from shards, or as published.

    Args:
        out: file of the list.
        data: folder of shards to sample from: images that show exactly one class. The defaults are the rule of GLoRIA's
            5x200, whose own draw its authors did not list.
        per_class: images per class.
        classes: class names; default the five of the CheXpert competition.
        exclusive: labels of which an image has no other, positive or uncertain: all of the shards except No Finding,
            or the classes.
        views: frontal views (and images without a view), or all.
        seed: seed of the sampling.
        chexpert_8x200: folder of ConVIRT's published lists (image-retrieval/ and text-retrieval/), instead of --data.
        salt_file: salt file of the CheXpert shards; default $MEDVL_SALT_FILE or ~/.config/medvl/salt.
    """
    from medvl.data.privacy.deidentify import Deidentifier, default_salt_file
    from medvl.eval.core.open import open_source
    from medvl.eval.retrieval.candidate_lists import read_chexpert_8x200, sample_list
    from medvl.schema import COMPETITION_FINDINGS

    if data is not None and chexpert_8x200 is None:
        chosen = sample_list(
            open_source(data),
            classes=classes or COMPETITION_FINDINGS,
            per_class=per_class,
            seed=seed,
            exclusive=exclusive,
            views=views,
        )
    elif chexpert_8x200 is not None and data is None:
        chosen = read_chexpert_8x200(chexpert_8x200, Deidentifier.from_file(salt_file or default_salt_file()))
    else:
        raise ConfigError("expected --data to sample from or --chexpert-8x200; give exactly one", "conflict",
                          field="data")  # fmt: skip
    chosen.write(out)
    return (
        f"Wrote {out}: {chosen.name}, {len(chosen.candidates)} candidates, {len(chosen.image_queries)} image queries "
        f"and {len(chosen.text_queries)} text queries of {len(chosen.classes)} classes, sha256 {chosen.sha256[:12]}"
    )
