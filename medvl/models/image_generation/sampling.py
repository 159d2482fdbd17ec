"""Sampling of latent diffusion models with classifier-free guidance (Ho and Salimans, arXiv
2207.12598).

B batch, Z latent channels, H and W height and width of the latents.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from medvl.common.config_io import check_choice, check_within
from medvl.errors import ConfigError
from medvl.models.image_generation.autoencoder import NoiseSchedule, require_diffusers, to_grey
from medvl.models.image_generation.latent_diffusion import LatentDiffusion

Sampler = Literal["ddim", "dpm", "pndm"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How images are drawn."""

    sampler: Sampler = "dpm"
    """`dpm` (DPM-Solver++, second order), `ddim`, or `pndm`, which RoentGen and Stable Diffusion
    1 used.
    """
    steps: int = 25
    """Evaluations of the U-Net; RoentGen took 75 of PNDM. `pndm` needs one more."""
    guidance: float = 4.0
    """Scale of the guidance: unconditional + scale * (conditional - unconditional); 1 is without,
    and twice as fast. RoentGen took 4.
    """

    def __post_init__(self) -> None:
        check_choice(self.sampler, get_args(Sampler), "sampler")
        check_within(self, "[1, 1000]", "steps")
        check_within(self, "[0, inf)", "guidance")


@torch.no_grad()
def sample_images(
    model: LatentDiffusion, prompts: Sequence[str], seeds: Sequence[int], sampling: Sampling
) -> Tensor:
    """Return (B, H, W) uint8 grey images of prompts.

    Each image's noise comes from its own seed, drawn on the CPU, so that an image does not depend
    on the others of its batch except by rounding.

    Raises ConfigError in training mode, without a tokenizer, or where the numbers of prompts and
    seeds differ.
    """
    if model.training:
        raise ConfigError("sample_images needs eval mode; call eval() first", "conflict")
    if len(prompts) != len(seeds) or not prompts:
        message = f"expected as many seeds as prompts, got {len(seeds)} and {len(prompts)}"
        raise ConfigError(message, "mismatch", field="seeds")
    states_BTD, mask_BT = model.encode_text(*model.tokenize(list(prompts)))
    guided = sampling.guidance != 1.0
    if guided:
        states_BTD, mask_BT = _with_empty(model, states_BTD, mask_BT)
    scheduler = _scheduler(model, sampling)
    scheduler.set_timesteps(sampling.steps, device=model.device)
    latent_BZHW = _noise(model, seeds) * scheduler.init_noise_sigma
    for step in scheduler.timesteps:
        inputs = torch.cat([latent_BZHW] * 2) if guided else latent_BZHW
        inputs = scheduler.scale_model_input(inputs, step)
        predicted = model.predict(inputs, step.expand(len(inputs)), states_BTD, mask_BT).float()
        if guided:
            conditional, unconditional = predicted.chunk(2)
            predicted = unconditional + sampling.guidance * (conditional - unconditional)
        latent_BZHW = scheduler.step(predicted, step, latent_BZHW).prev_sample
    return to_grey(model.decode(latent_BZHW))


def _with_empty(
    model: LatentDiffusion, states_BTD: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states and mask (2B, T, ...) of the prompts, then those of as many empty texts."""
    empty_1TD, real_1T = model.encode_text(*model.empty_text())
    short = states_BTD.shape[1] - empty_1TD.shape[1]
    if short < 0:
        states_BTD = torch.nn.functional.pad(states_BTD, (0, 0, 0, -short))
        mask_BT = torch.nn.functional.pad(mask_BT, (0, -short))
    empty_1TD = torch.nn.functional.pad(empty_1TD, (0, 0, 0, max(short, 0)))
    real_1T = torch.nn.functional.pad(real_1T, (0, max(short, 0)))
    rows = len(states_BTD)
    return torch.cat([states_BTD, empty_1TD.expand(rows, -1, -1)]), torch.cat(
        [mask_BT, real_1T.expand(rows, -1)]
    )


def _noise(model: LatentDiffusion, seeds: Sequence[int]) -> Tensor:
    """Return (B, Z, H, W) float32 noise on the model's device, each row from its seed."""
    size = model.config.image_size // model.config.autoencoder.reduction
    shape = (model.config.autoencoder.latent_channels, size, size)
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).to(model.device)


def _scheduler(model: LatentDiffusion, sampling: Sampling) -> Any:
    """Return diffusers' scheduler with the model's noise schedule, its steps counted from the
    noisiest one.
    """
    diffusers = require_diffusers()
    settings: dict[str, Any] = {
        "num_train_timesteps": NoiseSchedule.STEPS,
        "beta_start": NoiseSchedule.BETA_START,
        "beta_end": NoiseSchedule.BETA_END,
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction" if model.config.target == "v" else "epsilon",
    }
    if sampling.sampler == "ddim":
        return diffusers.DDIMScheduler(
            **settings, clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
        )
    if sampling.sampler == "pndm":
        return diffusers.PNDMScheduler(
            **settings, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1
        )
    return diffusers.DPMSolverMultistepScheduler(
        **settings, algorithm_type="dpmsolver++", timestep_spacing="trailing"
    )
