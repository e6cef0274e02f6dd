"""The feed of training: endless batches of a hidden-state cache, shuffled anew each epoch, by Grain.

Grain shuffles and batches indices alone, which costs microseconds, and its threads gather a batch each from the memory
map, ahead of the step.  Where the loader stands is one number, exact whatever has been prefetched.  Batches are always
whole: windows left at the end of an epoch share a batch with the next, and a cache smaller than a batch repeats.
Left out on purpose: worker processes, since threads already copy at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from jdllm.data.cache import Batch, HiddenStateCache
from jdllm.data.text import DataError


class TokensOnly:
    """A cache without its hidden states, which are never read from the disk: the same windows for models of tokens."""

    def __init__(self, cache: HiddenStateCache) -> None:
        self._cache, self.hash = cache, cache.hash

    def __len__(self) -> int:
        return len(self._cache)

    def gather(self, indices: Sequence[int] | Int[np.ndarray, " b"]) -> Batch:
        """ids (b, t) int32 and lengths (b,) int32."""
        rows = np.asarray(indices, np.int64)
        return {"ids": np.asarray(self._cache.ids[rows]), "lengths": np.asarray(self._cache.lengths[rows])}


class BatchLoader:
    """Iterator of batches (see HiddenStateCache.gather); the order follows from seed alone.

    get_state() after n batches, handed to set_state of a loader with the same arguments, makes it go on with batch n + 1.
    `own_rows` of each batch are loaded, for one of several processes; which windows make a batch, and where the loader
    stands, do not depend on it.
    """

    def __init__(
        self,
        cache: HiddenStateCache | TokensOnly,
        batch_size: int,
        seed: int,
        prefetch: int = 4,
        own_rows: slice = slice(None),
    ) -> None:
        if batch_size < 1:
            raise DataError(f"training.batch_size={batch_size} is too small; the least is 1")
        self._identity = {"cache": cache.hash, "batch_size": batch_size, "seed": seed}
        # Grain's shuffle numbers epochs by adding to its seed: without this, epoch 1 of seed 0 were epoch 0 of seed 1.
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        dataset = grain.MapDataset.range(len(cache)).shuffle(seed=shuffle_seed).repeat()
        dataset = dataset.batch(batch_size, batch_fn=np.array).map(lambda indices: cache.gather(indices[own_rows]))
        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Position as JSON-able values."""
        return {**self._identity, "grain": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position; DataError if it is one of another cache, batch size or seed."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the data position was saved with {name}={state.get(name)!r}, but this run has {value!r}; "
                    f"resume with the settings of the run, or start a new one under another name"
                )
        self._iterator.set_state(state["grain"])

    def close(self) -> None:
        """Stop the threads; the loader is of no use after that."""
        self._iterator.close()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
