"""Bytes that the forward pass hands to the backward pass: eager, PyTorch's own partitioner, and the rules of forerun.

    python benchmarks/compiled_memory.py [WORD]

Small networks of torchvision, timm, Transformers and forerun's families run one compiled step on the processor without
code generation: ``min_cut_rematerialization_partition`` divides the joint graph, with inductor's decompositions, and
the tensors it saves are counted, without weights and inputs. The same networks are traced for a GPU, and what the rules
of ``forerun.tracing.compiled_memory`` save is counted. WORD chooses the networks with that word in their name.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from forerun.graph.graph import MemoryEvent
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.compiled_memory import saved_blocks
from forerun.tracing.models.sources import build_model
from forerun.tracing.step import record_step

BATCH_SIZE = 4
_VIEWS = {
    getattr(torch.ops.aten, name)
    for name in ("permute", "t", "view", "transpose", "reshape", "slice", "expand", "unsqueeze")
}


@dataclass(frozen=True)
class Case:
    """A network, named for forerun, and made for a real step on the processor."""

    name: str
    spec: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    inputs: dict[str, Any] = field(default_factory=dict)


def _family(spec: str, shape: tuple[int, ...]) -> nn.Module:
    """A network of a family with weights."""
    options = {"sequence_length": shape[0]} if len(shape) == 1 else {}
    module = build_model(spec, **options).module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def _transformers(folder: Path, model_type: str, architecture: str, **sizes: int) -> Case:
    path = folder / f"{model_type}.json"
    path.write_text(
        json.dumps({"model_type": model_type, "architectures": [architecture], **sizes}), encoding="utf-8"
    )

    def make() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **sizes)
        config.use_cache = False
        return getattr(transformers, architecture)(config)

    return Case(f"{model_type} 4x256", f"hf:{path}", make, (128,), 4000, {"sequence_length": 128})


def _cases(folder: Path) -> list[Case]:
    import timm
    import torchvision

    gpt = "gpt:depth=4,width=256,vocabulary=4000"
    of_torchvision = [
        Case(f"{name}, 64 pixels", f"torchvision:{name}", make, (3, 64, 64), 1000, {"image_size": 64})
        for name, make in (
            ("resnet18", torchvision.models.resnet18),
            ("mobilenet_v2", torchvision.models.mobilenet_v2),
        )
    ]
    of_timm = [
        Case(
            name,
            f"timm:{name}",
            partial(timm.create_model, name),
            (3, size, size),
            1000,
            {"image_size": size},
        )
        for name, size in (("convnext_atto", 64), ("mixer_s32_224", 224), ("vit_tiny_patch16_224", 224))
    ]
    return [
        Case("cifar-resnet:20", "cifar-resnet:20", lambda: _family("cifar-resnet:20", (3, 32, 32)), (3, 32, 32), 10),
        *of_torchvision,
        *of_timm,
        Case("gpt 4x256", gpt, lambda: _family(gpt, (128,)), (128,), 4000, {"sequence_length": 128}),
        _transformers(
            folder, "llama", "LlamaForCausalLM", hidden_size=256, intermediate_size=688, num_hidden_layers=4,
            num_attention_heads=4, vocab_size=4000, max_position_embeddings=512,
        ),
        _transformers(
            folder, "gpt2", "GPT2LMHeadModel", n_embd=256, n_layer=4, n_head=4, vocab_size=4000, n_positions=512
        ),
        _transformers(
            folder, "bert", "BertForMaskedLM", hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, vocab_size=4000,
        ),
    ]  # fmt: skip


def partitioner_bytes(case: Case, precision: Precision) -> int:
    """Bytes that PyTorch's partitioner saves for the backward pass [bytes]."""
    saved: dict[Any, int] = {}

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        for node in outputs[options["num_fwd_outputs"] :]:
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            while isinstance(node, torch.fx.Node) and getattr(node.target, "overloadpacket", None) in _VIEWS:
                node = node.args[0]
            if isinstance(value, torch.Tensor) and node.op != "placeholder":
                saved[node] = value.numel() * value.element_size()
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    module = case.make().train()
    is_text = len(case.shape) == 1
    draw = torch.randint(0, case.classes, (BATCH_SIZE, *case.shape)) if is_text else None
    batch = torch.randn(BATCH_SIZE, *case.shape) if draw is None else draw
    target = torch.randint(0, case.classes, (BATCH_SIZE, *(case.shape if is_text else ())))
    has_own_loss = case.spec.startswith("hf:")

    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is Precision.AMP_BF16):
            if has_own_loss:
                return module(batch, labels=batch).loss
            return nn.functional.cross_entropy(module(batch).flatten(0, -2), target.flatten())

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(batch).backward()
    return sum(saved.values())


def own_bytes(case: Case, precision: Precision) -> tuple[int, int]:
    """Bytes alive between the passes in eager execution, and those that a compiler saves by forerun's rules [bytes]."""
    setup = TrainingSetup(batch_size_per_device=BATCH_SIZE, precision=precision)
    trace = record_step(build_model(case.spec, training=True, **case.inputs), setup, BATCH_SIZE)
    begin = max(i for i, event in enumerate(trace.events) if event.event is MemoryEvent.FORWARD_BEGINS)
    alive: dict[int, int] = {}
    for event in trace.events[begin:]:
        if event.event is MemoryEvent.BACKWARD_BEGINS:
            break
        if event.event is MemoryEvent.ALLOCATE:
            alive[event.block] = event.size_bytes
        elif event.event is MemoryEvent.FREE:
            alive.pop(event.block, None)
    return sum(alive.values()), sum(saved_blocks(trace.rows, trace.events).values())


def main() -> None:
    """Prints a row per network and precision, in megabytes."""
    torch.set_num_threads(1)
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    print(
        "| network | precision | eager | partitioner | forerun | forerun / partitioner |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for precision in (Precision.FP32, Precision.AMP_BF16):
            for case in _cases(Path(folder)):
                if word not in case.name:
                    continue
                eager, own = own_bytes(case, precision)
                theirs = partitioner_bytes(case, precision)
                figures = " | ".join(f"{size / 1e6:.2f}" for size in (eager, theirs, own))
                print(f"| {case.name} | {precision} | {figures} | {own / theirs:.3f} |", flush=True)


if __name__ == "__main__":
    main()
