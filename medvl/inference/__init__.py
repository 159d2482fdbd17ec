"""Answers about single images (probabilities of findings, heat maps, answers, reports), and images
from texts.

    model = medvl.load("runs/convirt")
    medvl.infer(model, "chest.dcm", ["pleural effusion"])    # {"pleural effusion": 0.71}

Each function raises an error for a model that does not support its task; the message names models
that do.
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.inference.answers import (
        Scorer as Scorer,
        answer as answer,
        heatmap as heatmap,
        infer as infer,
        prompts_for as prompts_for,
        write_report as write_report,
        write_study_reports as write_study_reports,
    )
    from medvl.inference.embeddings import EmbeddingFile as EmbeddingFile, embed as embed
    from medvl.inference.generation import (
        GenerateOptions as GenerateOptions,
        Prompt as Prompt,
        generate_images as generate_images,
        prompts_of_file as prompts_of_file,
        prompts_of_shards as prompts_of_shards,
        reconstruct_images as reconstruct_images,
    )
    from medvl.inference.volumes import volume_heatmap as volume_heatmap

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
