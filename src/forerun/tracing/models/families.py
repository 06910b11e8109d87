"""Families of small networks, named with their sizes: ``cnn:depth=4,base_filters=64``.

A specification is ``FAMILY``, ``FAMILY:VALUE`` for the family's first key, or ``FAMILY:KEY=VALUE,...``.
The networks are small image classifiers of earlier studies and decoders in plain PyTorch; the parameter counts that
their sources print are in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from forerun.base.errors import InvalidSetupError, UnknownModelError, near_matches
from forerun.base.extras import needing
from forerun.tracing.models.built_model import (
    BuiltModel,
    InputOptions,
    classification_loss,
    image_batch,
    next_token_loss,
    token_batch,
)
from forerun.tracing.models.meta_build import build_on_meta, move_to_meta

NetworkMaker = Callable[..., torch.nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyKey:
    """One whole number that sizes a network.

    Attributes:
        default: Value if the key is not given.
        meaning: Meaning of the number in a few words.
        low: Smallest allowed value.
        high: Largest allowed value.
        step: Distance between allowed values, counted from ``low``.
    """

    default: int
    meaning: str
    low: int = 1
    high: int = 100_000
    step: int = 1

    def allowed(self) -> str:
        """The allowed values in words."""
        if self.step == 1:
            return f"{self.low} to {self.high}"
        return f"{self.low}, {self.low + self.step}, {self.low + 2 * self.step}, ... up to {self.high}"

    def check(self, family_name: str, key: str, text: str) -> int:
        """The value of a text, or an error that names the allowed values."""
        # int() also reads digits of other scripts, such as full-width ones, which a copied name may hold unseen.
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else self.low - 1
        if value not in range(self.low, self.high + 1, self.step):
            raise InvalidSetupError(
                f"{key} of {family_name} ({self.meaning}) must be {self.allowed()}, got {text!r}"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of networks.

    Attributes:
        name: Name before the colon.
        make: Function from an input shape and the keys, as keywords, to the module.
        input_shape: Shape of one sample unless the user says otherwise: (channels, height, width) of an image, or
            (tokens,) of a text.
        keys: The keys, the first of which may be given without its name.
    """

    name: str
    make: NetworkMaker
    input_shape: tuple[int, ...]
    keys: Mapping[str, FamilyKey]

    @property
    def reads_tokens(self) -> bool:
        """True if a sample is a text, not an image."""
        return len(self.input_shape) == 1


FAMILIES: dict[str, Family] = {}


def family(
    name: str, *, input_shape: tuple[int, ...], **keys: FamilyKey
) -> Callable[[NetworkMaker], NetworkMaker]:
    """Registers the decorated maker of networks under a name; a name can be used once."""

    def register(make: NetworkMaker) -> NetworkMaker:
        if name in FAMILIES:
            raise ValueError(f"the family {name!r} is registered twice")
        FAMILIES[name] = Family(name=name, make=make, input_shape=input_shape, keys=keys)
        return make

    return register


def build_family(spec: str, options: InputOptions) -> BuiltModel:
    """Builds a network of a family on the meta device.

    Args:
        spec: Text of the family and its keys, such as ``cnn:depth=3,base_filters=32`` or ``cifar-resnet:56``.
        options: Options of inputs and head; ``num_classes`` may be given here or as a key.
    """
    name, _, text = spec.partition(":")
    chosen = FAMILIES[name]
    values = _values(chosen, text, options)
    shape = _sample_shape(chosen, spec, options)
    module = move_to_meta(build_on_meta(lambda: chosen.make(shape, **values))).train(options.training)
    make_batch = token_batch if chosen.reads_tokens else image_batch
    return BuiltModel(
        name=spec,
        module=module,
        input_shape=shape,
        make_batch=lambda batch_size: make_batch(batch_size, shape),
        loss=next_token_loss if chosen.reads_tokens else classification_loss,
        tokens_per_sample=shape[0] if chosen.reads_tokens else None,
        may_be_kept=True,
    )


def _sample_shape(chosen: Family, spec: str, options: InputOptions) -> tuple[int, ...]:
    if chosen.reads_tokens:
        options.refuse_image(spec)
        return (options.sequence_length or chosen.input_shape[0],)
    options.refuse_sequence(spec)
    return options.image_shape(chosen.input_shape)


