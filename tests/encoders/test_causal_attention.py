"""Causal attention without a mask in memory: the values and gradients of attention with it."""

import torch
from torch import Tensor, nn

from medvl.encoders import create_text_encoder
from medvl.encoders.text.adapters import CausalAttention, speed_up_causal_attention


def outcome(attention: nn.Module, device: torch.device, **options: bool) -> list[Tensor]:
    hidden_BTD = (
        torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    )
    mask_TT = torch.full((7, 7), -torch.inf, device=device).triu(1)
    attended_BTD = attention(*[hidden_BTD] * 3, need_weights=False, attn_mask=mask_TT, **options)[0]
    leaves = [hidden_BTD, *attention.parameters()]
    return [attended_BTD, *torch.autograd.grad(attended_BTD.square().sum(), leaves)]


def test_attention_with_the_hint_equals_attention_with_the_mask(device: torch.device) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)).to(device)
    expected = outcome(block[0], device)
    speed_up_causal_attention(block)
    assert type(block[0]) is CausalAttention
    for found in (outcome(block[0], device), outcome(block[0], device, is_causal=True)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_causal_text_encoders_use_it_and_bidirectional_ones_do_not() -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "context_length": 9,
        "embed_dim": 8,
    }
    causal = create_text_encoder("open_clip:custom", pretrained=False, **sizes)
    bidirectional = create_text_encoder(
        "open_clip:custom", pretrained=False, no_causal_mask=True, **sizes
    )

    def layers(encoder: nn.Module) -> int:
        return sum(type(module) is CausalAttention for module in encoder.modules())

    assert (layers(causal), layers(bidirectional)) == (2, 0)
