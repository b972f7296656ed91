"""Keras callbacks."""

from tfscale.callbacks.input_wait import InputWait

__all__ = ["InputWait"]
