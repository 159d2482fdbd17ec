"""Books of queries: vectors of fixed sentences, encoded once by a frozen text encoder and saved with the model."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medvl.errors import CheckpointError


class QueryBook(nn.Module):
    """Vectors of sentences, (Q, D), and the hash of these sentences: buffers that move and are saved with the model.

    Released systems keep such vectors as plain tensors, so that another text encoder silently gives other queries.

    Args:
        sentences: in the order of the rows.
        dim: D.
    """

    written_once: ClassVar[bool] = True
    """Buffers do not depend on a training step: one that is skipped leaves them (`BufferGuard`)."""

    def __init__(self, sentences: Sequence[str], dim: int) -> None:
        super().__init__()
        self.sentences = tuple(sentences)
        self._digest = hashlib.sha256("\n".join(self.sentences).encode()).digest()
        self.register_buffer("vectors_QD", torch.zeros(len(self.sentences), dim))
        self.register_buffer("sha256", torch.zeros(len(self._digest), dtype=torch.uint8))
        self.vectors_QD: Tensor
        self.sha256: Tensor
        self._is_checked = False
        self.register_load_state_dict_post_hook(_check_again)

    def fill(self, encode: Callable[[Sequence[str]], Tensor]) -> None:
        """Encode the sentences unless the book has them already.

        Raises CheckpointError where the loaded vectors belong to other sentences.
        """
        if self._is_checked:
            return
        expected = torch.tensor(list(self._digest), dtype=torch.uint8)
        if not self.sha256.any():
            with torch.no_grad():
                self.vectors_QD.copy_(encode(self.sentences))
            self.sha256.copy_(expected)
        elif not torch.equal(self.sha256.cpu(), expected):
            message = "the saved queries are those of other sentences: load the checkpoint with its own settings"
            raise CheckpointError(message, "mismatch", field="entities")
        self._is_checked = True


def _check_again(book: Any, incompatible_keys: Any) -> None:
    """Let `fill` look at the vectors that were loaded: a checkpoint from before the first batch has none."""
    book._is_checked = False
