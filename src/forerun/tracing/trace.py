"""The operation graph of one step of a model, from the cache or by tracing.

Graphs of common models that come with the package, so that they are answered without PyTorch and at once.

One archive per model, ``python -m studies shipped-graphs`` makes them: a tar of uncompressed graphs, compressed as one,
because the graphs of a model in its precisions, layouts and optimizers differ little.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, MissingExtraError, UsageError, near_matches
from forerun.base.extras import EXTRA_OF_PACKAGE, installed_version, needing
from forerun.base.kept import cache_folder
from forerun.base.received import LARGEST_FILE_BYTES
from forerun.base.stages import stage
from forerun.graph.file import GRAPH_FORMAT_VERSION, read_graph, write_graph
from forerun.graph.graph import Graph
from forerun.question.model import ModelRequest, capture_path, find_architecture, is_keras
from forerun.question.saving import NO_SAVING, Fp8Recipe, MasterWeights, Unquantized
from forerun.question.setup import OptimizerImplementation, Phase, Precision, TrainingSetup
from forerun.tracing.source import Question, find_source, is_isolated, named_source, run_isolated

if TYPE_CHECKING:
    from forerun.tracing.models.built_model import BuiltModel


SHIPPED_FOLDER = Path(__file__).parent / "graphs"

SHIPPED_OPTIMIZERS = ("sgd", "adamw")
"""Optimizers of the training steps that come with the package."""

_INDEX = "index.json"


def shipped_archive(model: str) -> Path:
    """The archive of a model's graphs, whether or not it exists."""
    return SHIPPED_FOLDER / f"{re.sub(r'[^a-z0-9.=_-]+', '-', model.lower())}.tar.xz"


def shipped_models() -> tuple[str, ...]:
    """Names of the models whose graphs come with the package."""
    return tuple(_index())


@lru_cache(maxsize=1)
def _index() -> dict[str, frozenset[str]]:
    """Keys of the graphs of each model."""
    try:
        graphs = json.loads((SHIPPED_FOLDER / _INDEX).read_text(encoding="utf-8"))["graphs"]
        return {model: frozenset(keys) for model, keys in graphs.items()}
    except (OSError, ValueError, KeyError):
        return {}


def full_name(model: str) -> str:
    """``torchvision:resnet50`` for ``resnet50``: the library of a bare name whose graphs come with the package.

    Where several libraries have the name, the first of them counts: torchvision before timm.

    >>> full_name("resnet50"), full_name("timm:resnet50"), full_name("gpt2")
    ('torchvision:resnet50', 'timm:resnet50', 'gpt2')
    """
    if ":" in model or model in _index():
        return model
    found = (f"{library}:{model}" for library in ("torchvision", "timm"))
    return next((name for name in found if name in _index()), model)


