"""Sizes of the networks in the tables that name them only: parameters with their source."""

from __future__ import annotations

from collections.abc import Mapping

MODEL_PARAMETERS: Mapping[str, tuple[float, str]] = {
    "alexnet": (61.1e6, "torchvision's table of models"),
    "googlenet": (6.6e6, "torchvision's table of models"),
    "inception3": (23.8e6, "Keras' table of applications, InceptionV3"),
    "inception4": (42.7e6, "timm's table of results"),
    "resnet50": (25.56e6, "torchvision's table of models"),
    "resnet101": (44.55e6, "torchvision's table of models"),
    "resnet152": (60.19e6, "torchvision's table of models"),
    "vgg16": (138.36e6, "torchvision's table of models"),
    "resnext101-32x4d": (44.18e6, "timm's table of results"),
    "se-resnext101-32x4d": (48.96e6, "timm's table of results"),
    "ssd": (23e6, "ResNet-50 to its third stage, six extra blocks and heads, added up"),
    "maskrcnn": (44.4e6, "torchvision's table of models, maskrcnn_resnet50_fpn"),
    "efficientdet": (3.9e6, "Tan, Pang and Le 2020, D0"),
    "bert_base": (110e6, "Devlin et al. 2019"),
    "bert_large": (340e6, "Devlin et al. 2019"),
    "bart": (406e6, "Lewis et al. 2020, large"),
    "gnmt": (164e6, "4 + 4 LSTM layers of 1024 and 32,320 words, added up"),
    "transformer": (213e6, "Vaswani et al. 2017, big"),
    "transformerxlbase": (192e6, "NVIDIA/DeepLearningExamples, README of Transformer-XL"),
    "transformerxllarge": (257e6, "Dai et al. 2019"),
    "tacotron2": (28.2e6, "Shen et al. 2018, as NVIDIA's implementation counts"),
    "waveglow": (87.7e6, "Valle et al. 2021 (Flowtron), table of model sizes"),
    "ncf": (31.8e6, "embeddings of 165,237 users and items of 64 + 128, and four layers, added up"),
    "jasper": (333e6, "Li et al. 2019, 10x5 dense residual"),
    "fastspeech": (30.1e6, "Ren et al. 2019"),
    "wav2vec2": (95e6, "Baevski et al. 2020, base"),
    "unet": (31.0e6, "Ronneberger, Fischer and Brox 2015, layers added up"),
    "unet3d": (19.07e6, "Cicek et al. 2016"),
    "nnunet": (31.2e6, "Isensee et al. 2021, layers of the 3D network added up"),
    "vnet": (45.6e6, "Milletari, Navab and Ahmadi 2016, layers added up"),
}
"""Parameters by the name used here, and where the figure is from."""

# A word of a table's model or variant name -> the name used here; the first that occurs counts.
_WORDS = (
    ("bert_large", "bert_large"), ("bert_base", "bert_base"), ("biobert", "bert_base"), ("bert", "bert_large"),
    ("se-resnext101", "se-resnext101-32x4d"), ("resnext101", "resnext101-32x4d"), ("resnet152", "resnet152"),
    ("resnet101", "resnet101"), ("resnet50", "resnet50"), ("resnet-50", "resnet50"), ("rn50", "resnet50"),
    ("inception3", "inception3"), ("inception_v3", "inception3"), ("inceptionv3", "inception3"),
    ("inception4", "inception4"), ("vgg16", "vgg16"), ("alexnet", "alexnet"), ("googlenet", "googlenet"),
    ("efficientdet", "efficientdet"), ("maskrcnn", "maskrcnn"), ("ssd", "ssd"), ("gnmt", "gnmt"), ("bart", "bart"),
    ("transformerxllarge", "transformerxllarge"), ("transformerxlbase", "transformerxlbase"),
    ("transformer-xl", "transformerxlbase"), ("transformer", "transformer"),
    ("waveglow", "waveglow"), ("tacotron2", "tacotron2"), ("ncf", "ncf"), ("jasper", "jasper"),
    ("fastspeech", "fastspeech"), ("wav2vec2", "wav2vec2"), ("nnunet", "nnunet"), ("unet_3d", "unet3d"),
    ("unet_medical", "unet"), ("vnet", "vnet"),
)  # fmt: skip
_NOT_THESE = ("se3transformer",)


def parameters_of(*names: str) -> tuple[str, float] | None:
    """The name used here and the parameters of a network, from its name in a table; None if its size is not known.

    >>> parameters_of("resnet50v1.5")
    ('resnet50', 25560000.0)
    """
    for text in names:
        if any(word in text.lower() for word in _NOT_THESE):
            return None
    for text in names:
        for word, name in _WORDS:
            if word in text.lower():
                return name, MODEL_PARAMETERS[name][0]
    return None
