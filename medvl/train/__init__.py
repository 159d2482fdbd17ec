"""Training: one loop for every model, exactly resumable, on one device or many.

    from medvl.train import TrainConfig, OptimConfig, Plateau, train

    train(
        model,
        train_loader,
        optim=OptimConfig(...),
        config=TrainConfig(...),
        valid_loader=valid_loader,
    )

Start reading at `loop/trainer.py`, then `loop/step.py`. The configs, the data settings and
`choose`, which reads a recipe's command line, are imported without torch.

    config.py          settings of a run
    recipe.py          settings of a recipe; recipe_files.py reads its command line, run.py runs it
    quickstart.py      settings of the presets `tiny`
    rewards/           texts that the model samples, and how good they are
    tasks/             settings, loaders and recipes of each task
    loop/              step, validation, records, state
    optim/             optimiser, schedule, precision
    parallel/          ranks, DDP, FSDP, transfer of batches
    fault_tolerance/   checkpoints, non-finite values, signals
    doctor/            measurements of a run's speed
"""

from typing import TYPE_CHECKING

from medvl.common.imports import lazy_exports

if TYPE_CHECKING:
    from medvl.common.config_io import from_dict as from_dict, to_dict as to_dict
    from medvl.common.ranks import rank_and_world as rank_and_world
    from medvl.common.seeding import seeded as seeded
    from medvl.train import quickstart as quickstart
    from medvl.train.config import (
        Constant as Constant,
        Cosine as Cosine,
        CosineRestarts as CosineRestarts,
        Linear as Linear,
        OptimConfig as OptimConfig,
        Plateau as Plateau,
        RewardConfig as RewardConfig,
        Schedule as Schedule,
        StepDecay as StepDecay,
        TrainConfig as TrainConfig,
    )
    from medvl.train.doctor.examine import Examination as Examination, examine as examine
    from medvl.train.loop.state import Evaluator as Evaluator
    from medvl.train.loop.trainer import TrainResult as TrainResult, train as train
    from medvl.train.parallel.distributed import TrainLoader as TrainLoader
    from medvl.train.recipe import (
        Recipe as Recipe,
        RewardRecipe as RewardRecipe,
        ZeroShotRecipe as ZeroShotRecipe,
        data_advice as data_advice,
        pretraining_run as pretraining_run,
        zero_shot_run as zero_shot_run,
    )
    from medvl.train.recipe_files import choose as choose, launch as launch
    from medvl.train.rewards.task import RewardTask as RewardTask
    from medvl.train.run import Run as Run, pretraining as pretraining
    from medvl.train.tasks.generation import (
        AutoencoderRecipe as AutoencoderRecipe,
        GenerationDataConfig as GenerationDataConfig,
        GenerationRecipe as GenerationRecipe,
        ImageDataConfig as ImageDataConfig,
        autoencoder_run as autoencoder_run,
        generation_run as generation_run,
        open_generation as open_generation,
        open_images as open_images,
    )
    from medvl.train.tasks.pretraining import (
        DataConfig as DataConfig,
        DataLoaders as DataLoaders,
        open_data as open_data,
        open_pairs as open_pairs,
    )
    from medvl.train.tasks.supervised import (
        ChangeDataConfig as ChangeDataConfig,
        ClassificationDataConfig as ClassificationDataConfig,
        ClassifierRecipe as ClassifierRecipe,
        DenseDataConfig as DenseDataConfig,
        VQADataConfig as VQADataConfig,
        classifier_run as classifier_run,
        fused_classification as fused_classification,
        open_change as open_change,
        open_choices as open_choices,
        open_classification as open_classification,
        open_dense as open_dense,
        open_vqa as open_vqa,
    )
    from medvl.train.tasks.text import (
        TextDataConfig as TextDataConfig,
        open_text as open_text,
        text_run as text_run,
    )
    from medvl.train.tasks.volumes import (
        VolumeDataConfig as VolumeDataConfig,
        open_volumes as open_volumes,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
