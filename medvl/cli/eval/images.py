"""`medvl eval` commands on image regions and pairs: detection, segmentation, grounding, change,
retrieval, matching.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.cli.eval.options import EvalOptions, SmallBatchOptions, open_evaluation, publish_result
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.results import WritePage
    from medvl.eval.retrieval.image_text import RetrievalResult


# `medvl eval detection` and `medvl eval segmentation`: dense prediction of findings.

_TEXTS = {"none": "no text", "others": "texts of other images"}
_ADVICE = "train a {} on its image encoder with recipes/dense_transfer.py --init-from {} --task {}"


def detection(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    convention: Literal["medvl", "coco", "voc2007", "voc2012"] = "medvl",
    examples: int = 6,
) -> None:
    """Evaluate detection of findings: average precision over all images, those without boxes
    included.

    The checkpoint is a detector (recipes/dense_transfer.py); the shards have boxes (rsna,
    vindr-cxr, chestxdet10, ...).

    Args:
        valid: folder of shards of other patients, on which the score threshold is chosen; without
            it, no challenge score.
        convention: convention of average precision: medvl treats equal scores as one step; coco and
            voc order them, and voc adds a pixel to widths and has its own matching and recalls.
        examples: images with boxes on the page, and as many without.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.detection import box_detection
    from medvl.eval.dense.pages import write_detection_page
    from medvl.models import Detector

    checkpoint = shared.checkpoint
    output = shared.folder(checkpoint, "detection")
    model, source, read = open_evaluation(
        shared, Detector, _ADVICE.format("detector", checkpoint, "detection")
    )
    folder = output.settle(manifest=source.fingerprint)
    valid_loader = None if valid is None else read(open_source(valid, [checkpoint]))
    result = box_detection(
        model,
        read(source),
        valid_loader=valid_loader,
        convention=convention,
        resamples=shared.resamples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_detection_page, result, pixels=source.pixels, examples=examples)
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared
    )


def segmentation(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    empty: Literal["one_if_both_empty", "skip_empty", "lvit"] = "one_if_both_empty",
    side: int | None = None,
    other_texts: tuple[Literal["none", "others"], ...] = ("none", "others"),
    examples: int = 6,
) -> None:
    """Evaluate segmentation of findings: Dice over all images, with a named rule for empty masks.

    The checkpoint is a segmenter (recipes/dense_transfer.py) or LViT (recipes/lvit_qata.py); the
    shards have masks (siim, qata, ...) or boxes (rsna).

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it they
            are fixed.
        empty: score of an image without a mask: 1 if the prediction is empty too, else 0; or none,
            such images being left out; or smoothed as in LViT's code.
        side: longer side of the images in which masks are compared; default: the published size.
        other_texts: texts to compare with, for a model that reads text: none, or those of other
            images.
        examples: images with a mask on the page, and as many without.
    """
    from medvl.data.loading.sources import OtherTexts
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.pages import write_segmentation_page
    from medvl.eval.dense.segmentation import mask_segmentation
    from medvl.models import MaskModel

    checkpoint = shared.checkpoint
    advice = _ADVICE.format("segmenter", checkpoint, "segmentation")
    kind: type[MaskModel] = MaskModel
    output = shared.folder(checkpoint, "segmentation")
    model, source, read = open_evaluation(shared, kind, advice, text=True)
    folder = output.settle(manifest=source.fingerprint)
    compared = other_texts if model.tokenizer is not None else ()
    result = mask_segmentation(
        model,
        read(source),
        other_texts={_TEXTS[name]: read(OtherTexts(source, name)) for name in compared},
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        empty=empty,
        side=side,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_segmentation_page, result, pixels=source.pixels)
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared
    )


# `medvl eval grounding`: phrase grounding by a dual-encoder.


