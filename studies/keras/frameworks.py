"""What is asked about Keras beside predictions."""

from __future__ import annotations

from studies.keras.parity import ParityRow
from studies.keras.parity import keras_parity as compare_pairs
from studies.tables.reference_steps import require_reference_folder

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
    from studies.keras.stack_study import stack_markdown
    from studies.keras.stack_study import stack_study as study

    return stack_markdown(study(require_reference_folder()))