def _values(chosen: Family, text: str, options: InputOptions) -> dict[str, int]:
    values = {key: rule.default for key, rule in chosen.keys.items()}
    given = _parse(chosen, text)
    for key, value in given.items():
        values[key] = chosen.keys[key].check(chosen.name, key, value)
    if options.num_classes is not None:
        if "num_classes" not in chosen.keys:
            raise InvalidSetupError(
                f"{chosen.name} predicts tokens, not classes; leave num_classes out, got {options.num_classes}"
            )
        if "num_classes" in given and values["num_classes"] != options.num_classes:
            raise InvalidSetupError(
                f"num_classes is given twice: {values['num_classes']} in the name, "
                f"{options.num_classes} as option"
            )
        values["num_classes"] = options.num_classes
    return values


def _parse(chosen: Family, text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for index, part in enumerate(filter(None, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals and index == 0:
            key, value = next(iter(chosen.keys)), part
        key = key.strip()
        if key not in chosen.keys:
            raise UnknownModelError(
                f"{chosen.name} has no key {key!r}; its keys are {', '.join(chosen.keys)} "
                f"(write {chosen.name}:{next(iter(chosen.keys))}=VALUE,...){near_matches(key, chosen.keys)}"
            )
        if key in given:
            raise InvalidSetupError(f"{key} is given twice in {chosen.name}:{text}")
        given[key] = value.strip()
    return given


Shape = tuple[int, int, int]

_TEN_CLASSES = FamilyKey(default=10, meaning="outputs of the head")


def _num_features(features: nn.Module, input_shape: Shape) -> int:
    """Number of elements per sample after the convolutional part, found by running it."""
    try:
        with torch.no_grad():
            device = next(features.parameters(), torch.empty(0)).device
            output = features(torch.zeros((1, *input_shape), device=device))
    except RuntimeError as error:
        raise InvalidSetupError(
            f"images of {'x'.join(map(str, input_shape))} are too small for this many pooling layers; "
            f"give a larger image size or fewer layers ({error})"
        ) from error
    return int(output.numel())


def _classifier(
    features: nn.Module, input_shape: Shape, widths: Sequence[int], num_classes: int
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    size = _num_features(features, input_shape)
    for width in widths:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(features, *layers, nn.Linear(size, num_classes))


@family(
    "cnn",
    input_shape=(3, 32, 32),
    depth=FamilyKey(default=4, meaning="blocks of two convolutions", high=10),
    base_filters=FamilyKey(
        default=64, meaning="filters of the first block, doubled in each further one", high=4096
    ),
    dense_units=FamilyKey(default=128, meaning="width of the hidden dense layer"),
    num_classes=_TEN_CLASSES,
)
def _cnn(shape: Shape, *, depth: int, base_filters: int, dense_units: int, num_classes: int) -> nn.Module:
    """Blocks of Conv3x3-ReLU-Conv3x3-ReLU-MaxPool2 with same padding, then Flatten, Dense, ReLU, Dense."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for block in range(depth):
        filters = base_filters * 2**block
        for _ in range(2):
            layers += [nn.Conv2d(channels, filters, 3, padding="same"), nn.ReLU()]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    return _classifier(nn.Sequential(*layers), shape, [dense_units], num_classes)


@family(
    "mlp",
    input_shape=(1, 28, 28),
    depth=FamilyKey(default=3, meaning="hidden dense layers", high=1000),
    width=FamilyKey(default=1024, meaning="outputs of each hidden layer"),
    num_classes=_TEN_CLASSES,
)
def _mlp(shape: Shape, *, depth: int, width: int, num_classes: int) -> nn.Module:
    """Flatten, Dense-ReLU of equal width, Dense; with width 1 it is a chain of calls with almost no work."""
    return _classifier(nn.Identity(), shape, [width] * depth, num_classes)


def _pooled_convolutions(channels: int, filters: Sequence[int], padding: str) -> nn.Module:
    layers: list[nn.Module] = []
    for width in filters:
        layers += [nn.Conv2d(channels, width, 3, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers)


# The three networks of the IIT practicum (github.com/profnote/ml-performance-prediction). The small two are
# unpadded: the layer inputs timed there are 28, 13, 5 and 32, 15, 6, 2 pixels wide.


# With three convolutions the first has the 24,330 parameters that the report prints; its published times are of two.


@family(
    "mnist-cnn",
    input_shape=(1, 28, 28),
    depth=FamilyKey(default=2, meaning="convolutions of 32 filters, each with a pooling", high=3),
    num_classes=_TEN_CLASSES,
)
def _mnist_cnn(shape: Shape, *, depth: int, num_classes: int) -> nn.Module:
    return _classifier(_pooled_convolutions(shape[0], [32] * depth, "valid"), shape, [128], num_classes)


@family("cifar10-cnn", input_shape=(3, 32, 32), num_classes=_TEN_CLASSES)
def _cifar10_cnn(shape: Shape, *, num_classes: int) -> nn.Module:
    features = _pooled_convolutions(shape[0], [64, 64, 32], "valid")
    return _classifier(features, shape, [512, 256, 128], num_classes)


@family("pcam-cnn", input_shape=(3, 96, 96), num_classes=FamilyKey(default=1, meaning="outputs of the head"))
def _pcam_cnn(shape: Shape, *, num_classes: int) -> nn.Module:
    features = _pooled_convolutions(shape[0], [256, 256, 512, 512, 1024, 1024], "same")
    return _classifier(features, shape, [1028, 512, 128], num_classes)


class _PlainShortcutBlock(nn.Module):
    """Two 3x3 convolutions beside an identity shortcut without parameters.

    If the shape changes, the shortcut takes every second pixel and adds zero channels (option A).
    """

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.stride = stride
        self.num_new = num_outputs - num_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, (batch, channels, height, width); the stride divides height and width."""
        residual = functional.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        if self.stride > 1 or self.num_new:
            before = self.num_new // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, before, self.num_new - before))
        return functional.relu(residual + x)


class CifarResNet(nn.Module):
    """Residual network for 32x32 images with 6n+2 layers of 16, 32 and 64 filters.

    Source: He, Zhang, Ren and Sun 2016, CVPR, section 4.2 and table 6.

    Args:
        depth: Number of weighted layers, 6n + 2.
        num_channels: Number of channels of the images.
        num_classes: Number of outputs of the head.
    """

    def __init__(self, depth: int, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        width = 16
        for stage in range(3):
            for index in range((depth - 2) // 6):
                stride = 2 if stage and not index else 1
                blocks.append(_PlainShortcutBlock(width, 16 * 2**stage, stride))
                width = 16 * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch, classes) of images (batch, channels, height, width)."""
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


@family(
    "cifar-resnet",
    input_shape=(3, 32, 32),
    depth=FamilyKey(default=20, meaning="weighted layers, 6n + 2", low=8, high=1202, step=6),
    num_classes=_TEN_CLASSES,
)
def _cifar_resnet(shape: Shape, *, depth: int, num_classes: int) -> nn.Module:
    return CifarResNet(depth, shape[0], num_classes)


def _with_cifar_stem(builder_name: str, shape: Shape, *, num_classes: int) -> nn.Module:
    """An ImageNet ResNet whose stem keeps the resolution: one 3x3 convolution, no pooling."""
    with needing(builder_name):
        from torchvision import models

    network: nn.Module = getattr(models, builder_name)(num_classes=num_classes)
    network.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


for _name in ("resnet18", "resnet34", "resnet50"):
    family(f"cifar-{_name}", input_shape=(3, 32, 32), num_classes=_TEN_CLASSES)(
        partial(_with_cifar_stem, _name)
    )


_MOST_TOKENS = 1024
_HEAD_WIDTH = 64


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the shape of its input (batch, tokens, width)."""
        batch, tokens, width = x.shape
        heads = self.queries_keys_values(self.norm1(x)).view(batch, tokens, 3, -1, _HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        hidden = functional.gelu(self.widen(self.norm2(x)), approximate="tanh")
        out: torch.Tensor = x + self.narrow(hidden)
        return out


class Decoder(nn.Module):
    """GPT-2 without dropout: learned positions, norms before the layers, one table for tokens and head.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3 and table 2.

    Args:
        depth: Number of blocks.
        width: Width of a token, a multiple of 64; heads are 64 wide.
        vocabulary: Number of different tokens.
    """

    def __init__(self, depth: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(_MOST_TOKENS, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


@family(
    "gpt",
    input_shape=(512,),
    depth=FamilyKey(default=12, meaning="blocks of attention and perceptron", high=200),
    width=FamilyKey(default=768, meaning="width of a token", low=64, high=65_536, step=64),
    vocabulary=FamilyKey(default=50_257, meaning="tokens there are", low=2, high=10_000_000),
)
def _gpt(shape: tuple[int, ...], *, depth: int, width: int, vocabulary: int) -> nn.Module:
    if shape[0] > _MOST_TOKENS:
        raise InvalidSetupError(f"gpt reads up to {_MOST_TOKENS} tokens, got a sequence length of {shape[0]}")
    return Decoder(depth, width, vocabulary)
