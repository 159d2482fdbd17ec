"""Latent diffusion: sizes, noise schedule, loss, texts, guidance, moving average, and starting
from parts.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.generators import (
    AUTOENCODER,
    DIFFUSION,
    SIZES,
    TEXTS,
    tiny_batch,
    tiny_generator,
    tiny_words,
)

import medvl
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.errors import CheckpointError, ConfigError
from medvl.models import (
    RoentGenConfig,
    Sampling,
    UNetSizes,
    create_latent_diffusion,
    sample_images,
    save,
)
from medvl.models.image_generation.autoencoder import (
    NoiseSchedule,
    require_diffusers,
    to_grey,
    to_signal,
)
from medvl.train import OptimConfig
from medvl.train.optim.optimizer import build_optimizer
from medvl.train.tasks.generation import LatentBatch

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tiny_words()


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_roentgen_has_the_sizes_of_stable_diffusion() -> None:
    with torch.device("meta"):
        model: Any = medvl.create_model("roentgen", caption_dropout=0.0)
    assert (count(model.unet), count(model.autoencoder), count(model.text_encoder)) == (
        859520964,
        83653863,
        123060480,
    )
    trained = {name.split(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {"unet", "text_encoder"}


def test_without_diffusers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with raises(ConfigError, "missing", "diffusers", names="medvl[generation]"):
        require_diffusers()


def test_noise_and_velocity_are_those_of_diffusers() -> None:
    schedule = NoiseSchedule()
    theirs = diffusers.DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    )
    latent, noise = torch.randn(2, 5, 4, 3, 3)
    step = torch.tensor([0, 1, 500, 998, 999])
    assert torch.allclose(
        schedule.add(latent, noise, step), theirs.add_noise(latent, noise, step), atol=1e-5
    )
    assert torch.allclose(
        schedule.velocity(latent, noise, step), theirs.get_velocity(latent, noise, step), atol=1e-5
    )
    assert schedule.snr(step)[2].item() == pytest.approx(
        float(theirs.alphas_cumprod[500] / (1 - theirs.alphas_cumprod[500])), rel=1e-4
    )


def test_pixels_survive_the_way_to_a_signal_and_back() -> None:
    grey = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for channels in (1, 3):
        assert torch.equal(to_grey(to_signal(grey, channels)), grey[:, 0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(
            to_signal(grey.expand(-1, 3, -1, -1), 1), to_signal(grey, 1), atol=1e-5
        )


def test_the_autoencoder_learns_from_images_alone() -> None:
    torch.manual_seed(0)
    model: Any = medvl.create_model(AUTOENCODER)
    batch = tiny_batch(tiny_words(), has_image_B=torch.tensor([True, True, True, False]))
    losses = model(batch)
    losses.total.backward()
    assert set(losses.terms) == {"l1", "l2", "edges", "kl"}
    assert all(parameter.grad is not None for parameter in model.parameters())
    none = dataclasses.replace(batch, has_image_B=torch.zeros(4, dtype=torch.bool))
    assert model(none).total.item() == 0
    model.eval()
    assert model.reconstruct(batch.image_BCHW).shape == (4, 32, 32)
    changed = dataclasses.replace(batch, image_BCHW=batch.image_BCHW.clone())
    changed.image_BCHW[3] = 0  # the placeholder is not read
    assert torch.equal(model(changed).total, model(batch).total)


@pytest.mark.parametrize("target", ["epsilon", "v"])
def test_the_loss_is_that_of_the_formula(
    words: Tokenizer, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_generator(words, target=target, latent_scale=0.5).eval()
    batch = tiny_batch(words)
    torch.manual_seed(3)
    loss = model(batch).total
    torch.manual_seed(3)
    with torch.no_grad():
        posterior = model.autoencoder.encode(to_signal(batch.image_BCHW, 1)).latent_dist
        latent = 0.5 * (posterior.mean + posterior.std * torch.randn_like(posterior.mean))
        step = torch.randint(0, 1000, (4,))
        noise = torch.randn_like(latent)
        a = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)[step][
            :, None, None, None
        ]
        states = model.text_encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
        found = model.predict(
            a.sqrt() * latent + (1 - a).sqrt() * noise, step, states, batch.mask_BT
        )
        wanted = noise if target == "epsilon" else a.sqrt() * noise - (1 - a).sqrt() * latent
    assert loss.item() == pytest.approx(((found - wanted) ** 2).mean().item(), rel=1e-4)


def test_padding_is_not_attended_to(words: Tokenizer) -> None:
    model = tiny_generator(words).eval()
    states, noisy, step = torch.randn(1, 5, 24), torch.randn(1, 4, 8, 8), torch.tensor([5])
    mask = torch.tensor([[True, True, True, False, False]])
    other = states.clone()
    other[:, 3:] = 9.0
    assert torch.allclose(
        model.predict(noisy, step, states, mask), model.predict(noisy, step, other, mask), atol=1e-5
    )
    everything = tiny_generator(words, text_mask=False).eval()
    assert not torch.allclose(
        everything.predict(noisy, step, states, mask),
        everything.predict(noisy, step, other, mask),
        atol=1e-5,
    )


def test_without_a_mask_texts_are_padded_with_their_last_token(words: Tokenizer) -> None:
    model = tiny_generator(words, text_mask=False)
    ids, mask = model.text_ids(*words(TEXTS))
    assert ids.shape == (4, 16)
    assert mask.all()
    assert (ids[0, 7:] == words.sep_id).all()
    assert (ids != words.pad_id).all()


def test_dropped_captions_are_the_empty_text(words: Tokenizer) -> None:
    batch = tiny_batch(words)
    model = tiny_generator(words, caption_dropout=0.999999)
    model.train()
    states, mask = model._drop_captions(batch.ids_BT, batch.mask_BT, None)
    empty, real = model.encode_text(*words([""]))
    assert torch.allclose(states[:, :2], empty.expand(4, -1, -1), atol=1e-5)
    assert (mask.sum(dim=1) == real.sum()).all()
    cached, cached_mask = model._drop_captions(
        batch.ids_BT, batch.mask_BT, model.encode_text(batch.ids_BT, batch.mask_BT)[0]
    )
    assert torch.equal(cached_mask, mask)
    assert torch.allclose(cached[:, :2], states[:, :2], atol=1e-5)


def test_cached_latents_and_states_give_the_same_loss(words: Tokenizer) -> None:
    model, batch = tiny_generator(words).eval(), tiny_batch(words)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    cached = LatentBatch(
        **fields,
        moments_BCHW=model.encode_moments(batch.image_BCHW),
        states_BTD=model.encode_text(batch.ids_BT, batch.mask_BT)[0],
    )
    totals = []
    for each in (batch, cached):
        torch.manual_seed(1)
        totals.append(model(each).total.item())
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


def test_what_is_trained(words: Tokenizer) -> None:
    frozen = tiny_generator(words, ema_decay=0.9)
    frozen.train()
    assert not frozen.autoencoder.training
    assert not frozen.text_encoder.training
    assert {
        name.split(".")[0] for name, each in frozen.named_parameters() if each.requires_grad
    } == {"unet"}
    unet = UNetSizes(
        channels=(16,), cross_attention=(True,), layers=1, heads=2, text_width=16, groups=4
    )
    both = tiny_generator(words, unet=unet, train_text=True, text_lr_mult=0.1)
    both.train()
    assert both.text_encoder.training
    both(tiny_batch(words)).total.backward()
    lacking = {
        name for name, each in both.named_parameters() if each.requires_grad and each.grad is None
    }
    assert lacking == set()
    rates = {
        group["name"].split(":")[0]: group["lr"]
        for group in build_optimizer(both, OptimConfig(lr=1.0)).param_groups
    }
    assert rates == {"unet": 1.0, "text_projection": 1.0, "text_encoder": 0.1}


def test_the_moving_average_starts_low_and_is_evaluated(words: Tokenizer) -> None:
    model = tiny_generator(words, ema_decay=0.5)
    start = [each.clone() for each in model.unet.parameters()]
    with torch.no_grad():
        for each in model.unet.parameters():
            each.add_(1.0)
    model.after_step(0)
    for before, average in zip(start, model.ema_unet.parameters(), strict=True):
        assert torch.allclose(average, before + 1 - 2 / 11, atol=1e-5)
    assert model.train().denoiser is model.unet
    assert model.eval().denoiser is model.ema_unet


def test_the_scale_of_latents_is_measured_once(words: Tokenizer) -> None:
    model = tiny_generator(words, latent_scale=None)
    with raises(ConfigError, "missing", "latent_scale"):
        model.before_step(0)
    moments = torch.cat([3 * torch.randn(500, 4, 2, 2), torch.full((500, 4, 2, 2), -30.0)], dim=1)
    model.measure_scale(moments)
    assert model.latent_scale.item() == pytest.approx(1 / 3, rel=0.05)
    model.measure_scale(10 * moments)
    assert model.latent_scale.item() == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize("sampler", ["dpm", "ddim", "pndm"])
def test_samples_depend_on_their_seed_and_prompt_alone(words: Tokenizer, sampler: Any) -> None:
    model = tiny_generator(words).eval()
    sampling = Sampling(sampler=sampler, steps=4, guidance=2.0)
    three = sample_images(model, TEXTS[:3], [1, 2, 3], sampling)
    assert three.shape == (3, 32, 32)
    assert three.dtype == torch.uint8
    alone = sample_images(model, [TEXTS[1]], [2], sampling)
    assert (three[1].int() - alone[0].int()).abs().max() <= 1
    assert not torch.equal(three[0], three[1])


def test_guidance_one_is_the_conditional_model_and_zero_the_empty_text(words: Tokenizer) -> None:
    model = tiny_generator(words).eval()

    def draw(prompt: str, guidance: float) -> torch.Tensor:
        return sample_images(model, [prompt], [5], Sampling(steps=3, guidance=guidance)).int()

    assert (draw(TEXTS[0], 0.0) - draw("", 1.0)).abs().max() <= 1
    assert (draw("", 3.0) - draw("", 1.0)).abs().max() <= 1


def test_ddim_with_a_perfect_denoiser_finds_the_latent(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denoiser that knows the answer brings any noise to it, whatever the sampler's steps."""
    model = tiny_generator(words).eval()
    truth = torch.randn(1, 4, 8, 8)
    decoded: list[torch.Tensor] = []

    def velocity(noisy: torch.Tensor, step: torch.Tensor, *_: Any) -> torch.Tensor:
        a = model.schedule.signal_S[step][:, None, None, None]
        noise = (noisy - a.sqrt() * truth) / (1 - a).sqrt()
        return a.sqrt() * noise - (1 - a).sqrt() * truth

    monkeypatch.setattr(model, "predict", velocity)
    monkeypatch.setattr(
        model, "decode", lambda latent: decoded.append(latent) or torch.zeros(1, 1, 32, 32)
    )
    for sampler in ("ddim", "dpm"):
        sample_images(model, ["x"], [0], Sampling(sampler=sampler, steps=20, guidance=1.0))
        assert torch.allclose(decoded[-1], truth, atol=0.05)


