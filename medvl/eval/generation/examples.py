"""Example images for the page: prompts beside real and generated images, and nearest training
images.
"""

from typing import Any

import numpy as np

from medvl.eval.generation.inputs import ImageSet
from medvl.eval.generation.protocol import RECONSTRUCTED, GenerationResult
from medvl.eval.generation.training_images import SPACES
from medvl.eval.html.page import Card, Cards, Choice, Deck, Picture, thumbnail_uri
from medvl.schema import FINDINGS

_SIZE = 176
_SHOWN = 2  # findings of a prompt with a bar


def prompt_examples(result: GenerationResult, examples: int) -> Cards:
    """Return cards of images whose prompts assert findings, best and worst of their findings by
    the classifier.
    """
    main = result.main
    names = result.classifier.names
    logits_NL = result.classifier.logits(main.scored.x_ND)
    rank_NL = logits_NL.argsort(axis=0).argsort(axis=0) / max(len(logits_NL) - 1, 1)
    asserted_NL = np.stack([main.labels_NL[:, FINDINGS.index(name)] == 1 for name in names], axis=1)
    asserted_NL[
        :, [place for place, name in enumerate(names) if name in ("No Finding", "Support Devices")]
    ] = False
    score_N = np.where(asserted_NL, rank_NL, np.nan)
    stated = np.flatnonzero(asserted_NL.any(axis=1))
    mean_N = np.array([np.nanmean(score_N[row]) for row in stated])
    order = stated[np.argsort(-mean_N, kind="stable")]
    first = _distinct(main, order)
    count = min(examples, len(first) // 2)
    half = (count + 1) // 2
    middle = first[(len(first) - half) // 2 :][:half]
    decks = [
        Deck(
            title=title,
            cards=[_prompt_card(result, row, rank_NL, asserted_NL) for row in rows],
            good=good,
        )
        for title, rows, good in (
            ("As the classifier reads them: findings most clearly shown", first[:count], True),
            ("Least clearly shown", first[::-1][:count], False),
            ("In between", middle, True),
        )
        if len(rows)
    ]
    caption = (
        "Each prompt with its real image, if there is one, and the generated image. Bars: share of "
        "the generated images that the classifier scores lower for a finding of the prompt."
    )
    return Cards(title="Prompts and images", decks=decks, caption=caption)


def _distinct(images: ImageSet, order: Any) -> list[int]:
    """Return the rows of an order with the first image of each prompt only."""
    first_rows: dict[str, int] = {}
    for row in order.tolist():
        first_rows.setdefault(images.prompts[row], row)
    return list(first_rows.values())


def _prompt_card(result: GenerationResult, row: int, rank_NL: Any, asserted_NL: Any) -> Card:
    main = result.main
    names = result.classifier.names
    pictures = []
    for images, label in ((result.sets.real, "real"), (result.sets.rebuilt, RECONSTRUCTED)):
        place = None if images is None else _place_of(result, images, row)
        if images is not None and place is not None:
            pictures.append(_picture(images, place, label))
    label = "generated" if len(result.generated) == 1 else f"generated, {main.name}"
    pictures.append(_picture(main, row, label))
    pictures += [
        _picture(other, row, other.name)
        for other in result.generated[1:3]
        if row < len(other.prompts) and other.prompts[row] == main.prompts[row]
    ]
    shown = np.flatnonzero(asserted_NL[row]).tolist()[:_SHOWN]
    return Card(
        title=main.prompts[row],
        pictures=pictures,
        choices=[
            Choice(text=names[place], score=float(rank_NL[row, place]), right=False)
            for place in shown
        ],
        lines=[],
        tags=[],
    )


def _place_of(result: GenerationResult, images: ImageSet, row: int) -> int | None:
    """Return the row of the real or reconstructed image of a generated one."""
    source_key = result.main.source.images.rows[result.main.scored.positions[row]].source_key
    for place, sample in enumerate(images.scored.samples):
        key = sample.key
        if "synthetic" in sample.extra:
            key = images.source.images.rows[images.scored.positions[place]].source_key
        if key == source_key:
            return place
    return None


def _picture(images: ImageSet, row: int, label: str) -> Picture:
    pixels = images.source.pixels(images.scored.positions[row])
    return Picture(
        source=thumbnail_uri(pixels, _SIZE),
        alternative=f"{label} image of the prompt",
        lines=[label],
    )


def nearest_examples(result: GenerationResult, examples: int) -> Cards:
    """Return cards of the generated images that are nearest to a training image."""
    copies = result.memorisation
    nearest = copies.sets[result.main.name]
    decks = []
    for space in ("pixels", "features"):
        order = np.argsort(nearest.distance[space], kind="stable")[:examples]
        cards = [_nearest_card(result, int(row), space) for row in order]
        decks.append(Deck(title=f"Nearest by {space}", cards=cards, good=True))
    caption = (
        "The generated images that are nearest to a training image, with that image and the "
        "training image nearest by the other distance. Too near: below "
        f"{copies.limit['pixels']:.3g} in pixels, {copies.limit['features']:.3g} in features."
    )
    return Cards(title="Nearest training images", decks=decks, caption=caption)


def _nearest_card(result: GenerationResult, row: int, space: str) -> Card:
    nearest = result.memorisation.sets[result.main.name]
    main = result.main
    near = result.memorisation.too_near(main.name)
    pictures = [_picture(main, row, "generated")]
    for name in (space, "features" if space == "pixels" else "pixels"):
        place = int(nearest.position[name][row])
        source = thumbnail_uri(result.train_source.pixels(place), _SIZE)
        alternative = f"training image, nearest by {name}"
        pictures.append(
            Picture(source=source, alternative=alternative, lines=[f"training, by {name}"])
        )
    lines = [
        (name, f"{nearest.distance[name][row]:.3g}{', too near' if near[name][row] else ''}")
        for name in SPACES
    ]
    return Card(title=main.prompts[row], pictures=pictures, choices=[], lines=lines, tags=[])
