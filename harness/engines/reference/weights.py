"""Read tensors out of a Hugging Face folder, one at a time, checked against the expected shape.

Knows single files and sharded indexes, plain or W12 (decoded as they are read); never holds more
than the tensors that were asked for. Keeps matrices packed where that is asked for.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specpilot.errors import InvalidInput, NotFound
from specpilot.harness.engines.reference.config import read_json
from specpilot.mechanisms.w12.container import KEY
from specpilot.mechanisms.w12.tensors import PackedWeight, W12Tensors

__all__ = ["Weight", "WeightFolder", "by_input", "linear"]

Weight = Tensor | PackedWeight


def by_input(weight: Tensor) -> Tensor:
    """Lay a matrix [out, in] out by input on a CPU; its shape stays.

    A product with one row then adds up rows of the stored matrix as they stream by, which MKL does
    in half the time of dot products with them; with more rows it is at least as fast.
    """
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``F.linear``; a packed weight is decoded for it, so that both give the same bits."""
    return F.linear(x, weight if isinstance(weight, Tensor) else weight.unpack().t(), bias)


class WeightFolder:
    """The safetensors of one folder. Raises ``NotFound`` or ``InvalidInput`` when it opens.

    A header or a length that does not fit the file (a download that broke off) is found on opening.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, packed: bool = False
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.packed: int | None = 0 if packed else None  # how many matrices are kept packed
        index = folder / "model.safetensors.index.json"
        table: dict[str, str] = {}
        if index.exists():
            table = read_json(index).get("weight_map") or {}
            if not isinstance(table, dict) or not table:
                raise InvalidInput(f"{index}: weight_map is missing or empty.")
        self._where: dict[str, Any] = {}
        for file in sorted(set(table.values())) or ["model.safetensors"]:
            opened = self._open_file(folder / file)
            self._where |= dict.fromkeys(opened.keys(), opened)
        if lost := sorted(set(table) - set(self._where)):
            raise InvalidInput(f"{index} lists {lost[0]!r}, which {table[lost[0]]} does not hold.")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return tensor ``name`` on the folder's device, in ``dtype`` (the folder's by default).

        Raises ``NotFound`` where it is missing and ``InvalidInput`` where it has another shape.
        """
        if name not in self._where:
            raise NotFound(f"{self.folder} holds no tensor {name!r}, which its config calls for.")
        tensor: Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InvalidInput(
                f"{self.folder}: tensor {name!r} is {tuple(tensor.shape)}, "
                f"the config calls for {shape}."
            )
        return tensor.to(self.device, dtype or self.dtype)

    def keep(self, weight: Tensor) -> Weight:
        """Return a matrix as the model is to hold it: laid out for products, or packed in W12."""
        if self.packed is None:
            return by_input(weight)
        self.packed += 1
        return PackedWeight(weight.t())

    @staticmethod
    def _open_file(path: Path) -> Any:
        if not path.is_file():
            raise NotFound(f"weights file {path} does not exist.")
        try:
            opened = safe_open(path, framework="pt")
            return W12Tensors(path) if KEY in (opened.metadata() or {}) else opened
        except SafetensorError as error:
            raise InvalidInput(
                f"weights file {path} is truncated or malformed ({error}).",
                hint="Copy or download it again.",
            ) from error
