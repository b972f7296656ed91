"""Tries whether a metric adds to its variables, as replicas need it to.

Each replica updates its own variables, which are summed where the metric is
read: wrong for a maximum, a last value or a moving average. So the update is
tried on small inputs with several values of the variables, and must add the
same each time.

    a sum         0 ─► 3     100 ─► 103    -100 ─► -97    3 each
    a maximum     0 ─► 3     100 ─► 100    -100 ─► 3      3, 0, 103
"""

import warnings
import weakref
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfscale.step.checks import trial

# Custom metrics that were tried; each is tried once.
_TRIED: weakref.WeakSet[keras.Metric] = weakref.WeakSet()


def check(metric, update_state, args, kwargs) -> None:
    """Raises if a metric's update is no sum; warns if it cannot be tried."""
    if metric in _TRIED:
        return
    kind = metric.__class__.__name__
    rule = (
        "Each replica updates a metric's variables of its own, which are added "
        "up: a metric must add to them, and they must begin at zero. Received: "
    )
    remedy = (
        " Keep sums, as `keras.metrics.Mean` does. Or make the variable by "
        "`add_variable(..., aggregation='mean')`, of whose values the mean "
        "over replicas is taken; or with aggregation='only_first_replica', and "
        "have `update_state` gather what all replicas have: docs/numbers.md "
        "shows how."
    )
    try:
        variable = no_sum(metric, update_state, args, kwargs)
    except Exception as error:
        warnings.warn(
            f"{rule}{metric.name!r}, a {kind}, which could not be tried "
            f"({type(error).__name__}: {error}).{remedy}",
            stacklevel=2,
        )
        variable = None
    if variable is not None:
        raise ValueError(
            f"{rule}{metric.name!r}, a {kind}, whose variable "
            f"{variable.name!r} is no sum: a maximum, a last value or an "
            f"average, say.{remedy}"
        )
    _TRIED.add(metric)


def no_sum(
    metric: keras.Metric, update_state: Callable, args, kwargs
) -> keras.Variable | None:
    """The first variable that an update does not add to, or None.

    Raises what the metric raises on sample inputs.
    """
    return trial.alone(_no_sum, metric, update_state, args, kwargs)


def _no_sum(metric, update_state, args, kwargs):
    variables = list(metric.variables)
    sums = [v.aggregation == "sum" and v.dtype != "bool" for v in variables]
    zeros = [tf.zeros(v.shape, v.dtype) for v in variables]
    with keras.StatelessScope(list(zip(variables, zeros))) as scope:
        metric.reset_state()
    initial = [np.array(scope.get_current_value(v)) for v in variables]
    for is_sum, variable, value in zip(sums, variables, initial):
        if is_sum and not np.all(np.abs(value) < 1e-6):
            return variable
    update, inputs = trial.traced(update_state, args, kwargs, variables)

    def added(offset):
        before = [
            value + np.asarray(offset if is_sum else 0).astype(value.dtype)
            for is_sum, value in zip(sums, initial)
        ]
        with tf.device("CPU:0"):
            states = [tf.constant(x) for x in before]
            _, *after = update(*states, *inputs)
        wide = "complex128" if any(map(np.iscomplexobj, before)) else "float64"
        return [
            np.array(new).astype(wide) - old.astype(wide)
            for new, old in zip(after, before)
        ]

    # A metric that draws random numbers adds others each time.
    expected, again = added(0), added(0)
    for x, y in zip(expected, again):
        np.testing.assert_array_equal(x, y, "it draws random numbers")
    for found in (added(100), added(-100)):
        for is_sum, variable, x, y in zip(sums, variables, expected, found):
            eps = 8 * _rounding(tf.as_dtype(variable.dtype))
            if is_sum and not np.allclose(x, y, rtol=eps, atol=100 * eps):
                return variable
    return None


def _rounding(dtype):
    """The spacing of numbers at one; 0 for integers."""
    if dtype.is_integer:
        return 0.0
    one = tf.ones((), dtype.real_dtype)
    steps = 2.0 ** -np.arange(60)
    differ = tf.cast(1.0 + steps, one.dtype) > one
    return float(steps[np.array(differ)].min())
