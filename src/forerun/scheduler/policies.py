"""All policies by name."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.errors import UsageError, near_matches
from forerun.scheduler import (  # noqa: F401 - each registers its policies
    deadline,
    fair_policies,
    foresight,
    marginal_gain,
    priority_policies,
    sia,
)
from forerun.scheduler.policy import POLICIES, Policy

__all__ = ["find_policy", "policy_names"]


def policy_names() -> Iterator[str]:
    """Names of all policies."""
    return iter(POLICIES)


def find_policy(name: str) -> Policy:
    """A new policy by name.

    Raises:
        UsageError: The name is not known.
    """
    make = POLICIES.get(name.strip().lower())
    if make is None:
        raise UsageError(
            f"unknown policy '{name}'{near_matches(name, POLICIES)}; known: {', '.join(POLICIES)}"
        )
    return make()
