"""Families of networks, and names that mean the same network.

Both decide which networks may stand on different sides of a split: a ResNet-50 with other weights is not
a new model, and a ResNet-101 reveals almost everything about a ResNet-152.
"""

from __future__ import annotations

import re
from pathlib import Path

# Origin of the weights; the rest of the name is the architecture. ``ens_adv_`` is two such prefixes at once.
_PORTING_TAGS = re.compile(r"^(?:(?:tf|gluon|jx|ssl|swsl|legacy|tv|dm|ig|adv|ens)_)+")

# Tags that change weights only. ``tf_`` pads asymmetrically, ``legacy_`` and ``dm_`` use other modules and
# ``jx_`` pads as well: those are measurably different networks (1 to 17 % in time) and stay.
_WEIGHT_TAGS = re.compile(r"^(?:(?:gluon|ssl|swsl|tv|ig|adv|ens)_)+")

# Only at the end: the ``ns`` of swinv2_cr_tiny_ns_224 is an architecture.
_WEIGHT_SUFFIXES = re.compile(
    r"(?:_(?:in\d+k|in\d+ft\d+k|\d+kft1k|dist|ns|ap|miil|sam|dino))+$",
)
_DISTILLED = re.compile(r"_distilled(?=_|$)")

# Plain names of networks that gluon marks by letters: v1b is the plain ResNet.
_GLUON_LETTER = re.compile(r"_v1([bcdes])$")

_COLLECTIONS = ("torchvision", "timm")
_FILES = ("hf", "onnx", "mlpredict")

_SAME_NETWORK = {
    "mnasnet_b1": "mnasnet_100",
    "efficientnet_b2a": "efficientnet_b2",
    "efficientnet_b3a": "efficientnet_b3",
}


def _bare(name: str) -> str:
    """Name without the collection (``timm:``) and without the weight tag of newer timm (``.in1k``)."""
    return name.rsplit(":", maxsplit=1)[-1].split(".", maxsplit=1)[0]


def model_family(name: str) -> str:
    """Family of a model: its name up to the first underscore or digit, porting tags dropped.

    >>> model_family("timm:tf_efficientnet_b0"), model_family("swsl_resnext101_32x8d")
    ('efficientnet', 'resnext')
    """
    bare = _bare(name)
    return re.split(r"[_\d]", _PORTING_TAGS.sub("", bare), maxsplit=1)[0] or bare


def subject_family(model: str) -> str:
    """Family of any model that ``predict`` takes: for a file its stem, for a sized network its kind.

    >>> subject_family("torchvision:resnet50"), subject_family("cnn:depth=2"), subject_family("hf:bert/config.json")
    ('resnet', 'cnn', 'config')
    >>> subject_family("keras:ResNet50V2"), subject_family("keras:cnn:depth=2"), subject_family("keras:mine.keras")
    ('resnet', 'cnn', 'mine')
    """
    prefix, _, rest = model.partition(":")
    if prefix == "keras":
        return _keras_family(rest)
    if prefix in _COLLECTIONS:
        return model_family(model)
    return Path(rest if prefix in _FILES else prefix).stem or model


def _keras_family(name: str) -> str:
    """Family of a network of Keras; names in keras.applications have capitals, and a V before the version."""
    if ":" in name or "." in name:
        return subject_family(name)
    return re.sub(r"V?\d.*$", "", name).lower() if name[:1].isupper() else name


def canonical_network(name: str) -> str:
    """One name for all variants that differ in weights, training recipe or classifier size only.

    Variants with an additional distillation token count as the same network too: they are not independent
    evidence. The collection is dropped, so ``torchvision:resnet50`` and ``timm:resnet50`` agree.

    >>> canonical_network("timm:swsl_resnet50"), canonical_network("convnext_tiny_in22ft1k")
    ('resnet50', 'convnext_tiny')
    """
    bare = _bare(name)
    network = _WEIGHT_SUFFIXES.sub("", _DISTILLED.sub("", _WEIGHT_TAGS.sub("", bare)))
    if bare.startswith("gluon_"):
        network = _GLUON_LETTER.sub(lambda letter: "" if letter[1] == "b" else letter[1], network)
    return _SAME_NETWORK.get(network, network)


def network_sizes(model: str) -> dict[str, float]:
    """Numbers in the name of a model of a family: depth 3 and base_filters 32 of ``cnn:depth=3,base_filters=32``."""
    pairs = [word.partition("=") for word in model.partition(":")[2].split(",")]
    return {name: float(value) for name, _, value in pairs if value.isdigit()}
