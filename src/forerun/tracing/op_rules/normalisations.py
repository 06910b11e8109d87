"""Rules of normalisations, softmax and max pooling."""

from __future__ import annotations

from math import prod

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow
from forerun.tracing.op_rules.registry import rule, streaming_row

__all__: list[str] = []


def _normalisation_rules(op_class: OpClass, flops_per_element: float, names: str) -> None:
    @rule(*names.split())
    def normalise(call: Call) -> list[CostRow]:
        source = call.tensors()[1 if "backward" in call.name else 0]
        width = source.shape[-1] if op_class is OpClass.LAYER_NORM else prod(source.shape[2:])
        return [streaming_row(call, op_class, flops_per_element, width=float(width))]


_normalisation_rules(
    OpClass.BATCH_NORM,
    5.0,
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
    _batch_norm_with_update _batch_norm_no_update""",
)
_normalisation_rules(
    OpClass.BATCH_NORM, 8.0, "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward"
)
_normalisation_rules(OpClass.LAYER_NORM, 5.0, "native_layer_norm _fused_rms_norm")
_normalisation_rules(OpClass.LAYER_NORM, 8.0, "native_layer_norm_backward _fused_rms_norm_backward")
_normalisation_rules(OpClass.GROUP_NORM, 5.0, "native_group_norm")
_normalisation_rules(OpClass.GROUP_NORM, 8.0, "native_group_norm_backward")


@rule(
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "_safe_softmax",
    "_masked_softmax",
)
def _softmax(call: Call) -> list[CostRow]:
    source = call.tensors()[0]
    dim = next((value for value in call.args if isinstance(value, int)), -1)  # after the tensor arguments
    width = source.shape[dim] if source.shape else 1
    return [streaming_row(call, OpClass.SOFTMAX, 5.0, width=float(width))]


@rule(
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
)
def _max_pool(call: Call) -> list[CostRow]:
    """One comparison per window element. The backward kernel reads gradient and indices only."""
    window = call.args[2] if "backward" in call.name else call.args[1]
    has_window = isinstance(window, (list, tuple)) and "adaptive" not in call.name
    area = float(prod(window)) if has_window else 1.0
    row = streaming_row(call, OpClass.MAX_POOL, area)
    if "backward" not in call.name:
        return [row]
    grad, indices = call.tensors()[0], call.tensors()[-1]
    return [
        CostRow(
            op_class=OpClass.MAX_POOL,
            flops=row.flops,
            read_bytes=grad.touched_bytes + indices.touched_bytes,
            write_bytes=call.outputs[0].touched_bytes,
            element_bytes=grad.element_bytes,
            elements=row.elements,
            kernel_area=area,
        )
    ]
