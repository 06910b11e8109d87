"""Post-training and generation: the algorithm of a step, and the tokens that a step writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from forerun.base.errors import InvalidSetupError
from forerun.question.settings import setting

AUTO_DEVICES = "auto"
_MOST_DEVICES = 100_000


class Algorithm(StrEnum):
    """Algorithm of a training step: which passes it has besides the forward and backward pass of the policy."""

    SFT = "sft"
    DPO = "dpo"
    ORPO = "orpo"
    KTO = "kto"
    REWARD = "reward"
    PPO = "ppo"
    GRPO = "grpo"

    @property
    def is_online(self) -> bool:
        """True if a step first writes the samples that it is trained on."""
        return self in (Algorithm.PPO, Algorithm.GRPO)


class Engine(StrEnum):
    """Library that generates."""

    VLLM = "vllm"
    """Fused kernels and a copy of the weights of its own."""
    TRANSFORMERS = "transformers"
    """The model as it is trained, one operation after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostTraining:
    """Algorithm of a step and its generation."""

    algorithm: Algorithm = setting(
        Algorithm.SFT,
        help="Algorithm of a step: sft (plain training), dpo, orpo, kto, reward, ppo or grpo. A sample of dpo, orpo "
        "and reward is a pair, one of ppo and grpo an answer that the step writes.",
        group="post-training",
        needs="training",
        only_changed=True,
    )
    new_tokens: int | None = setting(
        None,
        help="Tokens of a sample that are generated, the last of --sequence-length; those before are its prompt.",
        group="post-training",
        default="half of the sequence length, with --phase generate, ppo and grpo",
        low=1,
        high=10_000_000,
        http_high=131_072,
    )
    engine: Engine = setting(
        Engine.VLLM,
        help="Library that generates: vllm (fused kernels, weights of its own) or transformers.",
        group="post-training",
        only_changed=True,
    )

    longest_tokens: int | None = setting(
        None,
        help="With ppo, grpo and several devices: tokens of the longest answer of a batch.",
        group="post-training",
        default="--new-tokens",
        low=1,
        high=10_000_000,
        http_high=131_072,
    )
    generation_tensor: int | None = setting(
        None,
        help="With ppo, grpo and several devices: devices that divide the weights of one engine.",
        group="post-training",
        default="the fewest whose memory is half free beside the weights",
        low=1,
        high=1024,
    )
    generation_on: str | None = setting(
        None,
        help="With ppo, grpo and several devices: devices besides those of --on that write the next answers meanwhile: "
        "a number, or auto for the one that wastes least.",
        group="post-training",
        default="the devices that train, in turn",
        metavar="16",
        read=str,
    )

    def __post_init__(self) -> None:
        word = self.generation_on
        if word in (None, AUTO_DEVICES) or (word.isdigit() and 1 <= int(word) <= _MOST_DEVICES):
            return
        raise InvalidSetupError(
            f"--generation-on takes a number of devices from 1 to {_MOST_DEVICES:,} or auto, got '{word}'"
        )


class PostTrainingOptions(TypedDict, total=False):
    """Settings of post-training and generation."""

    algorithm: str | None
    new_tokens: int | None
    engine: str | None
    longest_tokens: int | None
    generation_tensor: int | None
    generation_on: str | None
