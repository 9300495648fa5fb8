"""Committed state of all requests: KV caches, GDN memories and convolution inputs, by slot.

Running requests occupy slots 0, 1, ... without gaps, so a batch is a slice and nothing is gathered.
``move`` closes the gap that a finished request leaves.
"""

import torch
from torch import Tensor

from specpilot.harness.engines.reference.config import TargetConfig
from specpilot.harness.engines.reference.gdn import GdnState
from specpilot.harness.engines.reference.layers import KvCache
from specpilot.harness.engines.reference.rows import Rows

__all__ = ["StatePool"]


class StatePool:
    """State of ``slots`` requests of up to ``capacity`` cache rows each, allocated once.

    ``capacity`` counts committed tokens and the rows of one pass on top.
    """

    def __init__(
        self,
        config: TargetConfig,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        kv_layers = config.layer_types.count("full_attention")
        kv_shape = (kv_layers, slots, capacity, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(kv_shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.kv = [KvCache(k, v) for k, v in zip(self.keys, self.values, strict=True)]
        # Slot-major: the state that a commit of slots 0 to R - 1 updates lies in one piece.
        self.memory = torch.zeros(slots, 0, device=device)
        self.conv = torch.zeros(slots, 0, dtype=dtype, device=device)
        if (gdn := config.gdn) is not None:
            layers = config.layer_types.count("linear_attention")
            wide = torch.promote_types(dtype, torch.float32)
            shape = (slots, layers, gdn.value_heads, gdn.key_dim, gdn.value_dim)
            self.memory = torch.zeros(shape, dtype=wide, device=device)
            self.conv = torch.zeros(
                (slots, layers, gdn.conv_width - 1, gdn.conv_channels), dtype=dtype, device=device
            )

    def gdn(self, layer: int, rows: Rows) -> GdnState:
        """Views of GDN layer ``layer`` (counted among GDN layers) for the rows' slots."""
        return GdnState(self.memory[rows.slots, layer], self.conv[rows.slots, layer])

    def clear(self, slot: int) -> None:
        """Make ``slot`` empty. Its KV rows are never read beyond its length, so they stay."""
        self.memory[slot] = 0
        self.conv[slot] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the state of ``source``, with its ``length`` tokens, to ``target``."""
        self.memory[target] = self.memory[source]
        self.conv[target] = self.conv[source]
        for cache in (self.keys, self.values):
            cache[:, target, :length] = cache[:, source, :length]

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copies of one slot's committed state, for comparison."""
        return {
            "keys": self.keys[:, slot, :length].clone(),
            "values": self.values[:, slot, :length].clone(),
            "memory": self.memory[slot].clone(),
            "conv": self.conv[slot].clone(),
        }
