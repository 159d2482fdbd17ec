"""Settings and preparation of recipes that fine-tune a fusion-encoder for labels, like those of `recipe.py`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medvl.common.seeding import seeded
from medvl.models.fusion_encoders.bases.config import FusionConfig
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.recipe import data_advice
from medvl.train.tasks.classification import ApplyPolicy, ClassificationDataConfig, open_classification

if TYPE_CHECKING:
    from medvl.train.loop.validate import Evaluator
    from medvl.train.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierRecipe:
    """All settings of a run of `FusedClassifier`."""

    init_from: Path | None = None
    """Checkpoint to start from: of a fusion-encoder, of a head on one, or of a dual-encoder; None creates `model`."""
    model: FusionConfig
    """Fusion-encoder, where `init_from` has none."""
    pretrained: bool = False
    """Without `init_from`: start from published weights of both encoders."""
    tokenizer: Path | None = None
    """Without `init_from`: folder of a tokenizer; None uses the text encoder's own from the hub."""
    modalities: Literal["image_text", "image", "text"] = "image_text"
    """Input of the classifier. Labels that were extracted from the report can mostly be read from its text: compare
    with "text" and "image"."""
    head: Literal["mlp", "meter", "linear"] = "mlp"
    target: Literal["multi_label", "single_label"] = "multi_label"
    image_size: int | None = None
    """With `init_from`: side of the images in pixels, to which learned positions are interpolated; None is that of the
    checkpoint."""
    max_tokens: int | None = None
    """With `init_from`: maximum length of a text, which may be above that of the pretraining; None is that of the
    checkpoint."""
    head_lr_mult: float = 1.0
    """Learning rate of the head, as a multiple of the encoders'."""
    uncertain: Literal["ignore", "zeros", "ones", "per_class"] = "ignore"
    """Treatment of uncertain labels (-1)."""
    missing: Literal["ignore", "negative"] = "ignore"
    """Treatment of missing labels."""
    data: ClassificationDataConfig
    optim: OptimConfig
    train: TrainConfig


def classifier_run(
    name: str,
    make_data: str,
    policy: "Callable[..., Any]",
    evaluator: "Callable[..., Evaluator]",
    phantom: str = "",
    complete: "Callable[[Any], ClassifierRecipe] | None" = None,
) -> "Callable[[ClassifierRecipe], Run]":
    """Return the `prepare` function of a recipe for labels.

    Args:
        name: as in `pretraining_run`.
        make_data: as in `pretraining_run`.
        policy: `medvl.eval.LabelPolicy`.
        evaluator: `medvl.eval.ClassifyEval`.
        phantom: as in `pretraining_run`.
        complete: called with the settings after the check of the data; returns those of the run.
    """

    def prepare(recipe: ClassifierRecipe) -> "Run":
        """Create the model, the loaders and the evaluator."""
        recipe.data.check(data_advice(name, make_data, phantom))
        recipe = recipe if complete is None else complete(recipe)
        labels = policy(uncertain=recipe.uncertain, missing=recipe.missing)
        run = fused_classification(name, recipe, labels.apply)
        return run.with_evaluator(lambda images: evaluator(images, policy=labels))

    return prepare


def fused_classification(recipe: str, settings: ClassifierRecipe, apply: ApplyPolicy) -> "Run":
    """Create the run of a `FusedClassifier`; `apply` maps labels to 1, 0 or NaN.

    Raises what `create_model`, `create_fused_classifier` and `open_classification` raise.
    """
    from medvl.models import FusedClassifier, FusionModel, create_fused_classifier, create_model
    from medvl.train.run import Run

    names = ("modalities", "head", "target", "head_lr_mult")
    labels, choices = settings.data.names(), {name: getattr(settings, name) for name in names}
    with seeded(settings.train.seed):
        if settings.init_from is None:
            fusion = create_model(settings.model, pretrained=settings.pretrained, tokenizer=settings.tokenizer)
            assert isinstance(fusion, FusionModel)
            model = FusedClassifier.on(fusion, labels, **choices)
        else:
            model = create_fused_classifier(
                settings.init_from,
                labels,
                fusion=settings.model,
                image_size=settings.image_size,
                max_tokens=settings.max_tokens,
                **choices,
            )
    data = open_classification(settings.data, model, apply, settings.train.micro_batch)
    return Run(recipe=recipe, settings=settings, model=model, data=data)
