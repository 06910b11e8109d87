"""The model of a question, its inputs and its framework, and public architectures by name, each with its source."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from forerun.question.settings import setting
from forerun.question.setup import Layout

if TYPE_CHECKING:
    from forerun.graph.captured import CaptureFacts

CAPTURE_PREFIX = "capture:"
_READING_TOKENS = (
    *("CausalLM", "LMHeadModel", "MaskedLM", "ElectraForPreTraining"),
    *(
        f"{kind}ForConditionalGeneration"
        for kind in ("T5", "Bart", "Gemma3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    ),
    "LlavaForConditionalGeneration",
)
_DECODERS = ("Qwen3Model", "MistralModel", "Gemma3TextModel")
"""Decoders that were made encoders of sentences."""
_OF_IMAGES = ("ImageClassification", "SemanticSegmentation", "Dinov2Model", "DINOv3ViTModel")

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
"""Keys of a Transformers configuration for the most tokens of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One public architecture.

    Attributes:
        name: Name in the catalogue, such as ``llama-3.1-8b``.
        hub: Repository on the Hugging Face hub, such as ``meta-llama/Llama-3.1-8B``.
        model_class: Class of Transformers that builds it.
        config: Values of its configuration that differ from the library's own, and the sizes.
        num_parameters: Published number of parameters, as the class holds them.
        source: Source of the figures.
        also: Other repositories whose models have this architecture.
    """

    name: str
    hub: str
    model_class: str
    config: Mapping[str, Any]
    num_parameters: int
    source: str
    also: tuple[str, ...] = ()

    @property
    def is_language_model(self) -> bool:
        """True if it reads tokens and is trained on them."""
        return self.model_class.endswith(_READING_TOKENS)


@lru_cache
def _spelled(name: str) -> str:
    """A name in small letters, its numbers in one spelling: ``llama3_1-8b`` is ``Llama-3.1-8B``."""
    return re.sub(r"(?<=[a-z])-(?=[0-9])", "", name.lower().replace("_", "-").replace(".", "-"))


@cache
def _catalogue_text() -> str:
    return Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8")


@cache
def architectures() -> Mapping[str, Architecture]:
    """The catalogue by name."""
    found = {}
    for name, entry in tomllib.loads(_catalogue_text()).items():
        found[name] = Architecture(
            name=name,
            hub=entry["hub"],
            model_class=entry["class"],
            config=entry["config"] | dict.fromkeys(entry.get("without", ())),
            num_parameters=entry["num_parameters"],
            source=entry["source"],
            also=tuple(entry.get("also", ())),
        )
    return found


@cache
def _by_word() -> Mapping[str, Architecture]:
    words: dict[str, Architecture] = {}
    for item in architectures().values():
        for word in (item.name, item.hub, *item.also):
            last = word.rpartition("/")[2]
            for known in (word, last, base_name(word), base_name(last)):
                words.setdefault(_spelled(known), item)
    return words


def find_architecture(word: str) -> Architecture | None:
    """An architecture by its name, or by ``hf:`` and its name on the hub; None if it is not in the catalogue.

    A model that was trained further, such as an Instruct one, is of the architecture of its base.

    >>> find_architecture("hf:meta-llama/Llama-3.1-8B").name
    'llama-3.1-8b'
    >>> find_architecture("Qwen/Qwen3-30B-A3B-Instruct-2507").name
    'qwen3-30b-a3b'
    """
    wanted = word.strip().removeprefix("hf:")
    # Most models are no architecture, and reading the whole catalogue takes longer than to look for a word in it.
    for name in dict.fromkeys((_spelled(wanted), _spelled(base_name(wanted)))):
        if name in _spelled(_catalogue_text()) and name in _by_word():
            return _by_word()[name]
    return None


_TRAINED_FURTHER = re.compile(
    r"^(?:nousresearch|unsloth|hugging-quants)/"
    r"|[-_](?:instruct|chat|thinking|base|it|pt|hf|fp16|bf16|bnb-4bit|bnb-nf4|unsloth|2[0-9](?:0[1-9]|1[0-2]))(?=[-_]|$)",
    re.IGNORECASE,
)


def base_name(name: str) -> str:
    """The name of a model without the words and dates of its further training, and without the account that copied it.

    >>> base_name("unsloth/Mistral-7B-Instruct-v0.3-bnb-4bit")
    'Mistral-7B-v0.3'
    """
    return _TRAINED_FURTHER.sub("", name)


_IMPORTS_KERAS = re.compile(r"^\s*(?:import|from)\s+(?:keras|tensorflow)\b", re.MULTILINE)
_IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+(?:torch|torchvision|timm)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model and its inputs, each None for the model's own.

    Attributes:
        model: A model specification such as ``torchvision:resnet50``.
        num_classes: Classes of the head.
    """

    model: str
    input_shape: tuple[int, ...] | None = setting(
        None,
        help="Shape of one sample, without the batch.",
        group="model",
        metavar="3,224,224",
        low=1,
        http_high=4096,
    )
    sequence_length: int | None = setting(
        None, help="Tokens of one sample.", group="model", low=1, high=1_000_000
    )
    image_size: int | None = setting(
        None, help="Height and width of images [pixels].", group="model", low=1, high=100_000, http_high=1024
    )
    num_classes: int | None = None


