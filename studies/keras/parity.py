"""The same network in PyTorch and in Keras: parameters, work and traffic of one step by class of operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forerun.base.answers import Answer, fields_of
from forerun.graph.graph import Graph, OpClass, StepPart, at_batch
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, TrainingSetup
from forerun.tracing.trace import trace
from studies.markdown import markdown_table

PAIRS: tuple[tuple[str, str], ...] = (
    ("cnn:depth=2,base_filters=32", "keras:cnn:depth=2,base_filters=32"),
    ("cnn:depth=4,base_filters=64", "keras:cnn:depth=4,base_filters=64"),
    ("mnist-cnn", "keras:mnist-cnn"),
    ("cifar10-cnn", "keras:cifar10-cnn"),
    ("pcam-cnn", "keras:pcam-cnn"),
    ("torchvision:resnet50", "keras:resnet50-v1.5"),
    ("torchvision:vgg16", "keras:VGG16"),
    ("torchvision:mobilenet_v2", "keras:MobileNetV2"),
)
"""Networks that are defined alike in both frameworks, PyTorch's name and Keras'."""

SHARED_CLASSES = (
    OpClass.CONV,
    OpClass.DEPTHWISE_CONV,
    OpClass.GROUPED_CONV,
    OpClass.LINEAR,
    OpClass.ACTIVATION,
)
"""Classes whose work must be the same to the last operation."""

REASONS: dict[OpClass, str] = {
    OpClass.BATCH_NORM: "one kernel in PyTorch; moments and element-wise operations in Keras without XLA",
    OpClass.REDUCE: "Keras: moments of batch norms; gradients of biases, which PyTorch has inside its products",
    OpClass.MUL: "Keras: scaling of batch norms and of the loss's gradient",
    OpClass.ADD: "Keras adds biases by operations of their own, batch norms shift; PyTorch has both inside kernels",
    OpClass.ELEMENTWISE: "Keras: squares and roots of batch norms; probabilities clipped before their logarithm",
    OpClass.COPY: "Keras: padding as a layer of its own, statistics assigned; PyTorch pads inside the convolution",
    OpClass.CAST: "labels are cast in one framework only",
    OpClass.SOFTMAX: "PyTorch takes the logarithm of the softmax in the loss, Keras' applications end in a softmax",
    OpClass.DROPOUT: "torchvision's network has dropout, Keras' has none",
    OpClass.MAX_POOL: "counted on its largest operand, which Keras has padded by a layer of its own",
    OpClass.AVG_POOL: "global pooling is a mean in Keras, a reduction",
    OpClass.CONV: "bytes: filters and their gradients in the other order",
    OpClass.LINEAR: "bytes: the bias is part of PyTorch's product",
}
"""Why a class differs where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """Work and traffic of one class of operations in both frameworks, optimizer left out.

    Attributes:
        op_class: The class.
        flops: Work in PyTorch and in Keras [FLOP].
        traffic_bytes: Traffic in PyTorch and in Keras [bytes].
        reason: Why they differ; empty where they do not.
    """

    op_class: OpClass
    flops: tuple[float, float]
    traffic_bytes: tuple[float, float]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow(Answer):
    """One network in both frameworks.

    Attributes:
        pytorch, keras: Names of the models.
        num_parameters: Trainable parameters in PyTorch and in Keras.
        classes: Figures by class.
    """

    pytorch: str
    keras: str
    num_parameters: tuple[int, int]
    classes: tuple[ClassFigures, ...]

    @property
    def is_equal(self) -> bool:
        """Whether parameters and the work of every shared class are the same."""
        shared = [c for c in self.classes if c.op_class in SHARED_CLASSES]
        return self.num_parameters[0] == self.num_parameters[1] and all(
            c.flops[0] == c.flops[1] for c in shared
        )

    @property
    def unexplained(self) -> tuple[OpClass, ...]:
        """Classes that differ without a reason."""
        return tuple(c.op_class for c in self.classes if c.flops[0] != c.flops[1] and not c.reason)

    def json_fields(self) -> dict[str, Any]:
        """The fields, and whether the networks are equal; classes by name."""
        rows = [{**fields_of(c), "op_class": c.op_class.name.lower()} for c in self.classes]
        return {
            "pytorch": self.pytorch,
            "keras": self.keras,
            "num_parameters": self.num_parameters,
            "is_equal": self.is_equal,
            "classes": rows,
        }


def keras_parity(pairs: Iterable[tuple[str, str]] = PAIRS, batch_size: int = 32) -> list[ParityRow]:
    """Traces each pair of networks and compares them.

    Args:
        pairs: Names in PyTorch and in Keras.
        batch_size: Samples of the step.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    rows = []
    for pytorch, keras in pairs:
        graphs = [
            trace(ModelRequest(model=name), TrainingSetup(layout=layout))
            for name, layout in ((pytorch, Layout.NCHW), (keras, Layout.NHWC))
        ]
        rows.append(compare_graphs(graphs[0], graphs[1], batch_size))
    return rows


def compare_graphs(pytorch: Graph, keras: Graph, batch_size: int) -> ParityRow:
    """Figures of two graphs side by side at a batch size."""
    sums = [_sums(graph, batch_size) for graph in (pytorch, keras)]
    classes = []
    for op_class in sorted(set(sums[0]) | set(sums[1])):
        (flops, moved), (other_flops, other_moved) = (found.get(op_class, (0.0, 0.0)) for found in sums)
        differs = flops != other_flops or moved != other_moved
        classes.append(
            ClassFigures(
                op_class=op_class,
                flops=(flops, other_flops),
                traffic_bytes=(moved, other_moved),
                reason=REASONS.get(op_class, "") if differs else "",
            )
        )
    return ParityRow(
        pytorch=pytorch.model,
        keras=keras.model,
        num_parameters=(pytorch.num_trainable_parameters, keras.num_trainable_parameters),
        classes=tuple(classes),
    )


def _sums(graph: Graph, batch_size: int) -> dict[OpClass, tuple[float, float]]:
    ops = graph.ops
    flops = at_batch(ops.flops, batch_size) * ops.count
    moved = at_batch(ops.read_bytes + ops.write_bytes, batch_size) * ops.count
    in_step = ops.step_part != StepPart.OPTIMIZER
    found = {}
    for value in sorted({int(kind) for kind in ops.op_class[in_step]}):
        chosen = in_step & (ops.op_class == value)
        found[OpClass(value)] = (float(flops[chosen].sum()), float(moved[chosen].sum()))
    return found


def parity_markdown(rows: Iterable[ParityRow]) -> str:
    """The comparison as tables of Markdown, one for each pair."""
    parts = []
    for row in rows:
        same = "the same" if row.is_equal else "NOT the same"
        counts = " and ".join(f"{number:,}" for number in row.num_parameters)
        classes = ", ".join(c.name.lower() for c in SHARED_CLASSES)
        parts.append(
            f"**{row.pytorch}** and **{row.keras}**: {counts} parameters; parameters and work of {classes}: {same}\n"
        )
        header = ("class", "GFLOP PyTorch", "GFLOP Keras", "MB PyTorch", "MB Keras", "why")
        cells = []
        for c in row.classes:
            work = (f"{value / 1e9:.6g}" for value in c.flops)
            moved = (f"{value / 1e6:.4g}" for value in c.traffic_bytes)
            cells.append((c.op_class.name.lower(), *work, *moved, c.reason))
        parts.append(markdown_table(header, cells))
    return "\n".join(parts)
