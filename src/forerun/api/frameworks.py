"""What is asked about Keras beside predictions."""

from __future__ import annotations

from forerun.evaluation.keras_parity import ParityRow
from forerun.evaluation.keras_parity import keras_parity as compare_pairs
from forerun.evaluation.reference_tables import require_reference_folder

__all__ = ["keras_parity", "stack_study"]


def keras_parity(batch_size: int = 32, *, use_cache: bool = True) -> list[ParityRow]:
    """Networks in PyTorch beside the same in Keras: parameters, work and traffic by class of operation.

    Args:
        batch_size: Samples of the step.
        use_cache: Whether traces may come from the cache.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    return compare_pairs(batch_size=batch_size, use_cache=use_cache)


def stack_study() -> str:
    """Steps of Keras and TensorFlow in the public tables beside predictions, as Markdown.

    Raises:
        RecordError: The public tables were not found.
    """
    from forerun.evaluation.stack_study import stack_markdown
    from forerun.evaluation.stack_study import stack_study as study

    return stack_markdown(study(require_reference_folder()))
