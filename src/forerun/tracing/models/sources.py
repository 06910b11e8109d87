"""Models of PyTorch: one function that turns a model in any form of ``docs/models.md`` into a ``BuiltModel``."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import torch

from forerun.base.errors import UnknownModelError, UsageError, near_matches
from forerun.base.tables import own_table
from forerun.question.model import architectures, base_name, find_architecture
from forerun.tracing.models.built_model import BuiltModel, InputOptions
from forerun.tracing.models.families import FAMILIES, build_family
from forerun.tracing.models.hub import is_hub_name
from forerun.tracing.models.meta_build import building_on, with_real_batches
from forerun.tracing.models.transformers_models import build_catalogued
from forerun.tracing.models.user_code import build_from_file, build_from_module
from forerun.tracing.models.vision_models import timm_names, torchvision_names
from forerun.tracing.source import find_source, named_source, source_names

_FORMS = (
    "a family such as cnn:depth=4, torchvision:NAME, timm:NAME, an architecture such as llama-3.1-8b, hf:ORG/NAME, "
    "hf:CONFIG.json, keras:NAME, keras:FILE.keras, onnx:FILE.onnx, mlpredict:FILE.json, "
    "path/to/file.py:factory, or a torch.nn.Module"
)
_FILE_AND_NAME = re.compile(r"(?P<path>.+\.py):(?P<name>[^:/\\(]*)")


def build_model(
    spec: str | torch.nn.Module,
    *,
    image_size: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    sequence_length: int | None = None,
    num_classes: int | None = None,
    training: bool = True,
    attn_implementation: str = "sdpa",
    device: str | torch.device = "meta",
) -> BuiltModel:
    """Builds a model with a batch and a loss for one training step, on the meta device unless another is named.

    Nothing is downloaded. A module object is copied, never changed.

    Args:
        spec: Model in one of the forms of ``docs/models.md``.
        image_size: Height and width of square images [pixels].
        input_shape: Shape of one sample without the batch axis.
        sequence_length: Number of tokens in one sample of a text model.
        num_classes: Number of outputs of the head.
        training: True for training mode, False for evaluation mode.
        attn_implementation: Attention of Transformers models, ``sdpa`` or ``eager``.
        device: Device of the tensors. On a real device weights have their library's initial values, or those of an
            ONNX file, and batches are filled at random.

    Raises:
        UnknownModelError: There is no such model, file or family key.
        InvalidSetupError: An option does not apply to this model.
        MissingExtraError: The library of the model is not installed.
        ModelBuildError: The model's code raised, or the file is damaged.
        TraceError: The model's step has no fixed shape.
    """
    options = InputOptions(
        image_size=image_size,
        input_shape=None if input_shape is None else tuple(input_shape),
        sequence_length=sequence_length,
        num_classes=num_classes,
        training=training,
        attn_implementation=attn_implementation,
    )
    place = torch.device(device)
    with building_on(place):
        built = _build(spec, options)
    return built if place.type == "meta" else with_real_batches(built, place)


def _build(spec: str | torch.nn.Module, options: InputOptions) -> BuiltModel:
    if isinstance(spec, torch.nn.Module):
        return build_from_module(spec, options)
    if not isinstance(spec, str):
        raise UsageError(f"a model is {_FORMS}; got {type(spec).__module__}.{type(spec).__name__}")
    spec = spec.strip()
    if match := _FILE_AND_NAME.fullmatch(spec):
        return build_from_file(match["path"], match["name"], options)
    known = find_architecture(spec)
    if known is not None and not spec.startswith("hf:"):
        return build_catalogued(known, options, spec)
    prefix, colon, rest = spec.partition(":")
    if prefix in FAMILIES:
        return build_family(spec, options)
    source = named_source(spec) if colon else None
    if source is not None and source.build is not None:
        return source.build(rest, options)
    if source is not None:
        raise UsageError(
            f"{spec} is a {prefix.capitalize()} model: it is predicted, and measured with 'forerun measure grid "
            f"--framework {prefix}', but not built as a PyTorch module"
        )
    raise _unknown(spec)


def _unknown(spec: str) -> UnknownModelError:
    if not spec:
        return UnknownModelError(f"no model was named; a model is {_FORMS}")
    ending = Path(spec).suffix
    if ending == ".py":
        return UnknownModelError(
            f"{spec} is a file: name the function that makes the model as {spec}:factory"
        )
    if ending in (".onnx", ".json") or (Path(spec) / "config.json").is_file():
        form = "onnx" if ending == ".onnx" else "hf"
        return UnknownModelError(f"{spec} needs the prefix of its kind: {form}:{spec}")
    if called := re.fullmatch(r"(.+\.py:\w+)[:(].*", spec):
        return UnknownModelError(
            f"{called[1]} is called without arguments; name a function of yours that calls it with them"
        )
    name = spec.partition(":")[2] if spec.partition(":")[0] in ("torch", "tv", "torchvision.models") else spec
    hub = f"; hf:{spec} takes its configuration from the hub" if is_hub_name(spec) else ""
    # A name that exists elsewhere word for word is a better hint than any similar one.
    exact = [f"torchvision:{name}"] if name in torchvision_names() else []
    exact += [f"timm:{name}"] if name in timm_names() else []
    sources = ((prefix, find_source(prefix)) for prefix in source_names())
    exact += [f"{prefix}:{own}" for prefix, source in sources if source for own in source.like(name)]
    if exact:
        return UnknownModelError(f"no model {spec!r}; did you mean {' or '.join(exact)}?")
    # Names of models of libraries that forerun does not know, and the way to an answer.
    others = own_table(__file__, "names.toml")["other"]
    other = next((way for way in others if re.search(way["words"], name.lower())), None)
    if other is not None:
        says = other["says"].replace("{name}", name.lower().rpartition("/")[2]).replace("{hub}", hub)
        return UnknownModelError(f"no model {spec!r}; {says}")
    prefixed = {"torchvision:" + known_name for known_name in torchvision_names()}
    found = _of_family(name) or _containing(name)
    if not found and not hub:
        found = (
            near_matches(spec, prefixed)
            or near_matches(name.lower(), [*architectures(), *FAMILIES])
            or near_matches(name.lower(), torchvision_names(), prefix="torchvision:")
            or f"; a model is {_FORMS}"
        )
    return UnknownModelError(f"no model {spec!r}{found}{hub}")


def _squeezed(name: str) -> str:
    return re.sub("[^a-z0-9]", "", base_name(name.lower().rpartition("/")[2]))


def _of_family(name: str) -> str:
    """Architectures whose names are this one with other signs (llama3:8b), begin with it, or with its letters."""
    wanted = _squeezed(name)
    family = re.split("[^a-z]", name.lower().rpartition("/")[2], maxsplit=1)[0]
    found = [known for known in architectures() if _squeezed(known) == wanted]
    found = found or [known for known in architectures() if wanted and _squeezed(known).startswith(wanted)]
    if not found and len(family) > 2:
        found = [known for known in architectures() if re.split("[^a-z]", known)[0] == family]
    found.sort(key=lambda known: -difflib.SequenceMatcher(None, name.lower(), known).ratio())
    return f"; did you mean {', '.join(found[:5])}?" if found else ""


def _containing(name: str) -> str:
    """Names of timm that contain the longest word of a name, such as dinov2; those with its other letters first."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if len(word) > 3]
    longest = max(words, key=len, default="")
    found = [known for known in timm_names() if longest and longest in known]
    if not found or longest in {"resnet", "cnn", "base", "large", "tiny", "small"}:
        return ""
    found.sort(key=lambda known: -difflib.SequenceMatcher(None, name.lower(), known).ratio())
    return f"; did you mean {', '.join(f'timm:{known}' for known in found[:5])}?"
