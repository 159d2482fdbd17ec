"""The forward pass of HLIP's vision Transformer, written out token by token."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor


def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias


def layer(x: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """One pre-norm layer over the tokens (K, D) of one part."""
    y = norm(x, w["norm1.weight"], w["norm1.bias"])
    query, key, value = np.split(y @ w["attn.qkv.weight"].T + w["attn.qkv.bias"], 3, axis=1)
    outputs = []
    for part in np.split(np.arange(x.shape[1]), heads):
        logits = query[:, part] @ key[:, part].T / math.sqrt(len(part))
        share = np.exp(logits - logits.max(1, keepdims=True))
        outputs.append(share / share.sum(1, keepdims=True) @ value[:, part])
    x = x + np.concatenate(outputs, 1) @ w["attn.proj.weight"].T + w["attn.proj.bias"]
    y = norm(x, w["norm2.weight"], w["norm2.bias"]) @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
    y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    return x + y @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]


def sincos(place: int, width: int) -> list[float]:
    angles = [place / 10000 ** (i / (width // 2)) for i in range(width // 2)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def hlip_tokens(
    state: Mapping[str, Tensor],
    study_NDHW: Tensor,
    *,
    attention: Sequence[str],
    heads: int,
    window: tuple[float, float] = (-1150.0, 350.0),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the class token and the patches of one study of Hounsfield units, from weights by the
    names of the authors' code; by dictionaries of (n, d, h, w).
    """
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    width, _, pd, ph, pw = w["patch_embed.proj.weight"].shape
    low, high = window
    clipped = np.clip(study_NDHW.double().numpy(), low, high)
    values = ((clipped - low) / (high - low) - 0.449) / 0.226
    scans, depth, height, columns = values.shape
    tokens = {}
    for n, d, h, c in np.ndindex(scans, depth // pd, height // ph, columns // pw):
        cube = values[n, d * pd : d * pd + pd, h * ph : h * ph + ph, c * pw : c * pw + pw]
        token = (w["patch_embed.proj.weight"][:, 0] * cube).sum((1, 2, 3))
        third = width // 6 * 2
        place = sincos(c, third) + sincos(h, third) + sincos(d, third)
        place += [0] * (width - len(place))
        scan = sincos(n, width) if "sequential_posemb" in w else 0
        tokens[n, d, h, c] = token + w["patch_embed.proj.bias"] + np.array(place) + scan
    part_of = {"slice": lambda p: p[:2], "scan": lambda p: p[:1], "study": lambda p: ()}
    levels = attention
    token = w["cls_token"][0, 0]
    parts = {part_of[levels[0]](place): token for place in tokens}
    for index, level in enumerate(levels):
        parts = cross(parts, {part_of[level](place) for place in tokens})
        block = {
            k.removeprefix(f"blocks.{index}."): v for k, v in w.items() if f"blocks.{index}." in k
        }
        for part in parts:
            inside = [place for place in tokens if part_of[level](place) == part]
            stacked = np.stack([parts[part], *(tokens[place] for place in inside)])
            out = layer(stacked, block, heads)
            parts[part] = out[0]
            tokens |= dict(zip(inside, out[1:], strict=True))
    pooled = cross(parts, {()})[()]
    states = np.stack([pooled, *(tokens[place] for place in sorted(tokens))])
    states = norm(states, w["norm.weight"], w["norm.bias"])
    return states[0], states[1:]


def cross(parts: dict, goal: set) -> dict:
    """Copy class tokens to smaller parts, average them for larger ones."""
    out = {}
    for part in goal:
        near = [old for old in parts if old[: len(part)] == part or part[: len(old)] == old]
        out[part] = np.mean([parts[old] for old in near], axis=0)
    return out
