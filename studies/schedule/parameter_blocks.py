"""Assignment of parameters to servers: Optimus' balanced one, compared with MXNet's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.base.errors import InvalidSetupError

SMALL_SHARE = 0.01
"""Blocks below this share of a server's average size are counted, not weighed. Source: Optimus, section 5.3."""

MXNET_THRESHOLD = 1_000_000
"""Parameters from which MXNet splits a block over all servers, ``MXNET_KVSTORE_BIGARRAY_BOUND``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBalance:
    """Evenness of an assignment.

    Attributes:
        size_gap: Largest less smallest number of parameters of a server.
        request_gap: Largest less smallest number of requests (blocks or slices) of a server.
        num_requests: Requests of all servers in a step.
    """

    size_gap: int
    request_gap: int
    num_requests: int


def assign_blocks(sizes: Sequence[int], num_servers: int) -> list[list[int]]:
    """Sizes of the blocks, or slices of them, that each server holds.

    In order of size, largest first: a block above the average of a server is sliced to that size; one above 1 % of
    the average goes to the server with the least room that is enough (best fit); a smaller one to the server with
    the fewest requests.

    Args:
        sizes: Parameters of each block of the model.
        num_servers: Servers.

    Returns:
        For each server the sizes it holds; together they are all parameters.

    Raises:
        InvalidSetupError: There is no block or server, or a size is not above zero.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 5.3.
    """
    _check(sizes, num_servers)
    average = -(-sum(sizes) // num_servers)
    held: list[list[int]] = [[] for _ in range(num_servers)]
    room = [average] * num_servers
    for size in sorted((part for block in sizes for part in _slices(block, average)), reverse=True):
        if size < SMALL_SHARE * average:
            chosen = min(range(num_servers), key=lambda i: (len(held[i]), -room[i]))
        else:
            fitting = [i for i in range(num_servers) if room[i] >= size]
            chosen = min(fitting, key=lambda i: (room[i], i)) if fitting else room.index(max(room))
        held[chosen].append(size)
        room[chosen] -= size
    return held


def _slices(block: int, average: int) -> list[int]:
    whole, rest = divmod(block, average)
    return [average] * whole + ([rest] if rest else [])


def assign_by_threshold(
    sizes: Sequence[int], num_servers: int, seed: int = 0, threshold: int = MXNET_THRESHOLD
) -> list[list[int]]:
    """MXNet's rule: a block above the threshold is cut into equal parts for all servers, others go to a random one.

    Source: Optimus, section 5.3, on MXNet's default; ``kvstore`` documentation of MXNet.
    """
    _check(sizes, num_servers)
    chance = random.Random(seed)
    held: list[list[int]] = [[] for _ in range(num_servers)]
    for size in sizes:
        if size < threshold:
            held[chance.randrange(num_servers)].append(size)
            continue
        for i in range(num_servers):
            held[i].append(size * (i + 1) // num_servers - size * i // num_servers)
    return held


def balance(held: Sequence[Sequence[int]]) -> BlockBalance:
    """Evenness of sizes and requests."""
    sizes, requests = [sum(blocks) for blocks in held], [len(blocks) for blocks in held]
    return BlockBalance(
        size_gap=max(sizes) - min(sizes),
        request_gap=max(requests) - min(requests),
        num_requests=sum(requests),
    )


def _check(sizes: Sequence[int], num_servers: int) -> None:
    if num_servers < 1 or not sizes or min(sizes) < 1:
        raise InvalidSetupError(
            f"expected at least one server and blocks of at least one parameter, got {num_servers} servers and sizes "
            f"{list(sizes)[:5]}"
        )
