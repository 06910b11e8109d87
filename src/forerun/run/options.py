"""Every setting of a run, declared once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from forerun.run.parallel import ContextKind, PipelineSchedule, StageSplit
from forerun.run.saving import (
    LARGEST_DROPOUT,
    LORA_RANKS,
    Fp8Recipe,
    Loss,
    MasterWeights,
    Offload,
    Quantization,
    Unquantized,
)
from forerun.run.settings import Setting, TypedDict
from forerun.run.setup import (
    MAX_BATCH_SIZE,
    AttentionKernel,
    Layout,
    OptimizerImplementation,
    Phase,
    Precision,
)
from forerun.run.sharing import Algorithm, FsdpVersion, Strategy

__all__ = ["DEVICE_HELP", "MODEL_HELP", "CommonOptions", "RunOptions", "ScaleOptions"]

MODEL_HELP = (
    "Model: torchvision:NAME, timm:NAME, an architecture such as llama-3.1-8b, hf:ORG/NAME, hf:CONFIG.json, "
    "keras:NAME, keras:FILE.keras, onnx:FILE.onnx, a family such as cnn:depth=4,base_filters=64, "
    "path/to/file.py:factory, or capture:FILE of 'forerun capture'."
)
DEVICE_HELP = (
    "Device: catalogue name (see 'forerun hardware list'), driver's name, TOML file or 'here'; several devices as "
    "8xNAME or NODESxDEVICESxNAME, such as 4x8xh100-sxm."
)


class CommonOptions(TypedDict, total=False):
    """Settings that every question about a run may have."""

    input_shape: Annotated[
        Sequence[int] | None,
        Setting(
            help="Shape of one sample, without the batch.",
            group="model",
            metavar="3,224,224",
            low=1,
            http_high=4096,
        ),
    ]
    sequence_length: Annotated[
        int | None,
        Setting(help="Tokens of one sample.", group="model", low=1, high=100_000_000, http_high=131_072),
    ]
    compile: Annotated[bool | None, Setting(help="Run the step under torch.compile.", group="run")]
    optimizer: Annotated[
        str | None,
        Setting(
            help="Optimizer: sgd, adam, adamw, adamw-8bit, adafactor, lion, muon, nesterov, rmsprop ... or none.",
            group="run",
            default="sgd; adamw for a catalogued language model",
            metavar="NAME",
        ),
    ]
    optimizer_implementation: Annotated[
        str | None,
        Setting(
            help="Kernels of the optimizer's update: foreach, for-loop or fused.",
            group="run",
            default="foreach",
            metavar="NAME",
            choices=tuple(OptimizerImplementation),
        ),
    ]
    phase: Annotated[
        str | None,
        Setting(
            help="Part of the step: train (the whole step), forward, or inference (without gradients).",
            group="run",
            default="train",
            metavar="NAME",
            choices=tuple(Phase),
        ),
    ]
    fused_attention: Annotated[
        bool | None,
        Setting(
            help="Run attention (scaled_dot_product_attention) as one kernel.", group="run", default="yes"
        ),
    ]
    attention_kernel: Annotated[
        str | None,
        Setting(
            help="Library of fused attention: plain (as long with a causal mask as without, as FlashAttention-1), "
            "flash-2 (half as long) or flash-3 (and 1.7 times as fast, on Hopper only; cuDNN's as well).",
            words="attention kernel",
            group="run",
            default="plain",
            metavar="NAME",
            choices=tuple(AttentionKernel),
        ),
    ]
    accumulation: Annotated[
        int | None,
        Setting(
            help="Micro-steps of one step: their gradients are summed before the update.",
            words="accumulation steps",
            group="run",
            default="1",
            low=1,
            high=100_000,
            http_high=10_000,
            aliases=("num_accumulation_steps", "accumulation_steps"),
        ),
    ]
    recompute: Annotated[
        str | None,
        Setting(
            help="Activations computed again in the backward pass: none, selective (all but products and attention), "
            "full, or every-K (every K-th block).",
            group="saving",
            default="none",
            metavar="NAME",
        ),
    ]
    lora: Annotated[
        int | None,
        Setting(
            help="Rank of LoRA adapters; the model's own weights are then frozen.",
            words="the rank of LoRA",
            group="saving",
            metavar="RANK",
            low=LORA_RANKS[0],
            high=LORA_RANKS[1],
            aliases=("lora_rank",),
        ),
    ]
    lora_targets: Annotated[
        str | Sequence[str] | None,
        Setting(
            help="Linear layers that get adapters, by the last part of their names, separated by commas.",
            group="saving",
            default="all linear layers but the head",
            metavar="q_proj,v_proj",
        ),
    ]
    lora_dropout: Annotated[
        float | None,
        Setting(
            help="Share of the adapters' inputs that every step leaves out, such as 0.05.",
            words="the dropout of adapters",
            group="saving",
            default="0, as in peft",
            metavar="SHARE",
            low=0,
            high=LARGEST_DROPOUT,
        ),
    ]
    quantize: Annotated[
        str | None,
        Setting(
            help="Format of the frozen weights of linear layers beside adapters: nf4, nf4-dq (its scales in 8 bits, "
            "as QLoRA has them) or int8.",
            words="quantization",
            group="saving",
            metavar="NAME",
            choices=tuple(Quantization),
        ),
    ]
    unquantized: Annotated[
        str | None,
        Setting(
            help="Format of the weights that --quantize leaves, such as norms and embeddings: fp32, as peft's "
            "prepare_model_for_kbit_training makes them, or half.",
            group="saving",
            default="fp32 under autocast on each device alone, else half",
            metavar="NAME",
            choices=tuple(Unquantized),
        ),
    ]
    freeze: Annotated[
        str | Sequence[str] | None,
        Setting(
            help="Modules whose weights are not trained, by name, separated by commas, such as model.embed_tokens.",
            group="saving",
            metavar="NAMES",
        ),
    ]
    loss: Annotated[
        str | None,
        Setting(
            help="Cross entropy of a language model: plain, chunked (in pieces of the tokens), liger (one function "
            "with the head) or fused (one kernel a pass on all logits).",
            group="saving",
            default="plain; liger with --fused-kernels liger or unsloth",
            metavar="NAME",
            choices=tuple(Loss),
        ),
    ]
    fused_kernels: Annotated[
        str | Sequence[str] | None,
        Setting(
            help="Kernels of a library in place of the model's own: liger (as use_liger_kernel), unsloth, or parts: "
            "norm, rope, mlp, lora, separated by commas.",
            group="saving",
            default="none",
            metavar="liger",
        ),
    ]
    offload: Annotated[
        str | None,
        Setting(
            help="Contents held in the host's memory: none, optimizer (its state), or parameters (weights as well).",
            group="saving",
            default="none",
            metavar="NAME",
            choices=tuple(Offload),
        ),
    ]
    master_weights: Annotated[
        str | None,
        Setting(
            help="Format of the weights that the optimizer updates: fp32 or bf16.",
            group="saving",
            default="the precision's own; fp32 for adapters",
            metavar="NAME",
            choices=tuple(MasterWeights),
        ),
    ]
    fp8_recipe: Annotated[
        str | None,
        Setting(
            help="With precision fp8: scales and kernels: dynamic (torchao), or delayed, current or mx (Transformer "
            "Engine, whose weights are held in fp8).",
            words="fp8 recipe",
            group="saving",
            default="dynamic",
            metavar="NAME",
            choices=tuple(Fp8Recipe),
        ),
    ]
    intra: Annotated[
        str | None,
        Setting(
            help="Link between the devices of a node: a name such as nvlink-3, or a TOML file.",
            group="device",
            default="the usual link of such boards",
            metavar="LINK",
        ),
    ]
    inter: Annotated[
        str | None,
        Setting(
            help="Link between nodes: a name such as ethernet-25g or 8xinfiniband-hdr, or a TOML file.",
            group="device",
            metavar="LINK",
        ),
    ]
    strategy: Annotated[
        str | None,
        Setting(
            help="Strategy that shares the work of devices: ddp, zero1, zero2, zero3, fsdp, hsdp, mirrored, or auto.",
            group="sharing",
            default="ddp",
            metavar="NAME",
            choices=tuple(Strategy),
        ),
    ]
    algorithm: Annotated[
        str | None,
        Setting(
            help="All-reduce algorithm: auto (the fastest), ring, tree or hierarchical.",
            group="sharing",
            default="auto",
            metavar="NAME",
            choices=tuple(Algorithm),
        ),
    ]
    bucket_mb: Annotated[
        float | None,
        Setting(
            help="Capacity of a gradient bucket [MiB].",
            words="capacity of a bucket [MiB]",
            group="sharing",
            default="25",
            above=0,
            high=100_000,
        ),
    ]
    sync_batch_norm: Annotated[
        bool | None,
        Setting(help="Synchronise the statistics of batch norms among the devices.", group="sharing"),
    ]
    variation: Annotated[
        float | None,
        Setting(
            help="Coefficient of variation of the step time between devices, such as 0.05.",
            words="coefficient of variation",
            group="sharing",
            default="as measured in training",
            low=0,
            high=10,
            aliases=("coefficient_of_variation",),
        ),
    ]
    parallel: Annotated[
        str | None,
        Setting(
            help="Devices of tensor (tp), context (cp), data (dp), pipeline (pp) and expert (ep) parallelism; dp may "
            "be left out.",
            group="sharing",
            default="all devices take samples of their own",
            metavar="tp=8,pp=4,dp=16",
        ),
    ]
    sequence_parallel: Annotated[
        bool | None,
        Setting(
            help="With tp: divide the tokens as well, between the divided products.",
            group="sharing",
            default="yes",
        ),
    ]
    keep_gathered: Annotated[
        bool | None,
        Setting(
            help="With tp: keep the tokens that are gathered for a product until its backward pass (torchtitan) "
            "instead of gathering them again (Megatron-LM).",
            group="sharing",
            default="no",
        ),
    ]
    context_parallel: Annotated[
        str | None,
        Setting(
            help="With cp: exchange of keys and values: ring, or ulysses (all-to-all).",
            group="sharing",
            default="ring",
            metavar="NAME",
            choices=tuple(ContextKind),
        ),
    ]
    pipeline_schedule: Annotated[
        str | None,
        Setting(
            help="With pp: order of the micro-steps: gpipe, 1f1b, interleaved or zero-bubble.",
            group="sharing",
            default="1f1b",
            metavar="NAME",
            choices=tuple(PipelineSchedule),
        ),
    ]
    virtual_stages: Annotated[
        int | None,
        Setting(
            help="With the interleaved schedule: groups of blocks of each stage.",
            group="sharing",
            default="1",
            low=1,
            high=1000,
        ),
    ]
    stage_split: Annotated[
        str | None,
        Setting(
            help="With pp: as many blocks in every stage (even), fewer beside the head (balanced), or input and "
            "head counted as one block each (ends).",
            group="sharing",
            default="even",
            metavar="NAME",
            choices=tuple(StageSplit),
        ),
    ]
    shard_size: Annotated[
        int | None,
        Setting(
            help="With hsdp: devices that divide the weights among them.",
            group="sharing",
            default="the devices of a node",
            low=1,
            high=100_000,
        ),
    ]
    reshard: Annotated[
        bool | None,
        Setting(
            help="With fsdp: give gathered weights back between forward and backward pass.",
            group="sharing",
            default="yes",
        ),
    ]
    prefetch: Annotated[
        bool | None,
        Setting(
            help="With fsdp: gather the weights of the next block while a block computes.",
            group="sharing",
            default="yes",
        ),
    ]
    gather_precision: Annotated[
        str | None,
        Setting(
            help="With fsdp and a mixed precision: format in which weights are gathered, half or fp32.",
            group="sharing",
            default="half",
            metavar="NAME",
            choices=("half", "fp32"),
        ),
    ]
    reduce_precision: Annotated[
        str | None,
        Setting(
            help="With a mixed precision: format in which gradients are reduced, half or fp32.",
            group="sharing",
            default="fp32",
            metavar="NAME",
            choices=("half", "fp32"),
        ),
    ]
    fsdp_version: Annotated[
        str | None,
        Setting(
            help="With fsdp: implementation, by the copies it makes: fsdp1 or fsdp2 (PyTorch), or zero-copy "
            "(Megatron-FSDP).",
            words="FSDP version",
            group="sharing",
            default="fsdp2",
            metavar="NAME",
            choices=tuple(FsdpVersion),
        ),
    ]
    overlap_tensor: Annotated[
        bool | None,
        Setting(
            help="With tp: run its collectives in pieces beside the products that they belong to (tp_comm_overlap of "
            "Megatron-LM, asynchronous tensor parallelism of PyTorch).",
            group="sharing",
            default="no",
        ),
    ]
    overlap_update: Annotated[
        bool | None,
        Setting(
            help="With zero1 or zero2: gather updated weights behind the next forward pass (overlap-param-gather of "
            "Megatron-LM).",
            group="sharing",
            default="no",
        ),
    ]
    dataset: Annotated[
        str | None,
        Setting(help="Dataset that forerun knows, such as cifar10 or imagenet.", group="job", metavar="NAME"),
    ]
    dataset_size: Annotated[
        int | None,
        Setting(
            help="Training samples of one epoch, for any other dataset.", group="job", low=1, high=10**15
        ),
    ]
    tokens: Annotated[
        str | float | None,
        Setting(
            help="Tokens of the whole job in place of a dataset, such as 300M or 15B; needs the sequence length.",
            group="job",
            metavar="15B",
        ),
    ]
    epochs: Annotated[
        float | None,
        Setting(help="Epochs of the job.", words="number of epochs", group="job", above=0, high=1e9),
    ]
    validation_size: Annotated[
        int | None,
        Setting(help="Validation samples evaluated after each epoch.", group="job", low=0, high=10**15),
    ]
    validate: Annotated[
        bool | None,
        Setting(help="Evaluate the validation split of the dataset after each epoch.", group="job"),
    ]
    startup_s: Annotated[
        float | None,
        Setting(
            help="Time before the first step [s].",
            words="start-up time",
            group="job",
            default="0",
            low=0,
            high=1e9,
        ),
    ]
    checkpoint_s: Annotated[
        float | None,
        Setting(
            help="Time to write the checkpoint after each epoch [s].",
            words="checkpoint time",
            group="job",
            default="0",
            low=0,
            high=1e9,
        ),
    ]
    loader_ms: Annotated[
        float | None,
        Setting(
            help="Time that one processor core takes to decode and augment a sample [ms].",
            words="time of a sample [ms]",
            group="input",
            low=0,
            high=1e6,
        ),
    ]
    loader_workers: Annotated[
        int | None,
        Setting(
            help="Worker processes of each device's data loader.",
            words="number of workers",
            group="input",
            default="8",
            low=0,
            high=10_000,
        ),
    ]
    loader_cores: Annotated[
        float | None,
        Setting(
            help="Processor cores that the workers of the data loader share.",
            words="number of cores",
            group="input",
            default="one per worker",
            above=0,
            high=1e6,
        ),
    ]
    sample_kb: Annotated[
        float | None,
        Setting(
            help="Size of a stored sample [kB].",
            words="size of a sample [kB]",
            group="input",
            low=0,
            high=1e9,
        ),
    ]
    storage_mb_s: Annotated[
        float | None,
        Setting(
            help="Reading bandwidth of the storage [MB/s].",
            words="storage bandwidth [MB/s]",
            group="input",
            above=0,
            high=1e9,
        ),
    ]
    network_mb_s: Annotated[
        float | None,
        Setting(
            help="Bandwidth of the network to the storage [MB/s].",
            words="network bandwidth [MB/s]",
            group="input",
            above=0,
            high=1e9,
        ),
    ]
    torch_version: Annotated[
        str | None,
        Setting(
            help="PyTorch version of the run.", group="software", default="the newest known", metavar="2.4"
        ),
    ]
    calibration: Annotated[
        str | Path | None,
        Setting(
            help="Calibration of the device: a file that 'forerun calibrate' or 'forerun fit' wrote.",
            group="software",
            default="with --on here, that of this machine",
            metavar="FILE",
            is_local=True,
        ),
    ]
    memory_overhead_bytes: Annotated[
        float | None,
        Setting(
            help="Memory of an idle process on the device [bytes].",
            words="memory overhead [bytes]",
            group="software",
            default="as measured on such devices",
            low=0,
            high=1e15,
        ),
    ]


class _SetupOptions(CommonOptions, total=False):
    """Settings that a run and a scaling curve share, and a plan has in the plural."""

    image_size: Annotated[
        int | None,
        Setting(
            help="Height and width of images [pixels].", group="model", low=1, high=100_000, http_high=1024
        ),
    ]
    batch_size: Annotated[
        int | None,
        Setting(
            help="Batch size of one device; with accumulation, of one micro-step.",
            group="run",
            default="32; 1 for a catalogued language model",
            low=1,
            high=MAX_BATCH_SIZE,
            http_high=65_536,
        ),
    ]
    precision: Annotated[
        str | None,
        Setting(
            help="Precision: fp32, tf32, amp (autocast to fp16), amp-bf16, bf16, fp16 or fp8 (products of linear "
            "layers, the rest bf16).",
            group="run",
            default="fp32; bf16 for a catalogued language model",
            metavar="NAME",
            choices=tuple(Precision),
        ),
    ]
    layout: Annotated[
        str | None,
        Setting(
            help="Memory order of images: nchw (PyTorch's own) or nhwc (Keras' own).",
            group="run",
            default="the framework's own",
            metavar="NAME",
            choices=tuple(Layout),
        ),
    ]
    num_nodes: Annotated[
        int | None,
        Setting(
            help="Number of nodes (machines) that hold the devices.",
            words="the number of nodes",
            group="device",
            default="as few as hold them",
            low=1,
            high=100_000,
            http_high=4096,
            flag="nodes",
            aliases=("nodes",),
        ),
    ]
    price_usd_per_hour: Annotated[
        float | None,
        Setting(
            help="Price of one device [US dollars per hour].",
            words="price of a device [USD/h]",
            group="price",
            metavar="1.89/h",
            low=0,
            high=1e6,
            flag="price",
            aliases=("price",),
        ),
    ]


class RunOptions(_SetupOptions, total=False):
    """The settings of a run besides its model and device; a setting that is None or left out has its default."""

    num_devices: Annotated[
        int | None,
        Setting(
            help="Number of devices, if the name of the device does not say it.",
            words="the number of devices",
            group="device",
            default="1",
            low=1,
            high=100_000,
            http_high=4096,
        ),
    ]


class ScaleOptions(_SetupOptions, total=False):
    """The settings of a scaling curve: those of a run, with many numbers of devices."""

    num_devices: Annotated[
        Sequence[int] | None,
        Setting(
            help="Numbers of devices: a list such as 1,2,4,8, or a range such as 1:8.",
            words="the number of devices",
            group="device",
            default="1,2,4 ... up to the devices of --on, or 8",
            metavar="1,2,4,8",
            low=1,
            high=100_000,
            http_high=4096,
            flag="devices",
            aliases=("devices",),
        ),
    ]
    scaling: Annotated[
        str | None,
        Setting(
            help="Batch size that stays fixed: that of one device (weak), that of all devices (strong), or both.",
            group="sharing",
            default="weak",
            metavar="NAME",
            choices=("weak", "strong", "both"),
        ),
    ]
