"""Configurations of Transformers models that are pasted into the page: kept by their content, and named by it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from forerun.base.errors import UsageError
from forerun.base.temporary import cache_folder

__all__ = ["CONFIG_NAME", "config_file", "kept_config"]

CONFIG_NAME = re.compile(r"config:[0-9a-f]{16}")
"""Name of a configuration that was pasted."""


def kept_config(config: dict[str, Any]) -> str:
    """Keeps a configuration in the cache folder, and returns its name.

    Raises:
        UsageError: It is no configuration of a model.
    """
    if not isinstance(config.get("model_type"), str):
        raise UsageError("expected the config.json of a Transformers model, which has a model_type; got none")
    if "auto_map" in config:
        raise UsageError("this configuration loads code of its own, which is not run; use the command line")
    content = json.dumps(config, sort_keys=True)
    name = f"config:{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)
    return name


def config_file(name: str) -> str:
    """The model of a kept configuration, ``hf:FILE``.

    Raises:
        UsageError: It was not kept here.
    """
    path = _path(name)
    if not path.is_file():
        raise UsageError(f"the configuration of '{name}' is not kept on this server; paste it once more")
    return f"hf:{path}"


def _path(name: str) -> Path:
    return cache_folder() / "configs" / f"{name.removeprefix('config:')}.json"
