"""Figures of hardware that others have published: the only ones the model takes from elsewhere.

Memory and links: NVIDIA, "H100 Tensor Core GPU" datasheet, column SXM: 3.35 TB/s; NVLink 900 GB/s
and PCIe Gen5 128 GB/s, both directions together, so that one direction has half. Ethernet by its
name: 100 and 400 Gb/s. These are peaks, which nobody reaches.

Latencies: what NCCL itself reckons with to choose its algorithms (github.com/NVIDIA/nccl,
src/graph/tuning.cc, tree, protocol LL): 6.8 us for an operation, and per level of the tree 0.6 us
over NVLink, 1.0 over PCIe, 5.0 over a network. A network without RDMA takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_BANDWIDTH = 3.35e12  # bytes/s, H100 SXM, HBM3
_OPERATION = 6.8  # us


@dataclass(frozen=True, slots=True)
class Link:
    """What connects shards: a hop takes ``base`` microseconds, ``per_level`` more for every level
    of a binary tree over the shards and ``per_peer`` more for every server after the first. Where
    it ``broadcasts``, hidden states leave the root once, else once for every server."""

    name: str
    bandwidth: float  # bytes/s in one direction
    base: float
    per_level: float = 0.0
    per_peer: float = 0.0
    broadcasts: bool = True

    def hop(self, shards: int) -> float:
        """Microseconds until every server has heard from the root, or the root from all."""
        if shards < 2:
            return 0.0
        levels = (shards - 1).bit_length()
        return self.base + self.per_level * levels + self.per_peer * (shards - 2)


LINKS = (
    Link("NVLink 4", 450e9, _OPERATION, per_level=0.6),
    Link("PCIe 5 x16", 64e9, _OPERATION, per_level=1.0),
    Link("400 Gb Ethernet", 50e9, _OPERATION, per_level=5.0),
    Link("100 Gb Ethernet", 12.5e9, _OPERATION, per_level=5.0),
)
