"""FLOP and byte formulas of PyTorch's operations.

A rule turns one ``Call`` into the cost rows of its kernels. Work is counted as the algorithm needs it (a
multiply-add is two FLOP, a convolution is direct), traffic as every operand moving once. The cost
model turns both into the time on a device.

Matrix sizes are (groups, m, n, k): ``groups`` products of (m, k) x (k, n). For a convolution with batch B,
input (Cin, H, W), output (Cout, Ho, Wo), window area a and g groups:

    forward          (g, B Ho Wo, Cout/g, Cin/g a)
    data gradient    (g, B H W,   Cin/g,  Cout/g a)
    weight gradient  (g, Cout/g,  Cin/g a, B Ho Wo)

each of 2 B Ho Wo Cout (Cin/g) a FLOP.
"""

from __future__ import annotations

from forerun.graph.graph import OpClass
from forerun.tracing.calls import RULES, Call, CostRow, streaming_row
from forerun.tracing.op_rules import products, streaming
from forerun.tracing.op_rules.streaming import multi_tensor_row, num_multi_tensor_launches

__all__ = ["RULES", "cost_rows", "num_multi_tensor_launches"]

_REGISTERED = (products, streaming)  # imported for their registrations


def cost_rows(call: Call) -> list[CostRow]:
    """Cost of a call; an operation without a rule is charged by its traffic and marked unsupported."""
    known = RULES.get(call.name)
    if known is not None:
        return known(call)
    if call.name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return [multi_tensor_row(call)]
    return [streaming_row(call, OpClass.UNKNOWN, is_supported=False)]