def test_sampling_needs_eval_mode_seeds_and_a_tokenizer(words: Tokenizer) -> None:
    model = tiny_generator(words).eval()
    with raises(ConfigError, "mismatch", "seeds"):
        sample_images(model, ["a"], [1, 2], Sampling())
    with raises(ConfigError, "missing", "tokenizer"):
        sample_images(tiny_generator(None, vocab_size=80).eval(), ["a"], [1], Sampling())
    with raises(ConfigError, "conflict"):
        sample_images(model.train(), ["a"], [1], Sampling())
    with raises(ConfigError, "unknown_name", "sampler"):
        Sampling(sampler="euler")
    with raises(ConfigError, "conflict", "image_size"):
        tiny_generator(words, image_size=36)


def test_a_model_is_made_of_the_checkpoints_of_its_parts(words: Tokenizer, tmp_path: Path) -> None:
    auto: Any = medvl.create_model(AUTOENCODER)
    auto.autoencoder.trained_on = ({"patients": ["p1"]},)
    whole = tiny_generator(words, latent_scale=0.3)
    for name, each in (("auto", auto), ("whole", whole)):
        (tmp_path / name).mkdir()
        save(each, tmp_path / name)
    made = create_latent_diffusion(
        DIFFUSION, autoencoder=tmp_path / "auto", text=tmp_path / "whole"
    )
    assert made.tokenizer is not None
    assert same(made.autoencoder, auto.autoencoder)
    assert same(made.text_encoder, whole.text_encoder)
    assert not same(made.unet, whole.unet)
    (tmp_path / "made").mkdir()
    save(made, tmp_path / "made")
    assert medvl.load(tmp_path / "made").autoencoder.trained_on == ({"patients": ["p1"]},), (
        "leak checks see it"
    )
    card = (tmp_path / "made" / "README.md").read_text()
    assert "pipeline_tag: text-to-image" in card
    assert "sample_images(" in card
    averaged = dataclasses.replace(DIFFUSION, ema_decay=0.9, latent_scale=None)
    more = create_latent_diffusion(averaged, start=tmp_path / "whole")
    assert all(
        same(getattr(more, part), getattr(whole, part))
        for part in ("unet", "autoencoder", "text_encoder")
    )
    assert same(more.ema_unet, whole.unet)
    assert more.latent_scale.item() == pytest.approx(0.3)