def grounding(
    shared: SmallBatchOptions,
    *,
    protocol: Literal["medvl", "biovil", "maco"] = "medvl",
    maps: Literal["attention", "similarity"] | None = None,
    unseen: Literal["background", "drop"] | None = None,
    scale: Literal["unit", "signed", "none"] | None = None,
    smoothing: float | None = None,
    examples: int = 4,
) -> None:
    """Evaluate phrase grounding: contrast-to-noise ratio, pointing game and overlap with the boxes
    of each phrase.

    The checkpoint is a dual-encoder; the shards have phrases (ms-cxr) or boxes (rsna, vindr-cxr,
    chestxdet10, ...).

    Args:
        protocol: settings by name. biovil: similarity smoothed by 1.5 cells, thresholds on the
            cosines, removed pixels left out, absolute contrast; maco: the same with maps scaled to
            -1..1 and signed contrast; medvl: the defaults of the next four, which only it can be
            combined with.
        maps: attention of words to regions, or similarity of the phrase with patches; default: the
            model's own.
        unseen: pixels that the center crop removed: background (a finding there counts as missed;
            default), or left out.
        scale: range to which each map is scaled before thresholds: 0..1 (default), -1..1, or none.
        smoothing: Gaussian smoothing of similarity maps, in cells of the grid; default none.
        examples: images on the page for each finding.
    """
    from medvl.eval.core.results import format_table
    from medvl.eval.grounding.evaluate import phrase_grounding
    from medvl.eval.grounding.heatmaps import MapRules
    from medvl.eval.grounding.page import write_grounding_page
    from medvl.models import DualEncoder

    checkpoint = shared.checkpoint
    rules = (
        MapRules(unseen=unseen or "background", scale=scale or "unit") if unseen or scale else None
    )
    output = shared.folder(checkpoint, "grounding")
    model, source, read = open_evaluation(
        shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True
    )
    folder = output.settle(manifest=source.fingerprint)
    result = phrase_grounding(
        model,
        read(source),
        protocol=protocol,
        maps=maps,
        rules=rules,
        smoothing=smoothing,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_grounding_page, result, pixels=source.pixels)
    table = format_table([row for row in result.results.rows if not row.metric.startswith("iou@")])
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, table, options=shared
    )


# `medvl eval zero-shot-masks`: segmentation by the maps of a dual-encoder.


def zero_shot_masks(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    labels: tuple[str, ...] = (),
    maps: Literal["attention", "similarity"] | None = None,
    scale: Literal["unit", "sigmoid", "none"] = "unit",
    smoothing: float = 0.0,
    empty: Literal["one_if_both_empty", "skip_empty", "lvit"] = "one_if_both_empty",
    side: int | None = None,
    examples: int = 6,
) -> None:
    """Evaluate the maps of a dual-encoder as masks of findings: Dice, and AUROC of pixels, without
    any training.

    The checkpoint is a dual-encoder; the shards have masks (siim, qata, ...) or boxes (rsna).

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it they
            are 0.5.
        labels: findings; default all that have masks. The text of each is "There is FINDING."
        maps: attention of statements to regions, or similarity with patches; default: the model's
            own.
        scale: scaling of each map: to 0..1 within its image; by the sigmoid, for log-odds such as
            RadZero's; or none, for maps that are within 0..1 already.
        smoothing: Gaussian smoothing of similarity maps, in cells of the grid.
        empty: score of an image without a mask, as in `medvl eval segmentation`.
        side: longer side of the images in which masks are compared; default: the published size.
        examples: images with a mask on the page, and as many without.
    """
    from medvl.eval import zero_shot_masks as evaluate
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.pages import write_segmentation_page
    from medvl.models import DualEncoder

    checkpoint = shared.checkpoint
    output = shared.folder(checkpoint, "zero-shot-masks")
    model, source, read = open_evaluation(
        shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True
    )
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate.evaluate_zero_shot_masks(
        model,
        read(source),
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        labels=labels,
        maps=maps,
        scale=scale,
        smoothing=smoothing,
        empty=empty,
        side=side,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_segmentation_page, result, pixels=source.pixels)
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared
    )


# `medvl eval change`: classification of change between two images: zero-shot, by a linear probe
# or a classifier.


