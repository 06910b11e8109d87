"""Post-training and generation: the algorithm of a step, and the tokens that a step writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
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
    CONTRASTIVE = "contrastive"
    """Embeddings of pairs, told apart from those of the other pairs of a batch (in-batch negatives)."""
    PPO = "ppo"
    GRPO = "grpo"

    @property
    def is_online(self) -> bool:
        """True if a step first writes the samples that it is trained on."""
        return self in (Algorithm.PPO, Algorithm.GRPO)

    @property
    def is_headed(self) -> bool:
        """True if the model has no words at its end, but one value or the state of a token."""
        return self in (Algorithm.REWARD, Algorithm.CONTRASTIVE)


class Engine(StrEnum):
    """Library that generates."""

    VLLM = "vllm"
    """Fused kernels and a copy of the weights of its own."""
    TRANSFORMERS = "transformers"
    """The model as it is trained, one operation after another."""


_post = partial(setting, group="post-training")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostTraining:
    """Algorithm of a step and its generation."""

    algorithm: Algorithm = _post(
        Algorithm.SFT,
        help="Algorithm of a step: sft (plain training), dpo, orpo, kto, reward, contrastive (embeddings), ppo or "
        "grpo. A sample of dpo, orpo, reward and contrastive is a pair, one of ppo and grpo an answer that the step "
        "writes.",
        needs="training",
        only_changed=True,
    )
    new_tokens: int | None = _post(
        None,
        help="Tokens of a sample that are generated: the last ones of --sequence-length, after the prompt.",
        default="half of the sequence length, with --phase generate, ppo and grpo",
        low=1,
        high=10_000_000,
        http_high=131_072,
    )
    engine: Engine = _post(
        Engine.VLLM,
        help="Library that generates: vllm (fused kernels, weights of its own) or transformers.",
        only_changed=True,
    )
    answer_lengths: str | None = _post(
        None,
        help="Lengths of the answers that a step writes: a .csv or .json file of token counts, a law such as "
        "lognormal:median=300,p95=1200, or mean:300; --new-tokens is then the longest.",
        default="all as long as --new-tokens",
        metavar="LAW",
        only_changed=True,
    )
    reference: bool = _post(
        True,
        help="With ppo and grpo: log-probabilities of a reference, for a penalty; TRL has none where beta is 0, verl "
        "none without use_kl_loss or use_kl_in_reward.",
        only_changed=True,
    )
    generation_tensor: int | None = _post(
        None,
        help="With ppo, grpo and several devices: devices that divide the weights of one engine.",
        default="the fewest whose memory is half free beside the weights",
        needs="several",
        low=1,
        high=1024,
    )
    generation_on: str | None = _post(
        None,
        help="With ppo, grpo and several devices: devices besides those of --on that write the next answers meanwhile: "
        "a number, or auto for the one that wastes least.",
        default="the devices that train, in turn",
        metavar="16",
        read=str,
    )
    packs_answers: bool = False  # of a run's batching

    def __post_init__(self) -> None:
        if not self.reference and not self.algorithm.is_online:
            raise InvalidSetupError(
                f"--no-reference is for ppo and grpo, got --algorithm {self.algorithm}; leave one of them out"
            )
        words = (self.answer_lengths or "lognormal:").lower()
        is_known = words.startswith("lognormal:") or words.endswith((".csv", ".json"))
        if not is_known and self.mean_answer_tokens is None:
            raise InvalidSetupError(
                "--answer-lengths must be a law such as lognormal:median=300,p95=1200, a mean such as mean:300, or "
                f"a .csv or .json file, got '{self.answer_lengths}'"
            )
        word = self.generation_on
        if word in (None, AUTO_DEVICES) or (word.isdigit() and 1 <= int(word) <= _MOST_DEVICES):
            return
        raise InvalidSetupError(
            f"--generation-on takes a number of devices from 1 to {_MOST_DEVICES:,} or auto, got '{word}'"
        )

    @property
    def mean_answer_tokens(self) -> float | None:
        """Mean tokens of an answer, where nothing but the mean is known; else None."""
        name, _, number = (self.answer_lengths or "").partition(":")
        return float(number) if name == "mean" and number.isdigit() and int(number) else None


PLAIN = PostTraining()
"""A step on given samples."""


class PostTrainingOptions(TypedDict, total=False):
    """Settings of post-training and generation."""

    algorithm: str | None
    new_tokens: int | None
    engine: str | None
    answer_lengths: str | None
    reference: bool | None
    generation_tensor: int | None
    generation_on: str | None
