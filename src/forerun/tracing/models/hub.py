"""Configurations from a file, or from the Hugging Face hub where there is a network."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from forerun.base.errors import ModelBuildError, UnknownModelError, near_matches
from forerun.base.kept import cache_folder, write_whole
from forerun.question.model import architectures

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TIMEOUT_S = 10.0
_MAX_BYTES = 1_000_000
_URL = "https://huggingface.co"


def is_hub_name(text: str) -> bool:
    """True for ``ORG/NAME`` that is no path of this machine."""
    is_file = text.endswith(".json") or Path(text).expanduser().exists()
    return _NAME.fullmatch(text) is not None and not is_file


def kept_config_path(name: str) -> Path:
    """File that keeps the configuration of a model of the hub, whether it is there or not."""
    return cache_folder() / "configurations" / (name.replace("/", "--").lower() + ".json")


def config_path(text: str) -> Path:
    """File with the configuration of a model, fetched from the hub if it is named there and not kept yet.

    Raises:
        UnknownModelError: There is no such file or model, or the hub cannot be reached.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if not is_hub_name(text):
        raise UnknownModelError(
            f"there is no file {text!r}; hf: takes a Transformers configuration (config.json), or the name of a model "
            "on the hub, such as hf:Qwen/Qwen2.5-7B"
        )
    kept = kept_config_path(text)
    if not kept.is_file():
        content = _fetched(text)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, content)
    return kept


def _fetched(name: str) -> bytes:
    """The configuration from the hub; a token of the user (``HF_TOKEN``) opens what is open to that user."""
    import urllib.error  # HTTP and TLS, for those who ask the hub
    import urllib.request

    known = [item.hub for item in architectures().values()]
    base = os.environ.get("HF_ENDPOINT", _URL).rstrip("/")
    request = urllib.request.Request(f"{base}/{name}/resolve/main/config.json")
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    otherwise = "give its config.json as hf:FILE, or an architecture of the catalogue, such as llama-3.1-8b"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
        raise UnknownModelError(
            f"hf:{name} is not kept in the cache and HF_HUB_OFFLINE forbids the hub{near_matches(name, known)}; "
            f"{otherwise}"
        )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(_MAX_BYTES)
        json.loads(content)
    except urllib.error.HTTPError as error:
        why = {401: "has no such model open to you", 403: "does not open it to you", 404: "has no such model"}
        raise UnknownModelError(
            f"the hub {why.get(error.code, f'answered {error.code}')}: hf:{name}{near_matches(name, known)}; "
            f"{otherwise}"
        ) from error
    except (OSError, TimeoutError) as error:
        raise UnknownModelError(
            f"hf:{name} is not kept in the cache and the hub cannot be reached{near_matches(name, known)}; {otherwise}"
        ) from error
    except ValueError as error:
        raise ModelBuildError(f"the hub's config.json of {name} is no JSON; {otherwise}") from error
    return content
