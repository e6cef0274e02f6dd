"""Documents as windows of t tokens."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Windows:
    """Text as n windows of t tokens; positions from `lengths` on are padding and repeat the EOS id."""

    ids: Int[np.ndarray, "n t"]
    lengths: Int[np.ndarray, n]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def hash(self) -> str:
        """sha256 over shape, ids and lengths."""
        digest = hashlib.sha256(repr(self.ids.shape).encode())
        digest.update(np.ascontiguousarray(self.ids, np.int32))
        digest.update(np.ascontiguousarray(self.lengths, np.int32))
        return digest.hexdigest()
