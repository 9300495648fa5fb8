"""W12 as torch tensors: files read like plain ones, matrices kept packed until they are used."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from specpilot.errors import InvalidInput
from specpilot.mechanisms.w12.codec import W12Matrix, decode, encode
from specpilot.mechanisms.w12.container import W12Shard

__all__ = ["PackedWeight", "W12Tensors", "from_bits"]


def from_bits(bits: np.ndarray) -> Tensor:
    """View BF16 patterns, uint16 of any shape, as a bfloat16 tensor."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class W12Tensors:
    """A W12 file with the ``keys`` and ``get_tensor`` of ``safetensors.safe_open``, decoded.

    Every matrix is checked against its checksum as it is read (``CheckFailed``).
    """

    def __init__(self, path: Path) -> None:
        self._shard = W12Shard(path)
        self._plain: Any = safe_open(path, framework="pt")

    def keys(self) -> list[str]:
        """Names of matrices and of everything that the file stores."""
        return [*self._shard.matrices, *self._plain.keys()]

    def get_tensor(self, name: str) -> Tensor:
        if name in self._shard.matrices:
            return from_bits(self._shard.bits(name))
        return self._plain.get_tensor(name)


class PackedWeight:
    """A matrix [rows, columns] of BF16 values kept in W12 on the CPU; ``unpack`` decodes all of it.

    Raises ``InvalidInput`` for a tensor with values that BF16 does not hold.
    """

    def __init__(self, weight: Tensor) -> None:
        narrow = weight.to(torch.bfloat16)
        if not torch.equal(narrow.to(weight.dtype), weight):
            raise InvalidInput(
                "weights 'w12' needs weights that are BF16 values; these lose bits in BF16.",
                hint="Keep them plain, or use a BF16 checkpoint.",
            )
        self.dtype = weight.dtype
        bits = narrow.contiguous().view(torch.int16).numpy().view(np.uint16)
        self.matrix: W12Matrix = encode(bits)

    def unpack(self) -> Tensor:
        """Return the matrix in the dtype it came in."""
        return from_bits(decode(self.matrix)).to(self.dtype)
