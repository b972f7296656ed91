"""Options with which one thread calls functions; the process keeps its own."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale._internals import symbols

_ON = tf.compat.v1.OptimizerOptions.ON_1


def no_grappler() -> contextlib.AbstractContextManager[None]:
    """Within it, this thread calls functions without Grappler."""

    def turn_off(config):
        config.graph_options.rewrite_options.disable_meta_optimizer = True

    return _of_thread(turn_off)


def assembled(
    *, of_clusters: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Within it, this thread calls functions of operations that are optimized.

    Grappler only adds the operations of functions that are called, and drops
    control dependencies that follow from others: between devices each is a
    message. All of its optimizers together can make a cycle of the order of
    stages; TensorFlow then ignores what they did.

    Args:
        of_clusters: Whether XLA compiles clusters of them. Constants are folded
            before: what TensorFlow folds in a cluster it places on CPU:0, and
            no cluster can be on two CPU devices.
    """

    def keep(config):
        options = config.graph_options.rewrite_options
        options.optimizers[:] = ["function", "dependency"]
        if of_clusters:
            options.optimizers.append("constfold")
            config.graph_options.optimizer_options.global_jit_level = _ON
        options.meta_optimizer_iterations = options.ONE
        options.disable_tfg_optimizer = True

    return _of_thread(keep)


def clusters() -> contextlib.AbstractContextManager[None]:
    """Within it, XLA compiles clusters of the functions of this thread."""

    def turn_on(config):
        config.graph_options.optimizer_options.global_jit_level = _ON

    return _of_thread(turn_on)


def have_clusters() -> bool:
    """Whether functions that this thread calls, or traces, have clusters."""
    config = _options(symbols.eager_context.context().function_call_options)
    return config.graph_options.optimizer_options.global_jit_level == _ON


@contextlib.contextmanager
def _of_thread(change: Callable[[tf.compat.v1.ConfigProto], None]):
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
