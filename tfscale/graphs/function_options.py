"""Options with which one thread calls functions; the process keeps its own."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols


@contextlib.contextmanager
def of_thread(change: Callable[[tf.compat.v1.ConfigProto], None]):
    """Within it, this thread calls functions with options that are changed.

    Args:
        change: Called with the options so far, which it changes.
    """
    context = symbols.eager_context.context()
    before = context.function_call_options
    config = _options(before)
    change(config)
    changed = copy.copy(before)
    changed.config_proto_serialized = config
    context.function_call_options = changed
    try:
        yield
    finally:
        context.function_call_options = before


def current() -> tf.compat.v1.ConfigProto:
    """The options with which this thread calls functions."""
    return _options(symbols.eager_context.context().function_call_options)


def _options(function_call_options):
    config = tf.compat.v1.ConfigProto()
    config.ParseFromString(function_call_options.config_proto_serialized)
    return config


def outermost(
    function: Callable[[Any], Any],
    *contexts: Callable[[], contextlib.AbstractContextManager],
) -> Callable[[Any], Any]:
    """The function that Keras calls for one or several steps, in contexts."""
    if not contexts or getattr(function, "is_outermost", False):
        return function

    @functools.wraps(function)
    def call(iterator):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return function(iterator)

    call.is_outermost = True  # type: ignore[attr-defined]
    return call
