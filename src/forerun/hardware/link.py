"""Links between devices: usable bandwidth and latency, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Link", "LinkKind"]


class LinkKind(StrEnum):
    """Sort of link, as libraries of collectives distinguish them."""

    NVLINK = "nvlink"
    """NVLink and other direct links of accelerators."""
    PCIE = "pcie"
    """PCI Express, through switches or the host."""
    NETWORK = "network"
    """InfiniBand or Ethernet between machines."""
    HOST = "host"
    """Memory of one machine that its processes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link as one device sees it: the rate at which it can send while it receives at the same rate.

    Attributes:
        name: Catalogue name, such as ``nvlink-3``.
        title: Name as people write it.
        kind: Sort of link.
        bandwidth_bytes_per_s: Datasheet rate of one direction [bytes/s].
        usable_share: Share of the datasheet rate that a ring reaches with large messages, in (0, 1].
        latency_s: Time of one hop for a small message [s].
        aliases: Other spellings of the name.
        sources: Source of each figure by field name.
    """

    name: str
    title: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    usable_share: float
    latency_s: float
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str]

    @property
    def usable_bytes_per_s(self) -> float:
        """Rate that large messages reach [bytes/s]."""
        return self.bandwidth_bytes_per_s * self.usable_share
