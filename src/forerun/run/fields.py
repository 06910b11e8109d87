"""Declared settings as fields of pydantic models, for HTTP bodies and files; nothing else of ``run`` needs pydantic."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from forerun.run.settings import Declared, declared

__all__ = ["field_type", "setting_fields"]


def setting_fields(
    options: type, *, without: Collection[str] = (), over_http: bool = False
) -> dict[str, Any]:
    """Fields of a pydantic model: the declared settings with their bounds, each None unless given.

    Args:
        options: The declaration.
        without: Settings that the model has in a form of its own, or not at all.
        over_http: Whether the bounds are those of questions over HTTP, and settings that name a file are left out.
    """
    found = {}
    for name, item in declared(options).items():
        if name in without or (over_http and item.setting.is_local):
            continue
        # A field may not be called like a method of the model.
        is_taken = hasattr(BaseModel, name)
        field = Field(default=None, description=item.setting.help, alias=name if is_taken else None)
        found[f"{name}_" if is_taken else name] = (field_type(item, over_http=over_http) | None, field)
    return found


def field_type(item: Declared, *, over_http: bool) -> Any:
    """The type of a setting with its bounds."""
    setting = item.setting
    if setting.choices:
        return Literal[setting.choices]
    if item.kind is bool:
        return bool
    high = setting.http_high if over_http and setting.http_high is not None else setting.high
    numbers = Field(ge=setting.low, gt=setting.above, le=high)
    if item.kind is int:
        return Annotated[int, numbers]
    if item.kind is float:
        return Annotated[float, Field(ge=setting.low, gt=setting.above, le=high, allow_inf_nan=False)]
    if item.kind is tuple:
        return Annotated[list[Annotated[int, numbers]], Field(min_length=1, max_length=64)]
    return Annotated[str, Field(max_length=200)] if over_http else str