def change(
    shared: EvalOptions,
    *,
    prompts: Path | None = None,
    use_prior: bool = True,
    folds: int | None = None,
    examples: int = 4,
) -> None:
    """Evaluate how well a model distinguishes improving, stable and worsening findings, from pairs
    of images.

    The checkpoint is a dual-encoder, or a classifier of recipes/change_finetune.py, to which
    `prompts`, `use_prior` and `folds` do not apply; the shards have labels of change (ms-cxr-t).

    Args:
        prompts: JSON file with a list of sentences with {finding} for each of improving, stable and
            worsening.
        use_prior: give prior images to a model that takes them.
        folds: number of folds of patients over which a linear probe of the images' vectors is
            cross-validated, such as 5; default zero-shot classification by the prompts.
        examples: pairs on the page, correct and wrong ones each.
    """
    from medvl.data.loading.studies import prior_positions
    from medvl.eval.change.evaluate import change_classification, load_change_prompts
    from medvl.eval.change.page import write_change_page
    from medvl.eval.core.open import unsupported_model
    from medvl.models import ChangeClassifier, DualEncoder, System
    from medvl.schema import Inputs

    sentences = load_change_prompts(prompts)
    advice = "give the checkpoint of a dual-encoder or of a classifier of change"
    name = "change" if folds is None else "change-probe"
    output = shared.folder(shared.checkpoint, name if use_prior else f"{name}-without-prior")
    model, source, read = open_evaluation(shared, System, advice)
    if not isinstance(model, DualEncoder | ChangeClassifier):
        raise unsupported_model(shared.checkpoint, model, advice)
    folder = output.settle(manifest=source.fingerprint)
    result = change_classification(
        model,
        read(source, inputs=Inputs(prior_image=True)),
        sentences,
        use_prior=use_prior,
        folds=folds,
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    prior_N = prior_positions(source)
    page = functools.partial(
        write_change_page,
        result,
        pixels=source.pixels,
        prior_pixels=lambda position: source.pixels(int(prior_N[position])),
        examples=examples,
    )
    publish_result(
        result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared
    )


# `medvl eval retrieval`: image-text retrieval by a dual-encoder, optionally re-ranked by a
# fusion-encoder.

_EXAMPLES = 6
"""Queries of each direction on the page."""


def retrieval(shared: EvalOptions, *, rerank: Path | None = None, shortlist: int = 256) -> None:
    """Evaluate image-text retrieval in both directions; equal texts are positives of each other.

    Args:
        rerank: checkpoint of a fusion-encoder, or of recipes/retrieval_finetune.py on one, that
            re-ranks the shortlists of the dual-encoder; the same folder if the model is both.
        shortlist: candidates per query that are re-ranked.
    """
    from medvl.eval.core.open import load_model, open_source, unsupported_model
    from medvl.eval.retrieval.image_text import image_text_retrieval
    from medvl.eval.retrieval.rerank import ShortlistModel, reranked_retrieval
    from medvl.models import DualEncoder, FusionModel, RetrievalModel

    checkpoint = shared.checkpoint
    resamples = shared.resamples
    output = shared.folder(rerank or checkpoint, "retrieval")
    advice = "give the checkpoint of a dual-encoder, and --rerank"
    model, source, read = open_evaluation(shared, DualEncoder, advice, text=True)
    loader = read(source)
    folder = output.settle(manifest=source.fingerprint)
    if rerank is None:
        result = image_text_retrieval(
            model, loader, resamples=resamples, checkpoint=checkpoint, examples=_EXAMPLES
        )
    else:
        same = rerank.resolve() == checkpoint.resolve()
        shortlist_model = None if same else ShortlistModel(model, loader, checkpoint)
        fusion = model if same else load_model(rerank, shared.device)
        fusion = fusion.as_matcher() if isinstance(fusion, RetrievalModel) else fusion
        if not isinstance(fusion, FusionModel):
            raise unsupported_model(
                rerank, fusion, "give the checkpoint of a fusion-encoder", field="rerank"
            )
        if not same:
            source = open_source(shared.data, [rerank])
            loader = read(source, transform=fusion.transform, tokenizer=fusion.tokenizer)
        result = reranked_retrieval(
            fusion,
            loader,
            shortlist=shortlist,
            shortlist_model=shortlist_model,
            resamples=resamples,
            checkpoint=rerank,
        )
    page = None if result.examples is None else _page(result, source)
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared
    )


def _page(result: "RetrievalResult", source: "ShardSource") -> "WritePage":
    from medvl.eval.core.full_pass import samples_by_key
    from medvl.eval.retrieval.image_text_page import write_retrieval_page

    samples = samples_by_key(source)
    return functools.partial(
        write_retrieval_page,
        result,
        pixels=lambda key: source.pixels(samples[key][0]),
        labels=lambda key: samples[key][1].labels,
    )


# `medvl eval class-retrieval` and `medvl eval make-retrieval-list`: retrieval of images by their
# labels.


