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


def ctvit_tokens(
    state: Mapping[str, Tensor],
    volume_DHW: Tensor,
    *,
    patch: tuple[int, int, int],
    heads: int,
    window: tuple[float, float] = (-1000.0, 1000.0),
) -> np.ndarray:
    """Return the patches (d, h, w, D) of a volume of Hounsfield units by CT-CLIP's released forward
    pass, from weights by the names of its code (`visual_transformer.` without its prefix).
    """
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    low, high = window
    values = np.clip(volume_DHW.double().numpy(), low, high) / 1000
    pt, p1, p2 = patch
    grid = tuple(side // step for side, step in zip(values.shape, patch, strict=True))
    width = len(w["to_patch_emb.2.weight"])
    tokens = np.zeros((*grid, width))
    for t, i, j in np.ndindex(*grid):
        cell = values[t * pt : t * pt + pt, i * p1 : i * p1 + p1, j * p2 : j * p2 + p2].flatten()
        cell = _norm(cell, w["to_patch_emb.1.weight"], w["to_patch_emb.1.bias"])
        out = cell @ w["to_patch_emb.2.weight"].T + w["to_patch_emb.2.bias"]
        tokens[t, i, j] = _norm(out, w["to_patch_emb.3.weight"], w["to_patch_emb.3.bias"])
    places = [(i, j) for i in range(grid[1]) for j in range(grid[2])]
    bias = np.array([[_distance_bias(w, a, b) for b in places] for a in places])
    tokens = tokens.reshape(grid[0], -1, width)
    tokens = _ctvit_layers(w, "enc_spatial_transformer.", tokens, grid, heads, bias)
    tokens = tokens.transpose(1, 0, 2)
    tokens = _ctvit_layers(w, "enc_temporal_transformer.", tokens, grid, heads, None)
    tokens = tokens.transpose(1, 0, 2).reshape(*grid, width)
    if "vq._codebook.embed" not in w:
        return tokens
    codes = w["vq._codebook.embed"].reshape(-1, width)
    unit = codes / np.linalg.norm(codes, axis=1, keepdims=True)
    return codes[(tokens @ unit.T).argmax(-1)]


def _norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def _distance_bias(
    w: Mapping[str, np.ndarray], one: tuple[int, int], other: tuple[int, int]
) -> np.ndarray:
    x = np.array([np.sign(a - b) * np.log(abs(a - b) + 1) for a, b in zip(one, other, strict=True)])
    for layer in ("0.0", "1.0"):
        name = f"spatial_rel_pos_bias.net.{layer}"
        x = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        x = np.where(x > 0, x, 0.1 * x)
    name = "spatial_rel_pos_bias.net.2"
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _ctvit_layers(
    w: Mapping[str, np.ndarray],
    prefix: str,
    x: np.ndarray,
    grid: tuple[int, ...],
    heads: int,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Parts (M, K, D) of one volume through a Transformer; `bias` is (K, K, heads)."""
    width = x.shape[2]
    start = f"{prefix}layers."
    depth = len({key.removeprefix(start).split(".")[0] for key in w if key.startswith(start)})
    for layer in range(depth):
        name = f"{start}{layer}."
        cells = np.zeros((grid[0] + 2, grid[1] + 2, grid[2] + 2, width))
        cells[2:, 1:-1, 1:-1] = x.reshape(*grid, width)
        kernel = w[f"{name}0.dsconv.weight"][:, 0]
        mixed = np.zeros((*grid, width))
        for t, i, j in np.ndindex(*grid):
            block = cells[t : t + 3, i : i + 3, j : j + 3]
            mixed[t, i, j] = np.einsum("abcd,dabc->d", block, kernel)
        x = x + (mixed + w[f"{name}0.dsconv.bias"]).reshape(x.shape)
        x = x + np.stack([_cosine_attention(w, f"{name}1.", part, heads, bias) for part in x])
        y = _norm(x, w[f"{name}3.0.weight"], w[f"{name}3.0.bias"]) @ w[f"{name}3.1.weight"].T
        value, gate = np.split(y, 2, axis=2)
        gate = gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        x = x + (gate * value) @ w[f"{name}3.4.weight"].T
    return _norm(x, w[f"{prefix}norm_out.gamma"], 0.0)


def _cosine_attention(
    w: Mapping[str, np.ndarray], name: str, x: np.ndarray, heads: int, bias: np.ndarray | None
) -> np.ndarray:
    normed = _norm(x, w[f"{name}norm.gamma"], 0.0)
    query = np.split(normed @ w[f"{name}to_q.weight"].T, heads, axis=1)
    key, value = (
        np.split(each, heads, axis=1)
        for each in np.split(x @ w[f"{name}to_kv.weight"].T, 2, axis=1)
    )
    outputs = []
    for head in range(heads):
        q, k = (
            each[head] / np.linalg.norm(each[head], axis=1, keepdims=True) for each in (query, key)
        )
        logits = 8 * (q * w[f"{name}q_scale"]) @ (k * w[f"{name}k_scale"]).T
        logits = logits if bias is None else logits + bias[:, :, head]
        share = np.exp(logits - logits.max(1, keepdims=True))
        outputs.append(share / share.sum(1, keepdims=True) @ value[head])
    return np.concatenate(outputs, axis=1) @ w[f"{name}to_out.weight"].T


def primus_tokens(
    state: Mapping[str, Tensor], volume_XYZ: np.ndarray, *, heads: int, patch: int
) -> np.ndarray:
    """Return the patches (a, b, c, D) of a volume of Hounsfield units along the axes of the file
    by COLIPRI's released forward pass, from weights by the names of its code
    (`image_encoder.backbone.` without its prefix).
    """
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    values = np.clip(volume_XYZ.astype(float), -1000, 1000) / 1000
    grid = tuple(side // patch for side in values.shape)
    filters = w["down_projection.proj.weight"][:, 0]
    tokens, places = [], []
    for a, b, c in np.ndindex(*grid):
        start = [patch * place for place in (a, b, c)]
        cube = values[tuple(slice(first, first + patch) for first in start)]
        tokens.append((filters * cube).sum((1, 2, 3)) + w["down_projection.proj.bias"])
        places.append((a, b, c))
    x = np.stack(tokens)
    third = x.shape[1] // heads // 6
    angles = np.array(
        [
            [place / 10000 ** (band / third) for place in each for band in range(third)]
            for each in places
        ]
    )
    depth = len({key.split(".")[2] for key in w if key.startswith("eva.blocks.")})
    for index in range(depth):
        b = {
            key.removeprefix(f"eva.blocks.{index}."): value
            for key, value in w.items()
            if key.startswith(f"eva.blocks.{index}.")
        }
        x = x + b["gamma_1"] * _primus_attention(b, x, heads, angles)
        y = _norm(x, b["norm2.weight"], b["norm2.bias"])
        gate = y @ b["mlp.fc1_g.weight"].T + b["mlp.fc1_g.bias"]
        inner = y @ b["mlp.fc1_x.weight"].T + b["mlp.fc1_x.bias"]
        inner = gate / (1 + np.exp(-gate)) * inner
        inner = _norm(inner, b["mlp.norm.weight"], b["mlp.norm.bias"])
        x = x + b["gamma_2"] * (inner @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"])
    return _norm(x, w["eva.norm.weight"], w["eva.norm.bias"]).reshape(*grid, -1)


def _primus_attention(
    b: Mapping[str, np.ndarray], x: np.ndarray, heads: int, angles: np.ndarray
) -> np.ndarray:
    y = _norm(x, b["norm1.weight"], b["norm1.bias"])
    query = y @ b["attn.q_proj.weight"].T + b["attn.q_proj.bias"]
    key = y @ b["attn.k_proj.weight"].T
    value = y @ b["attn.v_proj.weight"].T + b["attn.v_proj.bias"]
    outputs = []
    for part in np.split(np.arange(x.shape[1]), heads):
        turned = []
        for vectors in (query[:, part], key[:, part]):
            pairs = vectors[:, 0::2] + 1j * vectors[:, 1::2]  # pairs of channels as complex numbers
            turned.append(pairs * np.exp(1j * angles))
        logits = (turned[0] @ turned[1].conj().T).real / math.sqrt(len(part))
        share = np.exp(logits - logits.max(1, keepdims=True))
        outputs.append(share / share.sum(1, keepdims=True) @ value[:, part])
    out = _norm(np.concatenate(outputs, 1), b["attn.norm.weight"], b["attn.norm.bias"])
    return out @ b["attn.proj.weight"].T + b["attn.proj.bias"]


def mean_query_pool(state: Mapping[str, Tensor], tokens: np.ndarray, heads: int) -> np.ndarray:
    """Return the attention of the mean of tokens (N, D) to them, by the names of
    `nn.MultiheadAttention`.
    """
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    query, key, value = (
        x @ weight.T + bias
        for x, weight, bias in zip(
            (tokens.mean(0, keepdims=True), tokens, tokens),
            np.split(w["in_proj_weight"], 3),
            np.split(w["in_proj_bias"], 3),
            strict=True,
        )
    )
    outputs = []
    for part in np.split(np.arange(tokens.shape[1]), heads):
        logits = query[:, part] @ key[:, part].T / math.sqrt(len(part))
        share = np.exp(logits - logits.max())
        outputs.append(share / share.sum() @ value[:, part])
    return np.concatenate(outputs, 1)[0] @ w["out_proj.weight"].T + w["out_proj.bias"]
