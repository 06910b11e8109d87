"""Recipes of training tools: possible runs, the user's words before the tool's, and the same answer from every verb."""

import re

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.question.options import RunOptions
from forerun.question.recipes import recipes
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.question.setup import Recipe
from forerun.search.search import changes_of

MODEL = "llama-3.2-1b"


@pytest.mark.parametrize("tool", [*Recipe])
@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "8xh100-sxm"])
def test_a_recipe_is_a_possible_run_that_tells_itself(tool, device):
    run = Run.of(MODEL, device=device, recipe=tool, sequence_length=512)
    told = run.json_fields()
    assert "recipe" not in told
    again = Run.of(told.pop("model"), device=told.pop("device"), **told)
    assert again.setup == run.setup
    # What waits for an axis, such as a pipeline, is told once the run has it.
    assert again.json_fields() == run.json_fields()


def test_each_tool_has_a_recipe_whose_lines_are_settings_with_a_file():
    assert set(recipes()) == {str(tool) for tool in Recipe}
    for lines in recipes().values():
        assert {line.name for line in lines} <= set(declared(RunOptions))
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+:[\w./-]+\.(py|toml|yaml)", line.file) for line in lines)


def test_the_words_of_the_user_go_before_those_of_the_tool():
    run = Run.of(MODEL, device="8xh100-sxm", recipe="torchtitan", recompute="none", strategy="zero1")
    assert (run.setup.saving.recompute, str(run.sharing.strategy)) == ("none", "zero1")
    assert str(run.setup.optimizer_implementation) == "fused"


def test_weights_in_bf16_are_a_tools_own_only_beside_bf16():
    assert Run.of("llama-3.1-8b", device="h100-sxm", recipe="litgpt").setup.saving.master_weights == "bf16"
    mixed = Run.of("llama-3.1-8b", device="h100-sxm", recipe="litgpt", precision="amp-bf16")
    assert mixed.setup.saving.master_weights is None


def test_mxfp8_brings_fused_experts_and_their_exchanges_beside_computation():
    asked = {"recipe": "megatron", "precision": "fp8", "sequence_length": 4096}
    run = Run.of("qwen3-30b-a3b", device="8xb200", parallel="dp=8,ep=8", fp8_recipe="mx", **asked)
    assert run.setup.saving.fused_kernels[-1] == "experts"
    assert run.sharing.overlap_experts
    current = Run.of("qwen3-30b-a3b", device="8xb200", parallel="dp=8,ep=8", fp8_recipe="current", **asked)
    assert "experts" not in current.setup.saving.fused_kernels
    with pytest.raises(InvalidSetupError, match="--fp8-recipe mx"):
        current.with_(fused_kernels="experts")


def test_conditions_of_adapters_architecture_and_axes():
    full, adapted = (Run.of(MODEL, device="l40s", recipe="llama-factory", lora=rank) for rank in (None, 8))
    assert (full.setup.precision, adapted.setup.precision) == ("amp-bf16", "amp-bf16")
    plain, dropping = (
        Run.of(MODEL, device="l40s", recipe="axolotl", lora=8, lora_dropout=share) for share in (0, 0.1)
    )
    assert (plain.setup.saving.fused_kernels, dropping.setup.saving.fused_kernels) == (("lora",), ())
    assert plain.setup.precision == "amp-bf16"
    assert Run.of(MODEL, device="l40s", recipe="torchtune", lora=8).setup.saving.master_weights == "bf16"
    assert Run.of(MODEL, device="8xl40s", recipe="trl", strategy="fsdp").sharing.reduce_once
    assert not Run.of(MODEL, device="8xl40s", recipe="trl", strategy="zero3").sharing.reduce_once
    assert Run.of(MODEL, device="h100-sxm", recipe="megatron").setup.attention_kernel == "flash-3"
    assert Run.of(MODEL, device="l40s", recipe="megatron").setup.attention_kernel == "flash-2"
    divided = Run.of(MODEL, device="8xh100-sxm", recipe="torchtitan", parallel="tp=2")
    assert divided.layout.keep_gathered
    piped = Run.of(MODEL, device="8xh100-sxm", recipe="nanotron").with_(parallel="pp=8")
    assert Run.of(MODEL, device="8xh100-sxm", recipe="nanotron", strategy="zero1").sharing.slice_tensors
    assert (piped.layout.handover, piped.layout.stage_split) == ("blocking", "balanced")


def test_searches_ask_for_the_same_settings_as_a_prediction():
    alone = Run.of(MODEL, device="h100-sxm", recipe="megatron")
    several = Run.of(MODEL, device="8xh100-sxm", recipe="megatron")
    assert alone.with_(device="8xh100-sxm").sharing == several.sharing
    assert Run.of(MODEL, device="8xh100-sxm").with_(recipe="megatron").sharing == several.sharing
    assert {change["precision"] for change in changes_of([MODEL], {"recipe": "trl"})} == {"amp-bf16"}


def test_what_has_settings_of_its_own_takes_no_recipe():
    with pytest.raises(InvalidSetupError, match="PyTorch models by name"):
        Run.of("keras:ResNet50", device="t4", recipe="trl")


def test_over_http_there_are_recipes_and_no_files_of_the_server():
    from forerun.surface.web.questions import PlanBody, PredictBody, ScaleBody

    for body in (PredictBody, PlanBody, ScaleBody):
        assert "recipe" in body.model_fields
        assert "config" not in body.model_fields