class ModelOptions(TypedDict, total=False):
    """Settings of the model's inputs that every question may have."""

    input_shape: Sequence[int] | None
    sequence_length: int | None


def is_keras(model: Any) -> bool:
    """True if a model is a Keras model; nothing is imported to find out.

    Keras models are ``keras:...``, a ``.keras`` file, a Python file that imports Keras and not PyTorch, or a Keras
    object.
    """
    if not isinstance(model, str):
        return any(base.__module__.partition(".")[0] in ("keras", "tf_keras") for base in type(model).__mro__)
    if model.startswith("keras:") or model.endswith(".keras"):
        return True
    # Only such a name stands for a file that must be opened to know.
    if ".py:" not in model:
        return False
    try:
        source = Path(model.rpartition(":")[0]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(_IMPORTS_KERAS.search(source)) and not _IMPORTS_TORCH.search(source)


def own_settings(model: Any) -> dict[str, Any]:
    """Settings that a model brings along: NHWC in Keras, and what the tools use that train an architecture.

    Language models and networks of diffusers have bf16, AdamW and one sample; sound, sentences, and images beside texts
    AdamW and amp; images alone AdamW.

    Source: huggingface/transformers: src/transformers/training_args.py (``optim``) and
    examples/pytorch/speech-recognition/README.md (``--fp16``); mlfoundations/open_clip: src/open_clip_train/params.py;
    UKPLab/sentence-transformers: examples/sentence_transformer/training/nli/training_nli.py.
    """
    own = {"layout": Layout.NHWC if is_keras(model) else Layout.NCHW}
    known = find_architecture(model) if isinstance(model, str) else None
    is_denoiser = isinstance(model, str) and model.startswith("diffusers:")
    if known is None and not is_denoiser:
        return own
    if known is None or known.is_language_model or known.model_class.endswith(_DECODERS):
        return {**own, "precision": "bf16", "optimizer": "adamw", "batch_size": 1}
    return {**own, "optimizer": "adamw"} | (
        {} if known.model_class.endswith(_OF_IMAGES) else {"precision": "amp"}
    )


def own_stack(model: Any) -> str:
    """Framework of a model, ``keras`` or ``pytorch``."""
    return "keras" if is_keras(model) else "pytorch"


def capture_path(model: Any) -> Path | None:
    """File of a captured model such as ``capture:graph.forerun``; None for other models."""
    if not isinstance(model, str) or not model.startswith(CAPTURE_PREFIX):
        return None
    return Path(model.removeprefix(CAPTURE_PREFIX)).expanduser()


def flat_names(names: Any) -> Iterator[str]:
    """The names in a listing by source."""
    if isinstance(names, str):
        yield names
    elif isinstance(names, dict):
        for part in names.values() if "name" not in names else [names["name"]]:
            yield from flat_names(part)
    elif isinstance(names, list | tuple):
        for part in names:
            yield from flat_names(part)


def is_captured(model: Any) -> bool:
    """True for a model such as ``capture:graph.forerun``."""
    return isinstance(model, str) and model.startswith(CAPTURE_PREFIX)


def captured_facts(model: Any) -> CaptureFacts | None:
    """Facts of a captured script; None for other models.

    Raises:
        UsageError: The file cannot be read.
    """
    path = capture_path(model)
    if path is None:
        return None
    from forerun.graph.captured import read_capture_facts

    return read_capture_facts(path)
