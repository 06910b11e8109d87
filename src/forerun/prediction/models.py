"""Models and cost models that a run is predicted with: traced models, their names, the cost model of a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.answers import fields_of
from forerun.base.errors import InvalidSetupError
from forerun.base.extras import installed_version
from forerun.base.kept import Kept, KeptBytes, cache_folder, write_whole
from forerun.cost.time.weights import DEFAULT_STACK, CostModel, load_weights, shipped_weights_path
from forerun.graph.graph import Graph, expert_products
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.job import read_expert_load
from forerun.question.model import ModelRequest, architectures, capture_path, captured_facts
from forerun.question.post_training import PLAIN
from forerun.question.run import HERE, Run
from forerun.question.setup import Phase, TrainingSetup
from forerun.tracing.source import named_source
from forerun.tracing.trace import shipped_models, trace

if TYPE_CHECKING:  # of several devices, which most runs do not have
    from forerun.cost.communication.constants import LayoutTable, MeasuredLayouts


_MODELS_BYTES = 256 * 2**20
"""Size of all traced models that are kept in memory [bytes]."""
_GENERAL_BATCH_SIZE = 32
_EVEN = "even"


def is_fixed(model: str) -> bool:
    """True if a name determines the model; a file may change between two questions."""
    if ".py:" in model or capture_path(model) is not None:
        return False
    source = named_source(model)
    return source is None or (source.is_trusted and not source.reads_file)


_models: KeptBytes[PreparedModel] = KeptBytes(_MODELS_BYTES)
_MEASURED: Kept[MeasuredLayouts] = Kept(16)


def with_experts(graph: Graph, load: str, most: float | None) -> Graph:
    """The graph with the tokens of its experts.

    Args:
        graph: The step.
        load: See ``read_expert_load``.
        most: Most tokens of an expert in parts of the mean, None for all that it is sent.

    Raises:
        InvalidSetupError: It has no experts, or the law or file is not theirs.
    """
    if load == _EVEN and most is None:
        return graph
    rows = np.flatnonzero(expert_products(graph.ops))
    if not len(rows) or not graph.tokens_per_sample or graph.only_batch_size is not None:
        why = "writes few tokens at a time" if len(rows) else "has none"
        raise InvalidSetupError(
            f"--expert-load and --expert-capacity are for steps of models with experts, and {graph.model} {why}; leave "
            "them out"
        )
    first = graph.ops.gemm[rows[0]]
    num_experts = round(float(first[0, 0]))
    found = read_expert_load(
        load, num_experts, float(first[1:, 1].max()) * num_experts / graph.tokens_per_sample
    )
    if most is None:
        return replace(graph, expert_load=found)
    from forerun.graph.shards import with_kept_tokens  # no other question about one device needs it

    parts = np.minimum(found.parts, most)
    kept = float(parts.mean())
    note = f"experts drop {100 * (1 - kept):.0f} % of the tokens above {most:g} times the mean"
    return replace(
        graph,
        ops=with_kept_tokens(graph, kept),
        expert_load=replace(found, parts=tuple((parts / kept).tolist())),
        notes=(*graph.notes, note),
    )


def _prepared(request: ModelRequest, setup: TrainingSetup, module: Any = None, **ways: bool) -> PreparedModel:
    """The step of a model, with the load of its experts: traced, or composed of several traced passes."""
    load, most = setup.expert_load, setup.expert_capacity
    setup = replace(setup, expert_load=_EVEN, expert_capacity=None, host_slowdown=1.0)

    def traced(request: ModelRequest, setup: TrainingSetup) -> Graph:
        return trace(request, setup, module, **ways)

    if setup.post == PLAIN and setup.phase is not Phase.GENERATE:
        return prepare(with_experts(traced(request, setup), load, most))
    from forerun.prediction.post_training import composed_step, divided_step

    if ways.get("few_blocks"):
        policy, beside = divided_step(request, setup, traced)
        policy = with_experts(policy, load, most)
        return replace(prepare(policy), beside={name: prepare(graph) for name, graph in beside.items()})
    return prepare(with_experts(composed_step(request, setup, traced), load, most))


def _why_fixed(model: str) -> str:
    """The reason for a fixed batch size and the way to another, as the end of a sentence."""
    facts = captured_facts(model)
    if facts is None:
        return "; ask for that batch size, or export the model with a free batch axis"
    said = (text.partition(": ") for text in facts.not_captured if text.startswith("other batch sizes"))
    reason = next((f": {why}" for _, _, why in said), "")
    return f"{reason}; capture the script with that batch size in its own arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModels:
    """Traced models of the runs of one question; each model is traced once.

    Attributes:
        use_cache: Whether to read and write the cache of traced graphs.
    """

    use_cache: bool = True
    _own: dict[tuple[ModelRequest, TrainingSetup, bool], PreparedModel] = field(default_factory=dict)

    def of(self, run: Run, setup: TrainingSetup | None = None) -> PreparedModel:
        """The traced step of a run, or of its model in another setup, for any batch size if the model allows.

        Where units are divided, three of many equal blocks are traced and stand for all: within 0.1 % of the step, and
        of small ones that wait for the host within 1.5 %.

        Raises:
            InvalidSetupError: The model runs at another batch size only.
            UsageError, FailureError: It cannot be built or traced.
        """
        wanted, few = (run.compute_setup, run.uses_layout) if setup is None else (setup, False)
        # A graph that holds for any batch size is kept under one of them.
        general = self._traced(run, replace(wanted, batch_size_per_device=_GENERAL_BATCH_SIZE), few)
        if general.graph.only_batch_size in (None, wanted.batch_size_per_device):
            return general
        exact = self._traced(run, wanted, few)
        if exact.graph.only_batch_size not in (None, wanted.batch_size_per_device):
            raise InvalidSetupError(
                f"{exact.graph.model} runs at batch size {exact.graph.only_batch_size} only, got "
                f"{wanted.batch_size_per_device}{_why_fixed(run.model.model)}"
            )
        return exact

    def runs(self, run: Run, batch_sizes: Sequence[int]) -> Iterator[tuple[PreparedModel, slice]]:
        """The traced model and the batch sizes it holds for: all of them, or one if it depends on them."""
        each = [replace(run, setup=replace(run.setup, batch_size_per_device=size)) for size in batch_sizes]
        first = self.of(each[0])
        if first.graph.only_batch_size is None:
            yield first, slice(None)
            return
        for index, one in enumerate(each):
            yield self.of(one), slice(index, index + 1)

    def _traced(self, run: Run, setup: TrainingSetup, few_blocks: bool) -> PreparedModel:
        key = (run.model, setup, few_blocks)
        # A name that determines its model is remembered for other questions too.
        is_shared = run.module is None and self.use_cache and is_fixed(run.model.model)
        found = _models.find(key) if is_shared else self._own.get(key)
        if found is None:
            found = _prepared(run.model, setup, run.module, use_cache=self.use_cache, few_blocks=few_blocks)
            if is_shared:
                # Kept beside the graph: its distinct kernels, and features of steps; together about as large again.
                _models.keep(key, found, 2 * found.graph.size_bytes)
            else:
                self._own[key] = found
        return found


def trace_model(request: ModelRequest, setup: TrainingSetup, few_blocks: bool = False) -> str:
    """Traces a model into the cache of graphs, and returns its name.

    Args:
        request: The model.
        setup: Its configuration.
        few_blocks: Whether three of many equal blocks stand for all.

    Raises:
        UsageError, FailureError: It cannot be built or traced.
    """
    return trace(request, setup, few_blocks=few_blocks).model


def kept_model_names() -> dict[str, Any] | None:
    """The kept answer of ``model_names``, None if it was never asked with these libraries; loads nothing."""
    try:
        found: dict[str, Any] = json.loads(_names_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _names_file() -> Path:
    from forerun import __version__  # read from the metadata of the package, which takes 40 ms

    libraries = (installed_version(name) or "" for name in ("torchvision", "timm"))
    key = json.dumps([__version__, *architectures(), *libraries])
    return cache_folder() / f"model-names-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def model_names() -> dict[str, Any]:
    """Names of models by their library, with the keys of the families; kept in the cache folder."""
    found = _names()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs some seconds the next time
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_whole(_names_file(), json.dumps(found).encode())
    return found


def _names() -> dict[str, Any]:
    catalogued = list(architectures())
    if find_spec("torch") is None:  # what the package answers without it
        known = shipped_models()
        built = [
            name
            for name in known
            if not name.startswith(("torchvision:", "timm:")) and name not in catalogued
        ]
        return {
            "families": [{"name": name, "input_shape": [], "keys": []} for name in built],
            "language": [name for name in known if name in catalogued],
            "torchvision": [name for name in known if name.startswith("torchvision:")],
            "timm": [name for name in known if name.startswith("timm:")],
        }
    from forerun.tracing.models.families import FAMILIES
    from forerun.tracing.models.vision_models import timm_names, torchvision_names

    families = [
        {
            "name": family.name,
            "input_shape": list(family.input_shape),
            "keys": [{"name": key, **fields_of(rule)} for key, rule in family.keys.items()],
        }
        for family in FAMILIES.values()
    ]
    return {
        "families": families,
        "language": catalogued,
        "torchvision": [f"torchvision:{name}" for name in torchvision_names()],
        "timm": [f"timm:{name}" for name in timm_names()],
    }


def cost_model_of(run: Run) -> CostModel:
    """The calibration that the run names, or that of this machine for ``here``, or else the shipped weights.

    A calibration is taken for models of the framework it was made with only.

    Raises:
        UsageError: The named file is none of this device and framework.
        CostModelError: A file is damaged, or was made for other features than this version computes.
    """
    named = run.software.calibration
    if named is None:
        return load_weights(shipped_weights_path())
    from forerun.cost.communication.constants import is_layouts_file
    from forerun.cost.time.correction import find_calibration, load_calibration

    if named == HERE:
        return find_calibration(run.cluster.device, run.stack) or load_weights(shipped_weights_path())
    if is_layouts_file(named):
        return load_weights(shipped_weights_path())
    return load_calibration(Path(named), run.cluster.device, run.stack)


def layout_table_of(run: Run) -> LayoutTable:
    """The constants of several devices, with the measured layouts that the run names as its calibration.

    Raises:
        CostModelError: The file is damaged, or of another device.
    """
    from forerun.cost.communication.constants import is_layouts_file, load_layout_table, load_measured_layouts

    named, table = run.software.calibration, load_layout_table()
    if named is None or not is_layouts_file(named):
        return table
    path = Path(named)
    changed_ns = path.stat().st_mtime_ns if path.exists() else 0
    # Every layout of a search asks for it.
    measured = _MEASURED.get(
        (),
        (named, changed_ns, run.cluster.device.name),
        lambda: load_measured_layouts(path, run.cluster.device.name),
    )
    return replace(table, measured=measured)


def other_calibration_note(run: Run, weights: CostModel) -> tuple[str, ...]:
    """A note where this machine was calibrated, but with another framework."""
    if run.software.calibration != HERE or weights.calibrated_device is not None:
        return ()
    from forerun.cost.time.correction import calibration_path

    stack, other = run.stack, "keras" if run.stack == DEFAULT_STACK else DEFAULT_STACK
    if not calibration_path(run.cluster.device, other).exists():
        return ()
    return (
        f"this machine has a calibration of {other}, which does not hold for {stack}, so it was not used; "
        f"make one with: forerun calibrate --framework {stack}",
    )
