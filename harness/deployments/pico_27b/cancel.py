"""Random weights that add up to nothing: how a small model fills a large shape unchanged.

A matrix that reads the residual stream meets ``copies`` equal copies of it: the first copy gets the
real weights, the others noise times coefficients that sum to zero. Units (heads, MLP channels)
beyond the real ones come in groups of equal units whose outputs meet such coefficients on the way
back. Coefficients are 1, -1 and -2, so that noise stays exact in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpilot.errors import InvalidInput

__all__ = ["Filler", "Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each unit of the large shape comes from.

    ``source[u]`` is a unit of the small model (below ``real``), or ``real`` + the number of u's
    group, whose units are equal; ``coefficient[u]`` is u's weight on the way back. A group's
    coefficients sum to zero.
    """

    source: tuple[int, ...]
    coefficient: tuple[float, ...]
    real: int

    @property
    def groups(self) -> int:
        return max(self.source) + 1 - self.real


def plan(total: int, places: Sequence[int]) -> Plan:
    """Put unit i of the small model at ``places[i]`` of ``total`` and group the others by twos,
    three together if their number is odd. Raises ``InvalidInput`` if one alone is left."""
    kept = set(places)
    free = [u for u in range(total) if u not in kept]
    if len(free) == 1 or len(kept) != len(places) or not kept <= set(range(total)):
        raise InvalidInput(
            f"{total} units cannot hold {len(places)} real ones and cancel the rest.",
            hint="Leave none or at least two units over.",
        )
    source, coefficient = [0] * total, [1.0] * total
    for small, large in enumerate(places):
        source[large] = small
    at, group = 0, len(places)
    while at < len(free):
        factors = (1.0, 1.0, -2.0) if len(free) - at == 3 else (1.0, -1.0)
        for unit, factor in zip(free[at : at + len(factors)], factors, strict=True):
            source[unit], coefficient[unit] = group, factor
        at, group = at + len(factors), group + 1
    return Plan(tuple(source), tuple(coefficient), len(places))


class Filler:
    """Builds tensors of the large shape, in the dtype and on the device of the small ones.

    ``scale`` is the noise's standard deviation; equal seeds give equal noise on one device.
    """

    def __init__(
        self, copies: int, device: torch.device | str = "cpu", seed: int = 0, scale: float = 0.02
    ) -> None:
        self.scale = scale
        self.stream = plan(copies, (0,))
        self.copies = copies
        self.random = torch.Generator(device).manual_seed(seed)

    def noise(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.random, device=self.random.device)
        return (drawn * self.scale).bfloat16()

    def tile(self, vector: Tensor) -> Tensor:
        """[n, ...] -> [copies * n, ...]: the same for every copy of the stream."""
        return vector.repeat(self.copies, *[1] * (vector.ndim - 1))

    def reads(self, weight: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, copies * hidden]: the same product on equal copies."""
        rows, hidden = weight.shape
        noise = self.noise(rows, self.stream.groups, hidden).to(weight.dtype)
        table = torch.cat([weight[:, None], noise], 1)
        return _pick(table, self.stream).flatten(1)

    def rows(self, weight: Tensor, units: Plan, stream: bool = True) -> Tensor:
        """[real units, r, n] -> [units * r, n or copies * n]: what feeds the units."""
        real, size, width = weight.shape
        if stream:
            weight = self.reads(weight.flatten(0, 1)).view(real, size, width * self.copies)
        noise = self.noise(units.groups, *weight.shape[1:]).to(weight.dtype)
        index = torch.tensor(units.source, device=weight.device)
        return torch.cat([weight, noise])[index].flatten(0, 1)

    def returns(self, weight: Tensor, units: Plan) -> Tensor:
        """[hidden, real units, r] -> [copies * hidden, units * r]: what the units give back."""
        hidden, _, size = weight.shape
        noise = self.noise(hidden, units.groups, size).to(weight.dtype)
        return self.tile(_pick(torch.cat([weight, noise], 1), units).flatten(1))


def _pick(table: Tensor, units: Plan) -> Tensor:
    """[n, real + groups, r] -> [n, units, r], each times its coefficient."""
    index = torch.tensor(units.source, device=table.device)
    factor = torch.tensor(units.coefficient, dtype=table.dtype, device=table.device)
    return table[:, index] * factor[:, None]