def graph_key(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> str:
    """Name of a graph in its archive.

    Args:
        request: The model and its inputs.
        settings: Settings of the setup that change the graph.
        trace_version: Version of the tracer.
    """
    key = [asdict(request), dict(settings), GRAPH_FORMAT_VERSION, trace_version]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def shipped_graph(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> Graph | None:
    """The graph of a model that came with the package, None if there is none of this input and these settings."""
    asked = request.model
    known = find_architecture(asked)
    if known is not None and not asked.startswith("hf:"):
        request = replace(request, model=known.name)  # it may be asked for by its name on the hub
    found = _shipped_graph(request, settings, trace_version)
    return found if found is None or found.model == asked else replace(found, model=asked)


def _shipped_graph(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> Graph | None:
    keys = _index().get(request.model, frozenset())
    key = graph_key(request, settings, trace_version)
    if key in keys:
        return _read(shipped_archive(request.model), key)
    own = replace(request, image_size=None, input_shape=None, sequence_length=None)
    key = graph_key(own, settings, trace_version)
    graph = _read(shipped_archive(request.model), key) if key in keys else None
    return graph if graph is not None and _has_this_input(graph, request) else None


def _has_this_input(graph: Graph, request: ModelRequest) -> bool:
    """True if an input that was named is the model's own."""
    shape = graph.input_shape
    return (
        (request.image_size is None or shape[-2:] == (request.image_size, request.image_size))
        and (request.input_shape is None or shape == tuple(request.input_shape))
        and (request.sequence_length is None or shape == (request.sequence_length,))
    )


@lru_cache(maxsize=8)
def _read(path: Path, key: str) -> Graph | None:
    import tarfile  # few questions read an archive: their graphs are kept

    try:
        with tarfile.open(path, "r|xz") as archive:
            for member in archive:  # what follows the one that is wanted need not be unpacked
                content = archive.extractfile(member) if member.name == f"{key}.npz" else None
                if content is not None and member.size <= LARGEST_FILE_BYTES:
                    return read_graph(io.BytesIO(content.read()))
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError):
        return None
    return None


TRACE_VERSION = 2
"""Version of graphs, raised whenever the tracer or a rule changes the contents of a graph."""

_KEPT_VERSION = 2
"""The same of kept graphs alone: raised where no graph of the package changes, as for linear attention."""

_SAVING_VERSION = 6
"""Version of the ways to save memory, for graphs in the cache that use one; the package's are made anew."""

_CACHE_BYTES = 2**30
"""Largest size of the cache of graphs on disk [bytes]; graphs of images have 20 to 200 KB."""

_FEW_SUFFIX = ".few.npz"
"""End of the names of graphs with a few of many equal blocks."""

_NUMBERED = re.compile(r"(^|[.,(|\[])\d")
"""Layers that are named by the numbers of their blocks, of which all must be there then."""

_PARTIAL_S = 3600.0
"""Age from which on a half-written graph is left over [s]."""


def trace(
    request: ModelRequest,
    setup: TrainingSetup,
    module: Any = None,
    *,
    use_cache: bool = True,
    few_blocks: bool = False,
) -> Graph:
    """The operation graph of one step of a model.

    Graphs of common models come with the package: they are taken where the installed libraries
    are those they were traced with, or are not installed. Another graph of a named model or of a file is kept in the
    cache folder, keyed by the model, the inputs, the setup, the library versions and forerun's own; a second call
    loads no framework. Models that are built by the user's own code are traced every time, because their definition
    cannot be known from outside. Files and code of the user are built in a process of their own, see ``isolated``.

    Args:
        request: The model and its inputs.
        setup: Training configuration; the batch size matters only for models whose sizes are not affine in it.
        module: Module or ``keras.Model`` to trace in place of the one the request names.
        use_cache: True reads and writes the cache, and takes graphs that came with the package.
        few_blocks: Whether a few of many equal blocks are enough; ``Graph.blocks`` names all of them. A kept graph of
            all blocks is not taken instead: an answer must not depend on what was asked before.

    Raises:
        UsageError: The model or an option is not known.
        MissingExtraError: The model must be traced, and PyTorch is not installed.
        ModelBuildError: The model could not be built.
        TraceError: The step could not be recorded.
        IsolationError: The model's own code ended its process, took too long or needed too much memory.
    """
    if module is None and (name := full_name(request.model)) != request.model:
        found = trace(replace(request, model=name), setup, use_cache=use_cache, few_blocks=few_blocks)
        return replace(found, notes=(*found.notes, f"{request.model} is taken for {name}"))
    is_compiled = setup.compile and not is_keras(request.model if module is None else module)
    captured = capture_path(request.model) if module is None else None
    if captured is not None:
        graph = _captured(captured, setup)
    else:
        graph = _eager_graph(
            request,
            setup,
            module,
            use_cache=use_cache,
            few_blocks=few_blocks,
            needs_compiled_ends=is_compiled,
        )
    if not is_compiled:
        return graph
    from forerun.graph.passes import compiled_graph

    return compiled_graph(graph, with_loss=setup.compile_loss)


def _eager_graph(
    request: ModelRequest,
    setup: TrainingSetup,
    module: Any,
    *,
    use_cache: bool,
    few_blocks: bool,
    needs_compiled_ends: bool,
) -> Graph:
    """The graph of a model with the memory of eager execution, read or traced.

    A graph that was kept without the ends of its blocks under a compiler does where they are not needed, or the
    libraries to trace it anew are missing.
    """
    path = cache_path(request, setup) if use_cache and module is None else None
    known = None
    if few_blocks and path is not None and (known := _shipped(request, setup)) is None:
        path = path.with_suffix(_FEW_SUFFIX)
    if known is None:
        known = _known(path, setup)
    if known is None and path is not None and not few_blocks:
        known = _shipped(request, setup)
        if known is not None and not known.notes:  # a file of the cache holds no notes
            _keep(known, path)  # unpacking the archive takes longer than reading a file
    # Graphs of older releases lack the ends of blocks under a compiler, which eager steps do not ask for.
    if known is not None and (len(known.memory.compiled_end) or not needs_compiled_ends):
        return known
    few_blocks = few_blocks and module is None
    try:
        graph, is_general = _made_apart(request, setup, module, few_blocks)
    except MissingExtraError:
        if known is None:
            raise
        return known
    if path is None and use_cache and module is None:
        path = cache_path(request, setup)  # a configuration from the hub is known only now
        path = path.with_suffix(_FEW_SUFFIX) if path is not None and few_blocks else path
    if path is not None and is_general:
        _keep(graph, path)
    return graph


def _made_apart(
    request: ModelRequest, setup: TrainingSetup, module: Any, few_blocks: bool
) -> tuple[Graph, bool]:
    """The graph, traced in a process of its own where it is of the user's files or code, and whether it is general."""
    if module is not None or not is_isolated(request.model):
        return _made(request, setup, module, few_blocks)
    with stage(f"tracing a step of {request.model}"), _needing_torch(request):
        graph, is_general = run_isolated(
            _made, request, setup, None, few_blocks, what=f"tracing {request.model}"
        )
    return graph, is_general


def _made(
    request: ModelRequest, setup: TrainingSetup, module: Any = None, few_blocks: bool = False
) -> tuple[Graph, bool]:
    """The graph of a model, built and traced now, and whether it may be kept in the cache."""
    if is_keras(request.model if module is None else module):
        with stage(f"loading Keras and tracing a step of {request.model}"):
            (found,) = _keras_tracer()([(request, setup, module)])
        if isinstance(found, ForerunError):
            raise found
        return found, found.only_batch_size is None
    with stage("loading PyTorch"), _needing_torch(request):
        from forerun.tracing.models.sources import build_model
        from forerun.tracing.saving.blocks import keep_few_blocks, of_all_blocks
        from forerun.tracing.saving.prepare import with_saving

    with stage(f"building {request.model}"):
        built = build_model(
            request.model if module is None else module,
            image_size=request.image_size,
            input_shape=request.input_shape,
            sequence_length=request.sequence_length,
            num_classes=request.num_classes,
            training=setup.phase is not Phase.INFERENCE,
        )
    with stage(f"tracing a step of {request.model}"):
        named = ",".join((*setup.saving.lora_targets, *setup.saving.freeze))
        if few_blocks and not _NUMBERED.search(named):
            built = replace(built, all_blocks=keep_few_blocks(built.module))
        try:
            built = with_saving(built, setup)
            graph = trace_built(built, setup)
        except ForerunError:
            if not built.all_blocks:
                raise
            return _made(request, setup, module)  # its code may count on blocks that were left out
        graph = of_all_blocks(graph, built) if built.all_blocks else graph
    # The key holds no batch size, so a graph for one batch size only must not be stored under it.
    return graph, built.may_be_kept and graph.only_batch_size == built.only_batch_size


def _captured(path: Path, setup: TrainingSetup) -> Graph:
    """The graph of a captured script, or of its validation, with what is known of the script as notes."""
    from forerun.graph.captured import read_capture
    from forerun.graph.passes import forward_pass

    found = read_capture(path)
    graph = found.graph if setup.phase is Phase.TRAIN else forward_pass(found.graph)
    return replace(graph, notes=(*found.graph.notes, *found.facts.notes()))


def is_traced(request: ModelRequest, setup: TrainingSetup, few_blocks: bool = False) -> bool:
    """True if the cache holds a sound graph of a model, or it came with the package: tracing it needs no framework."""
    request = replace(request, model=full_name(request.model))
    path = cache_path(request, setup)
    if path is None:
        return False
    path = path.with_suffix(_FEW_SUFFIX) if few_blocks else path
    return _known(path, setup) is not None or _shipped(request, setup) is not None


def _shipped(request: ModelRequest, setup: TrainingSetup) -> Graph | None:
    """The graph that came with the package, if its libraries are installed in the same versions, or not at all."""
    graph = shipped_graph(request, traced_settings(setup), TRACE_VERSION)
    if graph is None:
        return None
    installed = library_versions(request.model, has_adapters=setup.saving.lora_rank is not None)
    if installed == graph.versions:
        return graph
    # Where the libraries are missing, an answer from other versions is better than none.
    if {name for name, _ in installed} == {name for name, _ in graph.versions}:
        return None  # the model may differ in other versions
    versions = " and ".join(f"{name} {version}" for name, version in graph.versions)
    note = f"traced with {versions}, which are not installed here"
    return replace(graph, notes=(*graph.notes, note))


@contextlib.contextmanager
def _needing_torch(request: ModelRequest) -> Iterator[None]:
    """Says which models need no PyTorch where it is missing.

    Raises:
        MissingExtraError: PyTorch is not installed.
    """
    try:
        with needing(f"tracing {request.model}"):
            yield
    except MissingExtraError as error:
        if str(error).startswith(request.model):
            raise  # an outer part of the same question
        error.args = (without_torch(request.model, error),)
        raise


def without_torch(model: str, error: MissingExtraError) -> str:
    """The message where PyTorch is missing: a misspelt name is told its neighbours before the package to install.

    The extra is that of the model's library, which brings PyTorch along, so that one installation is enough.
    """
    source = named_source(model) or find_source(_SOURCE_OF_FILE.get(Path(model).suffix, ""))
    if source is not None and source.library in EXTRA_OF_PACKAGE:
        error = MissingExtraError(model, EXTRA_OF_PACKAGE[source.library])
    known, install = shipped_models(), str(error).partition("; install it with: ")[2]
    if model not in known:
        near = near_matches(model, known) or f", such as {known[0]};"
        return f"{model} is not one of the {len(known)} models that need no extra{near} others need PyTorch: {install}"
    settings = f"its own input, phases train and inference, optimizers {', '.join(SHIPPED_OPTIMIZERS)}"
    if find_architecture(model) is not None:
        settings += (
            ", or bf16 with 2048 or 4096 tokens, --recompute full and --lora 16, --quantize nf4 or none"
        )
    return f"{model} needs no extra with {settings}; for other settings: {install}"


_SOURCE_OF_FILE = {".json": "hf", ".onnx": "onnx"}


def trace_keras_models(questions: Sequence[tuple[ModelRequest, TrainingSetup]]) -> list[Graph | ForerunError]:
    """Graphs of named Keras models, or errors in their place; graphs not in the cache are traced in one process.

    Args:
        questions: Models with their setups.

    Raises:
        MissingExtraError: Keras is not installed.
        TraceError: The process took too long.
    """
    paths = [cache_path(request, setup) for request, setup in questions]
    known = {
        index: kept
        for index, (path, (_, setup)) in enumerate(zip(paths, questions, strict=True))
        if (kept := _known(path, setup)) is not None
    }
    missing = [index for index in range(len(questions)) if index not in known]
    # All in one process: starting TensorFlow takes longer than most traces.
    asked = [(*questions[index], None) for index in missing]
    traced = dict(zip(missing, _keras_tracer()(asked) if asked else [], strict=True))
    for index, graph in traced.items():
        path = paths[index]
        if path is not None and not isinstance(graph, ForerunError) and graph.only_batch_size is None:
            _keep(graph, path)
    return [known[index] if index in known else traced[index] for index in range(len(questions))]


def _keras_tracer() -> Callable[[Sequence[Question]], list[Graph | ForerunError]]:
    source = find_source("keras")
    if source is None or source.trace is None:
        raise UsageError(
            "expected forerun with its adapter for Keras, but this installation has none; install it anew"
        )
    return source.trace


def _known(path: Path | None, setup: TrainingSetup) -> Graph | None:
    """The graph in the cache, if it holds for the batch size."""
    known = read_graph(path) if path is not None else None
    return (
        known if known is not None and known.only_batch_size in (None, setup.batch_size_per_device) else None
    )


def _keep(graph: Graph, path: Path) -> None:
    # A full or read-only disk slows the next call, but does not fail this one.
    with contextlib.suppress(OSError):
        write_graph(graph, path)
        _evict(path.parent)


def _evict(folder: Path) -> None:
    """Removes the graphs that were used longest ago, if the cache has grown too large."""
    found = []
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            status = entry.stat()
            if entry.name.endswith(".partial") and time.time() - status.st_mtime > _PARTIAL_S:
                Path(entry.path).unlink()  # its writer was killed
                continue
            found.append((max(status.st_atime, status.st_mtime), status.st_size, entry.path))
    size_bytes = sum(size for _, size, _ in found)
    if size_bytes <= _CACHE_BYTES:
        return
    # A fifth of the room is made at once, so that not every graph pays for a walk over the folder.
    for _, size, name in sorted(found):
        Path(name).unlink(missing_ok=True)
        size_bytes -= size
        if size_bytes <= 0.8 * _CACHE_BYTES:
            return


def trace_built(built: BuiltModel, setup: TrainingSetup) -> Graph:
    """Traces a built model at two batch sizes and joins the traces; at one if sizes are not affine."""
    from forerun.graph.affine import graph_for
    from forerun.tracing.models.built_model import without_own_loss
    from forerun.tracing.models.meta_build import explain_failure, is_data_dependent
    from forerun.tracing.step import record_step
    from forerun.tracing.step_graph import step_graph

    versions = library_versions(built.name, has_adapters=setup.saving.lora_rank is not None)

    def graph_at(batch_size: int) -> Graph:
        return step_graph(built, record_step(built, setup, batch_size), versions)

    try:
        if built.only_batch_size is not None:
            graph = graph_at(built.only_batch_size)
        else:
            graph = graph_for(graph_at, setup.batch_size_per_device)
    except ForerunError:
        raise
    except Exception as error:  # the user's model may raise anything
        plain = without_own_loss(built) if is_data_dependent(error) else None
        if plain is None:
            raise explain_failure(error, built) from error
        return trace_built(plain, setup)
    return _with_update(graph, built, setup)


def _with_update(graph: Graph, built: BuiltModel, setup: TrainingSetup) -> Graph:
    """The graph with the update of its optimizer: fused, or on the host."""
    from forerun.tracing.saving.offload import host_traffic

    traffic = host_traffic(built.module, built.blocks, setup, built.name)
    if traffic is not None:
        return replace(graph, host_traffic=traffic)
    if setup.optimizer_implementation is not OptimizerImplementation.FUSED:
        return graph
    from forerun.tracing.optimizers import fuse_optimizer, without_update_lists

    has_copies = setup.saving.master_weights is MasterWeights.FP32 and setup.precision.is_half
    return fuse_optimizer(graph if has_copies else without_update_lists(graph))


def library_versions(model: str, *, has_adapters: bool = False) -> tuple[tuple[str, str], ...]:
    """Versions of the libraries that define a model, read without importing them."""
    names = ["torch", "peft"] if has_adapters else ["torch"]
    architecture = find_architecture(model)
    source = None if architecture else named_source(model)
    library = "transformers" if architecture else source and source.library
    if library:
        names.append(library)
    return tuple((name, version) for name in names if (version := installed_version(name)))


def cache_path(request: ModelRequest, setup: TrainingSetup) -> Path | None:
    """File of a kept graph; None of a model whose definition cannot be known from outside."""
    definition = _definition(request.model)
    if definition is None:
        return None
    # A change to the ways to save memory leaves the graphs of plain steps valid.
    ways = () if setup.saving == NO_SAVING else (_SAVING_VERSION,)
    key = {
        "request": asdict(request),
        "definition": definition,
        "setup": traced_settings(setup) | ({"compile": setup.compile} if is_keras(request.model) else {}),
        "versions": library_versions(request.model, has_adapters=setup.saving.lora_rank is not None),
        "format": (GRAPH_FORMAT_VERSION, TRACE_VERSION, _KEPT_VERSION, *ways),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "traces" / f"{digest[:40]}.npz"


def _definition(model: str) -> str | None:
    """Definition of a model besides its name: the content of its file; None if that is not known."""
    prefix, _, rest = model.partition(":")
    known = find_architecture(model)
    if known is not None and not (rest and Path(rest).expanduser().exists()):
        return json.dumps([known.model_class, dict(known.config)], sort_keys=True)
    if prefix == "hf":
        from forerun.tracing.models.hub import is_hub_name, kept_config_path

        rest = str(kept_config_path(rest)) if is_hub_name(rest) else rest
    is_keras_file = model.endswith((".keras", ".h5", ".hdf5"))
    source = named_source(model)
    if is_keras_file or (source is not None and source.reads_file):
        try:
            return hashlib.sha256(
                Path(model.removeprefix("keras:") if is_keras_file else rest).read_bytes()
            ).hexdigest()
        except OSError:
            return None
    return None if ".py:" in model else ""


def _traced_saving(setup: TrainingSetup) -> dict[str, object]:
    """Ways to save memory that change the graph; what a phase without an update does not use is left out."""
    # Two setups with the same graph must have one key in the cache, so settings without effect are left out
    # of it.
    found = asdict(setup.saving)
    if setup.saving.quantize is None:
        del found["unquantized"]
    else:
        found["unquantized"] = Unquantized.FP32 if setup.widens_unquantized else Unquantized.HALF
    for name in ("lora_dropout", "keep_inputs", "quantize_experts"):
        if not found[name]:
            del found[name]
    if not setup.saving.fused_kernels:
        del found["fused_kernels"]
    if setup.saving.fp8_recipe in (None, Fp8Recipe.DYNAMIC):
        del found["fp8_recipe"]
    elif setup.precision is Precision.FP8:
        found["fp8_recipe"] = f"{setup.saving.fp8_recipe}, experts too"
    if setup.phase is not Phase.TRAIN:
        found["recompute"] = "none"
    return found


def traced_settings(setup: TrainingSetup) -> dict[str, object]:
    """Settings that change the graph; precisions with the same kernels and sizes share a graph."""
    same = {Precision.TF32: Precision.FP32, Precision.BF16: Precision.FP16, Precision.AMP_BF16: Precision.AMP}
    trains = setup.phase is Phase.TRAIN
    updates = trains and setup.optimizer != "none"
    implementation = setup.optimizer_implementation if updates else OptimizerImplementation.FOREACH
    return {
        "precision": same.get(setup.precision, setup.precision),
        "layout": setup.layout,
        "optimizer": setup.optimizer,
        "optimizer_implementation": implementation,
        "phase": setup.phase,
        "fused_attention": setup.fused_attention,
        "zero_grad_to_none": setup.zero_grad_to_none or not trains,
        "keeps_gradients": setup.keeps_gradients and trains,
        "saving": _traced_saving(setup),
        **({} if setup.attention_kernel == "plain" else {"attention_kernel": setup.attention_kernel}),
        **({} if setup.compile_loss else {"compile_loss": False}),
        "autocast_backward": setup.autocast_backward and trains and setup.precision.is_autocast,
    }
