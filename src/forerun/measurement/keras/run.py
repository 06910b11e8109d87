"""Name of the function that runs a job with Keras; nothing of Keras is loaded here."""

from __future__ import annotations

__all__ = ["KERAS_RUN"]

KERAS_RUN = "forerun.measurement.keras.runner:run_keras_job"
"""Argument ``run`` of ``session.run_jobs``."""