def class_retrieval(
    shared: EvalOptions, *, candidates: Path | None = None, ks: tuple[int, ...] = (5, 10, 50)
) -> None:
    """Evaluate precision at k of the images or texts nearest to a query, by labels or over a fixed
    candidate list.

    The checkpoint is a dual-encoder; the shards have labels. Default folders are
    eval/class_retrieval with a list and eval/image_retrieval without.

    Args:
        candidates: candidates and queries from `medvl eval make-retrieval-list`, such as CheXpert
            8x200; default every image against the images of all other patients.
        ks: numbers of nearest candidates.
    """
    from medvl.data.loading.sources import Subset
    from medvl.eval.retrieval import by_class
    from medvl.eval.retrieval.by_class import write_class_retrieval_page
    from medvl.eval.retrieval.candidate_lists import RetrievalList
    from medvl.models import DualEncoder

    fixed = None if candidates is None else RetrievalList.read(candidates)
    output = shared.folder(
        shared.checkpoint, "image_retrieval" if fixed is None else "class_retrieval"
    )
    model, source, read = open_evaluation(
        shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True
    )
    resamples = shared.resamples
    checkpoint = shared.checkpoint
    if fixed is None:
        folder = output.settle(manifest=source.fingerprint)
        result = by_class.image_retrieval(
            model, read(source), ks=ks, resamples=resamples, checkpoint=checkpoint
        )
    else:  # a folder may hold a hundred times as many images as the list
        keys = fixed.keys
        listed = Subset(
            source, [position for position in range(len(source)) if source.key(position) in keys]
        )
        folder = output.settle(manifest=listed.fingerprint)
        result = by_class.class_retrieval(
            model, read(listed), fixed, ks=ks, resamples=resamples, checkpoint=checkpoint
        )
    page = functools.partial(write_class_retrieval_page, result.results)
    publish_result(
        result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared
    )


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
        data: folder of shards to sample from: images that show exactly one class. The defaults are
            the rule of GLoRIA's 5x200, whose own draw its authors did not list.
        per_class: images per class.
        classes: class names; default the five of the CheXpert competition.
        exclusive: labels of which an image has no other, positive or uncertain: all of the shards
            except No Finding, or the classes.
        views: frontal views (and images without a view), or all.
        seed: seed of the sampling.
        chexpert_8x200: folder of ConVIRT's published lists (image-retrieval/ and text-retrieval/),
            instead of --data.
        salt_file: salt file of the CheXpert shards; default $MEDVL_SALT_FILE or
            ~/.config/medvl/salt.
    """
    from medvl.data.privacy import Deidentifier, default_salt_file
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
        chosen = read_chexpert_8x200(
            chexpert_8x200, Deidentifier.from_file(salt_file or default_salt_file())
        )
    else:
        raise ConfigError("expected --data to sample from or --chexpert-8x200; give exactly one",
            "conflict",
                          field="data")  # fmt: skip
    chosen.write(out)
    return (
        f"Wrote {out}: {chosen.name}, {len(chosen.candidates)} candidates, "
        f"{len(chosen.image_queries)} image queries "
        f"and {len(chosen.text_queries)} text queries of {len(chosen.classes)} classes, sha256 "
        f"{chosen.sha256[:12]}"
    )


# `medvl eval matching`: an image's own text against another text, and against its mirror.


def matching(shared: EvalOptions, *, sections: tuple[str, ...] = (), examples: int = 4) -> None:
    """Evaluate whether a model prefers an image's own text to another patient's, and to the text
    with sides exchanged.

    The checkpoint is a dual-encoder, a fusion-encoder, or one of recipes/retrieval_finetune.py; the
    shards have texts.

    Args:
        sections: sections of the text; default the whole text.
        examples: images of each kind of mistake on the page.
    """
    from medvl.eval.matching import image_text_matching, write_matching_page
    from medvl.models import RetrievalModel, System

    output = shared.folder(shared.checkpoint, "matching")
    model, source, read = open_evaluation(
        shared, System, "give a dual-encoder or a fusion-encoder", text=True
    )
    folder = output.settle(manifest=source.fingerprint)
    model = model.as_matcher() if isinstance(model, RetrievalModel) else model
    result = image_text_matching(
        model,
        read(source, sections=sections),
        resamples=shared.resamples,
        checkpoint=shared.checkpoint,
    )
    page = functools.partial(write_matching_page, result, pixels=source.pixels, examples=examples)
    publish_result(
        result, folder, page, f"{model.name} ({shared.checkpoint})", source.manifest, options=shared
    )
