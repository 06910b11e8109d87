"""Clusters: equal devices on equal nodes, and the links between them, each figure with its source."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.errors import CatalogError, InvalidSetupError, UnknownDeviceError, near_matches
from forerun.base.tables import checked_table, read_toml
from forerun.question.devices.catalogue import find_device, index_by_key, matching_devices, name_key
from forerun.question.devices.device import Device, LinkKind

_SPEC = re.compile(r"(?:(\d+)\s*[x*×]\s*)?(\d+)\s*[x*×]\s*(.+)", re.IGNORECASE)
_COUNT_BEHIND = re.compile(r"(.+?)\s*[x*×]\s*(-?\d+)", re.IGNORECASE)
_SIGNED = re.compile(r"\s*-\s*\d+\s*x|\d+\s*x\s*-\s*\d+\s*x", re.IGNORECASE)
_RAILS = re.compile(r"(\d+)\s*x\s*(.+)", re.IGNORECASE)
MOST_DEVICES = 100_000
"""Largest number of devices accepted: no job has trained on more, so a larger one is a typing error."""
_BOARDS = Path(__file__).parent / "boards.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes x devices with two kinds of link.

    Attributes:
        device: Device that every node is filled with.
        num_nodes: Number of machines.
        num_devices_per_node: Number of devices in each machine.
        intra_link: Link between devices of a node; None for one device, or if the link is not known.
        inter_link: Link between nodes as one node sees it; None if there is one node or the link is not known.
        num_inter_links: Number of links between nodes that a node uses at the same time ("rails").
    """

    device: Device
    num_nodes: int = 1
    num_devices_per_node: int = 1
    intra_link: Link | None = None
    inter_link: Link | None = None
    num_inter_links: int = 1

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_devices_per_node", "num_inter_links"):
            if getattr(self, name) < 1:
                raise InvalidSetupError(
                    f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}; give a positive number"
                )
        check_num_devices(self.num_devices)

    @property
    def num_devices(self) -> int:
        """Number of devices in the cluster."""
        return self.num_nodes * self.num_devices_per_node

    @property
    def spec(self) -> str:
        """Text that names the cluster: ``t4``, ``8xt4`` or ``4x8xh100-sxm``."""
        return joined_spec(self.num_nodes, self.num_devices_per_node, self.device.name)

    def with_devices(self, num_devices: int, num_nodes: int | None = None) -> Cluster:
        """The same machines with another number of devices: whole nodes are filled one after the other.

        Args:
            num_devices: Number of devices in all.
            num_nodes: Number of nodes the devices are on; None for the fewest that hold them.

        Raises:
            InvalidSetupError: The devices cannot be spread evenly over the nodes.
        """
        check_num_devices(num_devices)
        nodes = num_nodes or max(1, -(-num_devices // self.num_devices_per_node))
        if num_devices % nodes:
            raise InvalidSetupError(
                f"{num_devices} devices cannot be spread evenly over {nodes} nodes; "
                f"give a multiple of {nodes}, or another number of nodes"
            )
        # A device alone has not been asked for the link of its board.
        link = link_of_board(self.device) if self.num_devices == 1 < num_devices else None
        return replace(
            self,
            num_nodes=nodes,
            num_devices_per_node=num_devices // nodes,
            intra_link=self.intra_link or link,
        )


def check_num_devices(num_devices: int) -> None:
    """Raise ``InvalidSetupError`` for a number of devices below 1 or above any real cluster."""
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    if num_devices > MOST_DEVICES:
        raise InvalidSetupError(
            f"the number of devices must be at most {MOST_DEVICES:,}, got {num_devices:,}; give a smaller number"
        )


def parse_cluster(spec: str, *, intra: str | None = None, inter: str | None = None) -> Cluster:
    """The cluster named by ``4x8xh100-sxm`` (nodes x devices x name), ``8xt4``, a device name, or a TOML file.

    Args:
        spec: Text that names the cluster, or the path of a TOML file with a ``[cluster]`` table: ``device``,
            ``num_nodes``, ``num_devices_per_node``, ``intra_link`` and ``inter_link``.
        intra: Name of the link inside a node, in place of the one that the board's form fixes.
        inter: Name of the link between nodes, with a number of rails in front if wanted: ``8xinfiniband-hdr``.

    Raises:
        InvalidSetupError: A number of nodes or devices is below 1 or too large.
        UnknownDeviceError: There is no such device or link.
        CatalogError: The file is not a usable description.
    """
    text = spec.strip()
    if text.lower().endswith(".toml") and _is_cluster_file(Path(text).expanduser()):
        return _of_file(Path(text).expanduser(), intra, inter)
    nodes, devices, name = (0, 0, text) if _SIGNED.match(text) else split_spec(text)
    if nodes < 1 or devices < 1:
        raise InvalidSetupError(
            f"numbers of nodes and devices must be at least 1, got '{spec}'; give NxMxDEVICE"
        )
    return cluster_of(find_device(name, prefer_sxm=True), nodes, devices, intra=intra, inter=inter)


def joined_spec(num_nodes: int, num_devices_per_node: int, name: str) -> str:
    """Text of ``--on`` for one kind of machine, which ``split_spec`` takes apart.

    >>> joined_spec(4, 8, "h100-sxm"), joined_spec(1, 8, "t4"), joined_spec(1, 1, "t4")
    ('4x8xh100-sxm', '8xt4', 't4')
    """
    if num_nodes > 1:
        return f"{num_nodes}x{num_devices_per_node}x{name}"
    return f"{num_devices_per_node}x{name}" if num_devices_per_node > 1 else name


def split_spec(text: str) -> tuple[int, int, str]:
    """Number of nodes, devices per node, and name of the device of one kind of machine.

    >>> split_spec("4x8xh100-sxm"), split_spec("8xt4"), split_spec("t4")
    ((4, 8, 'h100-sxm'), (1, 8, 't4'), (1, 1, 't4'))

    A number behind the name, ``t4x8``, is understood as well.

    Raises:
        InvalidSetupError: The text joins several kinds by a plus, but one kind is expected.
    """
    if matching_devices(text) or text.lower() == "here":
        return 1, 1, text
    if "+" in text:
        raise InvalidSetupError(
            f"a run uses devices of one kind, got '{text}'; kinds joined by '+' make the cluster of forerun schedule"
        )
    found = _SPEC.fullmatch(text)
    if found is not None:
        return int(found[1] or 1), int(found[2]), found[3]
    behind = _COUNT_BEHIND.fullmatch(text)
    # ``here`` with a number and names of the catalogue only: a device's own name may end in an x and a number.
    if behind is not None and (matching_devices(behind[1]) or behind[1].lower() == "here"):
        return 1, int(behind[2]), behind[1]
    return 1, 1, text


def cluster_of(
    device: Device,
    num_nodes: int,
    num_devices_per_node: int,
    *,
    intra: str | None = None,
    inter: str | None = None,
) -> Cluster:
    """A cluster of one kind of device; a link without a name is the one the board's form fixes, or None."""
    rails, inter_link = parse_link(inter) if inter else (1, None)
    of_board = link_of_board(device) if num_nodes * num_devices_per_node > 1 else None
    return Cluster(
        device=device,
        num_nodes=num_nodes,
        num_devices_per_node=num_devices_per_node,
        intra_link=find_link(intra) if intra else of_board,
        inter_link=inter_link,
        num_inter_links=rails,
    )


@cache
def _boards() -> Mapping[str, Mapping[str, str]]:
    """Names of links by form of board: those between boards, and those to the host."""
    return read_toml(_BOARDS, "board")


def link_of_board(device: Device) -> Link | None:
    """The link that the form of a board fixes; None if machines with this board have different links.

    SXM boards sit on a carrier that joins them by NVLink. Boards in PCIe slots communicate over the slots;
    a bridge between two boards is an extra that the user must name.
    """
    known = _boards()["between_boards"]
    name = known.get(f"{device.architecture} {device.bus}") or known.get(device.bus)
    return load_links()[name] if name else None


def host_link(device: Device) -> Link:
    """The link between a board and the memory of its host.

    Raises:
        InvalidSetupError: It is not known, or the device has no memory of its own.
    """
    if device.bus.startswith("PCIe"):
        found = link_of_board(device)
    else:
        name = _boards()["to_host"].get(device.bus)
        found = load_links()[name] if name else None
    if found is None:
        raise InvalidSetupError(
            f"the link of {device.title} to the memory of its host is not known ({device.bus}); leave --offload out"
        )
    return found


def parse_link(text: str) -> tuple[int, Link]:
    """Number of parallel links, and the link, named by ``8xinfiniband-hdr`` or ``ethernet-25g``."""
    found = _RAILS.fullmatch(text.strip())
    if found is None:
        return 1, find_link(text)
    if int(found[1]) < 1:
        raise InvalidSetupError(
            f"the number of links must be at least 1, got '{text}'; give one such as 8xinfiniband-hdr"
        )
    return int(found[1]), find_link(found[2])


def _is_cluster_file(path: Path) -> bool:
    try:
        return "cluster" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # the same file is read as a device next, which reports the error


def _of_file(path: Path, intra: str | None, inter: str | None) -> Cluster:
    from forerun.question.devices.rows import ClusterRow

    row = checked_table(read_toml(path, "cluster")["cluster"], ClusterRow, f"{path}, [cluster]")
    beside = path.parent / row.device
    # A file names its neighbours as seen from its own folder, wherever the command runs.
    found = find_device(str(beside) if row.device.endswith(".toml") and beside.is_file() else row.device)
    return cluster_of(
        found,
        row.num_nodes,
        row.num_devices_per_node,
        intra=intra or row.intra_link,
        inter=inter or row.inter_link,
    )


def require_link(link: Link | None, between: str, option: str, example: str = "") -> Link:
    """The link; an unknown one raises an error that asks for it, because a topology is not guessed.

    Args:
        link: The link, None if it is not known.
        between: What it joins, in words.
        option: The option that names it.
        example: A link as an example, with a space before it.

    Raises:
        UnknownDeviceError: The link is not known.
    """
    if link is None:
        raise UnknownDeviceError(
            f"expected the link between {between}, but it is not known; name it with {option}{example}, "
            f"one of {', '.join(load_links())}, or a TOML file"
        )
    return link


def example_network(device: Device) -> str:
    """The network of NVIDIA's machines with this board as an example for ``--inter``, with a space before it; or none.

    >>> from forerun.question.devices.catalogue import find_device
    >>> example_network(find_device("h100-sxm")), example_network(find_device("t4"))
    (' 8xinfiniband-ndr (as in a DGX)', '')
    """
    found = _boards()["network"].get(device.bus)
    return f" {found} (as in a DGX)" if found else ""


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


_FOLDER = Path(__file__).parent / "link_catalog"
# Key in the file -> (field of Link, SI value of one unit).
_FIGURES: Mapping[str, tuple[str, float]] = {
    "bandwidth_gb_s": ("bandwidth_bytes_per_s", 1e9),
    "usable_share": ("usable_share", 1.0),
    "latency_us": ("latency_s", 1e-6),
}


@cache
def load_links() -> Mapping[str, Link]:
    """All links shipped with the package by catalogue name; the mapping is shared, do not change it."""
    links = [
        _link(table) for path in sorted(_FOLDER.glob("*.toml")) for table in read_toml(path, "link")["link"]
    ]
    if not links:
        raise CatalogError("the catalogue of links is missing from this installation; reinstall forerun")
    return {link.name: link for link in links}


def find_link(name: str) -> Link:
    """The link with this name: a catalogue name, another spelling of it, or the path of a TOML file with one link.

    Raises:
        UnknownDeviceError: No link has this name; the message lists similar names.
        CatalogError: The file is not a usable description.

    >>> find_link("NVLink 3").name
    'nvlink-3'
    """
    if name.strip().lower().endswith(".toml"):
        return load_link_file(name.strip())
    found = _names_by_key().get(name_key(name))
    if found is None:
        near = near_matches(name, load_links())
        raise UnknownDeviceError(
            f"expected a link of the catalogue or a TOML file, got '{name}'"
            f"{near or '; known are ' + ', '.join(load_links())}"
        )
    return load_links()[found]


@cache
def _names_by_key() -> Mapping[str, str]:
    return index_by_key({link.name: (link.name, *link.aliases) for link in load_links().values()})


def load_link_file(path: str | Path) -> Link:
    """The one link of a user's TOML file, in a ``[link]`` or ``[[link]]`` table."""
    if not Path(path).expanduser().is_file():
        raise UnknownDeviceError(f"expected a link file at '{path}', but there is none; check the path")
    links = parse_links(read_toml(Path(path).expanduser(), "link"), str(path))
    if len(links) != 1:
        raise CatalogError(f"{path}: expected one link, got {len(links)}; keep one [link] table per file")
    return links[0]


def parse_links(document: Mapping[str, Any], where: str) -> tuple[Link, ...]:
    """All links of a parsed document, each checked; ``where`` names it in messages."""
    from forerun.question.devices.rows import LinkRow, named_tables

    found = []
    for table, place in named_tables(document, "link", where):
        checked_table(table, LinkRow, place)
        for key in _FIGURES:
            if key not in table["sources"]:
                raise CatalogError(f"{place}: '{key}' has no source; add sources.{key}")
        found.append(_link(table))
    return tuple(found)


def _link(table: Mapping[str, Any]) -> Link:
    """A link from a table that was checked, its figures in SI units."""
    figures: dict[str, Any] = {field: float(table[key]) * unit for key, (field, unit) in _FIGURES.items()}
    return Link(
        name=table["name"],
        title=table["title"],
        kind=LinkKind(table["kind"]),
        aliases=tuple(table.get("aliases", ())),
        sources={field: table["sources"][key] for key, (field, _) in _FIGURES.items()},
        **figures,
    )
