"""Spelling of device names: rules by which two spellings count as one name."""

from __future__ import annotations

import re

__all__ = ["name_key", "name_tokens", "normalise_name"]

# Words that drivers and people add or leave out at will; none of them tells two devices apart.
_FILLER_WORDS = frozenset({"nvidia", "geforce", "tesla", "gpu", "amd", "instinct", "1x"})
_WATTAGE = re.compile(r"\(\s*\d+\s*w\s*\)")
_WORD = re.compile(r"[a-z0-9]+")


def name_tokens(name: str) -> tuple[str, ...]:
    """The words of a name that matter, in lower case.

    Vendor words and a power limit in parentheses are left out:

    >>> name_tokens("NVIDIA A100-SXM4-40GB (400W)")
    ('a100', 'sxm4', '40gb')
    """
    words = _WORD.findall(_WATTAGE.sub(" ", name.lower()))
    return tuple(word for word in words if word not in _FILLER_WORDS)


def normalise_name(name: str) -> str:
    """Words of a name that matter, joined by hyphens; normalising twice changes nothing.

    >>> normalise_name("NVIDIA GeForce RTX 3090")
    'rtx-3090'
    """
    return "-".join(name_tokens(name))


def name_key(name: str) -> str:
    """Key that all spellings of one name share: the words that matter, without separators.

    >>> name_key("RTX3090") == name_key("NVIDIA GeForce RTX 3090")
    True
    """
    return "".join(name_tokens(name))