def test_the_unet_alone_may_be_random(words: Tokenizer, tmp_path: Path) -> None:
    """It may have other sizes, and a layer between it and the text states."""
    whole = tiny_generator(words, latent_scale=0.3)
    save(whole, tmp_path)
    config = dataclasses.replace(DIFFUSION, latent_scale=None, ema_decay=0.9)
    made = create_latent_diffusion(config, start=tmp_path, random_unet=True)
    assert same(made.autoencoder, whole.autoencoder)
    assert same(made.text_encoder, whole.text_encoder)
    assert not same(made.unet, whole.unet)
    assert same(made.ema_unet, made.unet)
    assert made.latent_scale.item() == pytest.approx(0.3)
    wider = dataclasses.replace(config, unet=dataclasses.replace(DIFFUSION.unet, text_width=16))
    made = create_latent_diffusion(wider, start=tmp_path, random_unet=True)
    assert same(made.text_encoder, whole.text_encoder)
    assert made.text_projection.out_features == 16


def test_another_autoencoder_brings_its_own_scale(words: Tokenizer, tmp_path: Path) -> None:
    """Stable Diffusion's is that of its checkpoint alone."""
    sizes = {field.name: getattr(DIFFUSION, field.name) for field in dataclasses.fields(DIFFUSION)}
    config = RoentGenConfig(
        **{name: value for name, value in sizes.items() if name != "latent_scale"}
    )
    for name, each in (
        ("sd", tiny_generator(words, config, latent_scale=0.18)),
        ("auto", medvl.create_model(AUTOENCODER)),
    ):
        (tmp_path / name).mkdir()
        save(each, tmp_path / name)
    made = create_latent_diffusion(config, start=tmp_path / "sd")
    assert made.latent_scale.item() == pytest.approx(0.18)
    made = create_latent_diffusion(config, start=tmp_path / "sd", autoencoder=tmp_path / "auto")
    made.measure_scale(
        torch.cat([2 * torch.randn(500, 4, 2, 2), torch.full((500, 4, 2, 2), -30.0)], dim=1)
    )
    assert made.latent_scale.item() == pytest.approx(0.5, rel=0.05)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def test_parts_that_do_not_fit_are_refused(words: Tokenizer, tmp_path: Path) -> None:
    save(
        medvl.create_model(
            dataclasses.replace(AUTOENCODER, sizes=dataclasses.replace(SIZES, groups=8))
        ),
        tmp_path,
    )
    with raises(ConfigError, "mismatch", "autoencoder"):
        create_latent_diffusion(DIFFUSION, autoencoder=tmp_path, tokenizer=words)
    with raises(ConfigError, "missing", "autoencoder"):
        create_latent_diffusion(DIFFUSION, tokenizer=words)
    with raises(CheckpointError, "not_found"):
        create_latent_diffusion(DIFFUSION, autoencoder=tmp_path / "none", tokenizer=words)
