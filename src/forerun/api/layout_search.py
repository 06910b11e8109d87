"""Search for layouts of a run: every layout predicted, and the best in place of ``--strategy auto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.api.models import TracedModels
from forerun.errors import InvalidSetupError
from forerun.memory.constants import visible_memory
from forerun.optime.weights import CostModel
from forerun.planner.layouts import LayoutPoint, LayoutSpace, chosen_points, layout_point, layout_runs
from forerun.prediction.cost_model import cost_model_of, layout_table_of
from forerun.prediction.estimate_run import memory_constants_of
from forerun.run.parallel import DeviceLayout
from forerun.run.run import Run
from forerun.run.sharing import Strategy

__all__ = ["resolved", "search_layouts"]


def resolved(run: Run, models: TracedModels, cost_model: CostModel | None) -> Run:
    """The run with the fastest layout that fits in place of ``--strategy auto``; any other run as it is."""
    if run.sharing.strategy is not Strategy.AUTO:
        return run
    if run.sharing.layout is not None:
        raise InvalidSetupError(
            "--strategy auto finds the layout itself; leave --parallel out, or name a strategy"
        )
    if run.cluster.num_devices == 1:
        return replace(run, sharing=replace(run.sharing, strategy=Strategy.DDP))
    points, _ = search_layouts(run, models, cost_model, None, (run.setup.saving.recompute,))
    if not points:  # its batch cannot be divided: the devices have copies of the model
        return replace(run, sharing=replace(run.sharing, strategy=Strategy.DDP))
    best, _ = chosen_points(points, 1)
    return best[0].run


def search_layouts(
    run: Run,
    models: TracedModels,
    cost_model: CostModel | None,
    global_batch: int | None,
    recomputed: Sequence[str],
) -> tuple[list[LayoutPoint], int]:
    """Predicted layouts of a run, and its global batch."""
    plain = replace(run, sharing=replace(run.sharing, strategy=Strategy.ZERO1, layout=DeviceLayout()))
    total = global_batch or run.cluster.num_devices * run.batch_size_per_device
    weights, constants = cost_model or cost_model_of(run), memory_constants_of(run.cluster.device, run)
    visible = visible_memory(run.cluster.device).value_bytes
    table = layout_table_of(run)
    found = []
    for recompute in recomputed:
        setup = replace(plain.setup, saving=replace(plain.setup.saving, recompute=recompute))
        asked = replace(plain, setup=setup)
        model = models.divided(asked)
        blocks = model.blocks
        space = LayoutSpace(
            num_blocks=len(blocks.names),
            num_heads=blocks.num_heads,
            can_be_divided=blocks.can_be_divided,
            num_tokens=model.model.graph.tokens_per_sample,
            global_batch=total,
            num_experts=blocks.num_experts,
        )
        for candidate in layout_runs(asked, space):
            point = layout_point(model, candidate, weights, table, constants, visible)
            if point is not None:
                found.append(point)
    return found, total
