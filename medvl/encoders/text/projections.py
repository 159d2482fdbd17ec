"""Projection heads of published text encoders, with the parameter names of their files."""

from torch import Tensor, nn

from medvl.errors import ConfigError


class CxrBertHead(nn.Module):
    """Projection head of BioViL: Linear, GELU, LayerNorm, Linear."""

    def __init__(self, width: int, projected: int) -> None:
        super().__init__()
        self.dense_to_hidden = nn.Linear(width, projected)
        self.LayerNorm = nn.LayerNorm(projected, eps=1e-12)
        self.dense_to_output = nn.Linear(projected, projected)

    def forward(self, text_BD: Tensor) -> Tensor:
        """Map (B, D) to (B, E)."""
        hidden_BE = self.LayerNorm(nn.functional.gelu(self.dense_to_hidden(text_BD)))
        projected_BE: Tensor = self.dense_to_output(hidden_BE)
        return projected_BE


class MatrixHead(nn.Module):
    """Projection head of CLIP: one matrix (D, E), not transposed as in a linear layer."""

    def __init__(self, matrix_DE: nn.Parameter) -> None:
        super().__init__()
        self.matrix = matrix_DE

    def forward(self, text_BD: Tensor) -> Tensor:
        """Map (B, D) to (B, E)."""
        return text_BD @ self.matrix


def text_projection(kind: str, width: int) -> tuple[nn.Module, int]:
    """Return (head, width of its output) for a preset's `projection`, with torch's default initialisation.

    Raises:
        ConfigError: "unknown_name".
    """
    if kind == "cxrbert":
        return CxrBertHead(width, 128), 128
    if kind == "biomedclip":
        projected = 512
        middle = (width + projected) // 2
        layers = nn.Linear(width, middle, bias=False), nn.GELU(), nn.Linear(middle, projected, bias=False)
        return nn.Sequential(*layers), projected
    raise ConfigError(f"unknown projection head {kind!r}", "unknown_name", field="projection")


def knowledge_head(width: int, out: int) -> nn.Sequential:
    """Return BERT's pooler and the head behind it that KAD trains on knowledge, with torch's default initialisation.

    The released code draws the weights of the head from N(0, 1 / `width`).
    """
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))
