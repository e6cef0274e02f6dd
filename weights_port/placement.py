"""Where the frozen model lives: on one device, or layer by layer over all GPUs and the CPU's memory (accelerate).

Spread out, a layer runs on the GPU that holds it; what no GPU has room for stays on the CPU and is copied to the first GPU
each time it is used, which is slow but works.  Left out: offloading to disk.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from weights_port.checkpoints import EncoderError

if TYPE_CHECKING:
    import torch

SPREAD = "spread"


@dataclasses.dataclass(frozen=True)
class Placement:
    """A device for everything, or `spread`."""

    device: torch.device
    """Takes the tokens and gives the hidden states."""
    spread: bool = False
    gigabytes: float | None = None
    """Most of each GPU's memory that weights may take when spread; None leaves it to accelerate."""

    def options(self) -> dict[str, Any]:
        """Arguments of transformers' from_pretrained."""
        if not self.spread:
            return {} if self.device.type == "cpu" else {"device_map": {"": self.device}}
        if self.gigabytes is None:
            return {"device_map": "auto"}
        import torch
        from accelerate.utils import get_max_memory

        limit = int(self.gigabytes * 1e9)
        limits = {gpu: limit for gpu in range(torch.cuda.device_count())}
        return {"device_map": "auto", "max_memory": get_max_memory() | limits}

    def __str__(self) -> str:
        return "all GPUs and the CPU's memory" if self.spread else str(self.device)


def resolve_placement(device: str, gigabytes: float | None = None) -> Placement:
    """ "auto" is CUDA where there is one; "spread" needs a GPU to run on."""
    import torch

    if device == SPREAD:
        if not torch.cuda.is_available():
            raise EncoderError(
                f"encoder_device='spread' needs a GPU, and PyTorch {torch.__version__} sees none here; use auto or cpu"
            )
        return Placement(torch.device("cuda", 0), True, gigabytes)
    if device == "auto":
        return Placement(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise EncoderError(f"device={device!r} is unknown; use auto, cpu, cuda, cuda:N or spread") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise EncoderError(f"device={device!r}: PyTorch {torch.__version__} sees no GPU here; use device=cpu or auto")
    return Placement(target)
