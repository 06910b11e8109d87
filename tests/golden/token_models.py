"""Questions about language models, ways to save memory, and layouts on several devices.

``llama.json`` and ``mixtral.json`` have two blocks, so that tracing them costs little; the ways to divide, to save
memory and to fuse kernels are those of large models.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMANDS", "SEARCHES"]

LLAMA = "predict hf:llama.json --precision bf16 --optimizer adamw --sequence-length 1024"
CLUSTER = "--on 2x8xh100-sxm --inter 8xinfiniband-hdr"
NODE = "--on 1x8xh100-sxm"

ONE_DEVICE: Mapping[str, str] = {
    "llama-catalogue": "predict llama-3.2-1b --on h100-sxm --sequence-length 2048 --tokens 300M --price 2.5/h",
    "llama-lora": "predict llama-3.1-8b --on a100-sxm4-80gb --sequence-length 4096 --lora 16 --recompute full",
    "llama-qlora": "predict llama-3.1-8b --on rtx-4090 --sequence-length 2048 --lora 16 --quantize nf4-dq"
    " --recompute full",
    "llama-too-large": "predict llama-3.2-1b --on rtx-3060 --sequence-length 2048",
    "qwen-full": "predict qwen2.5-0.5b --on t4 --sequence-length 512 --precision amp",
    "token-full": f"{LLAMA} --on l4 --batch-size 4 --dataset-size 10000 --epochs 2",
    "token-lora-targets": f"{LLAMA} --on l4 --lora 8 --lora-targets q_proj,v_proj --lora-dropout 0.05",
    "token-nf4": "predict hf:llama.json --on rtx-3090 --precision amp-bf16 --optimizer adamw --sequence-length 1024"
    " --lora 8 --quantize nf4 --unquantized fp32",
    "token-int8": f"{LLAMA} --on rtx-3090 --lora 8 --quantize int8",
    "token-dpo": f"{LLAMA} --on l4 --algorithm dpo --lora 8 --batch-size 2",
    "token-grpo": f"{LLAMA} --on l4 --algorithm grpo --new-tokens 256 --batch-size 2",
    "token-generate": "predict hf:llama.json --on l4 --precision bf16 --phase generate --sequence-length 512",
    "token-freeze": f"{LLAMA} --on l4 --freeze model.embed_tokens,lm_head",
    "token-fp8": "predict hf:llama.json --on h100-sxm --precision fp8 --optimizer adamw --sequence-length 1024",
    "token-fp8-delayed": "predict hf:llama.json --on h100-sxm --precision fp8 --fp8-recipe delayed"
    " --optimizer adamw --sequence-length 1024 --batch-size 8",
    "token-fp8-mx": "predict hf:llama.json --on b200 --precision fp8 --fp8-recipe mx --optimizer adamw"
    " --sequence-length 1024 --batch-size 8",
    "token-liger": f"{LLAMA} --on a100-sxm4-40gb --batch-size 4 --fused-kernels liger",
    "token-unsloth": f"{LLAMA} --on a100-sxm4-40gb --lora 16 --quantize nf4 --fused-kernels unsloth",
    "token-fused-parts": f"{LLAMA} --on a100-sxm4-40gb --fused-kernels norm,rope --loss chunked",
    "token-loss-fused": f"{LLAMA} --on l4 --batch-size 4 --loss fused",
    "token-loss-liger": f"{LLAMA} --on l4 --batch-size 4 --loss liger --accumulation 4",
    "token-selective": f"{LLAMA} --on l4 --batch-size 4 --recompute selective",
    "token-recompute": f"{LLAMA} --on l4 --batch-size 4 --recompute full",
    "token-every-second": f"{LLAMA} --on l4 --batch-size 4 --recompute every-2",
    "token-flash-2": f"{LLAMA} --on a100-sxm4-40gb --batch-size 4 --attention-kernel flash-2",
    "token-flash-3": f"{LLAMA} --on h100-sxm --batch-size 4 --attention-kernel flash-3 --compile",
    "token-plain-attention": f"{LLAMA} --on h100-sxm --no-fused-attention",
    "token-offload-optimizer": f"{LLAMA} --on l4 --offload optimizer",
    "token-offload-parameters": f"{LLAMA} --on l4 --offload parameters --master-weights fp32",
    "token-adafactor": "predict hf:llama.json --on l4 --precision bf16 --optimizer adafactor"
    " --master-weights bf16 --sequence-length 1024",
    "token-adamw-8bit": "predict hf:llama.json --on l4 --precision amp-bf16 --optimizer adamw-8bit"
    " --sequence-length 1024",
    "experts-alone": "predict hf:mixtral.json --on l4 --precision bf16 --optimizer adamw --sequence-length 512",
}

SEVERAL_DEVICES: Mapping[str, str] = {
    "token-fsdp1": f"{LLAMA} {NODE} --strategy fsdp --fsdp-version fsdp1 --gather-precision fp32",
    "token-fsdp2": f"{LLAMA} {CLUSTER} --strategy fsdp --fsdp-version fsdp2 --no-reshard --no-prefetch",
    "token-zero-copy": f"{LLAMA} {NODE} --strategy fsdp --fsdp-version zero-copy --reduce-precision half",
    "token-zero2": f"{LLAMA} {CLUSTER} --strategy zero2 --overlap-update --accumulation 2",
    "token-zero3": f"{LLAMA} {CLUSTER} --strategy zero3 --recompute full",
    "token-hsdp": f"{LLAMA} {CLUSTER} --strategy hsdp --shard-size 4",
    "token-auto": f"{LLAMA} {NODE} --strategy auto",
    "token-accumulation": f"{LLAMA} {NODE} --accumulation 8 --batch-size 2 --dataset-size 100000 --price 2/h",
    "token-lora-fsdp": f"{LLAMA} {NODE} --lora 16 --quantize nf4 --strategy fsdp",
    "token-tp": f"{LLAMA} {NODE} --parallel tp=4,dp=2 --strategy zero1 --batch-size 2",
    "token-tp-compile": f"{LLAMA} {NODE} --parallel tp=2,dp=4 --compile --no-sequence-parallel",
    "token-tp-fsdp": f"{LLAMA} {CLUSTER} --parallel tp=2,dp=8 --strategy fsdp --keep-gathered",
    "token-tp-overlap": f"{LLAMA} {NODE} --parallel tp=8 --overlap-tensor --accumulation 4",
    "token-pp": f"{LLAMA} {NODE} --parallel pp=2,dp=4 --accumulation 8 --stage-split balanced",
    "token-pp-gpipe": f"{LLAMA} {NODE} --parallel pp=2,dp=4 --accumulation 4 --pipeline-schedule gpipe",
    "token-pp-interleaved": f"{LLAMA.replace('llama.json', 'deep.json')} {NODE} --parallel pp=2,dp=4"
    " --accumulation 8 --pipeline-schedule interleaved --virtual-stages 2",
    "token-pp-zero-bubble": f"{LLAMA.replace('llama.json', 'deep.json')} {CLUSTER} --parallel tp=2,pp=4,dp=2"
    " --accumulation 8 --pipeline-schedule zero-bubble --stage-split ends --recompute selective",
    "token-cp": f"{LLAMA} {NODE} --parallel cp=4,dp=2 --strategy fsdp",
    "token-cp-ulysses": f"{LLAMA} {NODE} --parallel cp=2,tp=2,dp=2 --context-parallel ulysses",
    "experts-ep": "predict hf:mixtral.json --on 1x4xh100-sxm --precision bf16 --optimizer adamw"
    " --sequence-length 512 --parallel ep=4 --batch-size 2",
    "experts-ep-fsdp": f"predict hf:mixtral.json {CLUSTER} --precision bf16 --optimizer adamw"
    " --sequence-length 512 --parallel ep=8 --strategy fsdp",
    "scale-tokens": "scale hf:llama.json --on 2x8xh100-sxm --inter 8xinfiniband-hdr --precision bf16"
    " --optimizer adamw --sequence-length 1024 --strategy fsdp --devices 1,8,16",
}

SEARCHES: Mapping[str, str] = {
    "layouts-cluster": "layouts hf:llama.json --on 2x2xh100-sxm --inter infiniband-hdr --precision bf16"
    " --optimizer adamw --sequence-length 1024 --batch-size 2 --top 2",
    "layouts-experts": "layouts hf:mixtral.json --on 1x4xa100-sxm4-80gb --precision bf16 --optimizer adamw"
    " --sequence-length 512 --global-batch 32 --top 2",
    "advise-tokens": "advise hf:llama.json --on l4 --precision bf16 --optimizer adamw --sequence-length 1024"
    " --batch-size 4",
    "advise-images": "advise mnist-cnn --on 1x4xt4 --batch-size 64 --dataset mnist",
    "plan-search-all": "plan cnn:depth=2,base_filters=32 --on t4x4,t4 --batch-size 64,128 --search all"
    " --dataset cifar10 --price 1/h --points 3 --rejected 2 --within 'cost<=0.0015'",
    "plan-search-tokens": "plan hf:llama.json --on l4,h100-sxmx2 --batch-size 2,4 --precision amp-bf16"
    " --optimizer adamw --sequence-length 1024 --dataset-size 10000 --search recompute,strategy,compile"
    " --price 1/h --minimize cost --points 3 --rejected 2 --within 'memory<=20GB'",
    "plan-lora": "plan llama-3.2-1b --on l4,rtx-4090 --batch-size 1,2 --precision bf16 --sequence-length 1024"
    " --lora 16 --quantize nf4 --tokens 10M --price 1/h --points 3 --rejected 2",
}

COMMANDS: Mapping[str, str] = {**ONE_DEVICE, **SEVERAL_DEVICES, **SEARCHES}
