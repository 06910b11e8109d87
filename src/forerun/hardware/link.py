"""What joins devices: links with a usable bandwidth and a latency, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Link", "LinkKind"]


class LinkKind(StrEnum):
    """The sort of link, as far as libraries of collectives tell them apart."""

    NVLINK = "nvlink"
    """NVLink and other direct links of accelerators."""
    PCIE = "pcie"
    """PCI Express, through switches or the host."""
    NETWORK = "network"
    """InfiniBand or Ethernet between machines."""
    HOST = "host"
    """Processes of one machine that meet in its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link as one device sees it: what it can send while it receives as much.

    Attributes:
        name: Catalogue name, such as ``nvlink-3``.
        title: Name as people write it.
        kind: What sort of link it is.
        bandwidth_bytes_per_s: Datasheet rate of one direction [bytes/s].
        usable_share: Share of it that a ring of large messages reaches, in (0, 1].
        latency_s: Time of one hop of a small message [s].
        aliases: Other spellings.
        sources: Source of each figure, by field name.
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
