"""Tries whether a metric may be updated by parts of a batch.

Each replica updates its own variables, which are summed where the metric is
read: wrong for a maximum, a last value or a moving average. So the update is
tried on small inputs with several values of the variables, and must add the
same each time.

    a sum         0 ─► 3     100 ─► 103    -100 ─► -97    3 each
    a maximum     0 ─► 3     100 ─► 100    -100 ─► 3      3, 0, 103

Replicas and microbatches also give it fewer rows each time. So the result of
one update by six rows is compared with that of two updates by parts of them.

    a sum of errors     a b c d e f ─► 21    a c ─► 4    b d e f ─► 21
    a last mean         a b c d e f ─► 3.5   a c ─► 2    b d e f ─► 4.25
"""

import functools
import warnings
import weakref

import keras
import numpy as np
import tensorflow as tf

from tfscale.graphs.noting_scope import outside_scopes
from tfscale.step.checks import trial

# Custom metrics that were tried; each is tried once.
_TRIED: weakref.WeakSet[keras.Metric] = weakref.WeakSet()
_TRIED_DIVIDED: weakref.WeakSet[keras.Metric] = weakref.WeakSet()


def check(metric: keras.Metric, args, kwargs) -> None:
    """Raises if replicas cannot add a metric up; warns if it is not tried.

    Warns of what `check_divided` does too.
    """
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
        variable = outside_scopes(no_sum, metric, args, kwargs)
    except Exception as error:
        warnings.warn(
            f"{rule}{metric.name!r}, a {kind}, which could not be tried "
            f"({type(error).__name__}: {error}).{remedy}",
            stacklevel=2,
        )
        variable = None
        _TRIED_DIVIDED.add(metric)
    if variable is not None:
        raise ValueError(
            f"{rule}{metric.name!r}, a {kind}, whose variable "
            f"{variable.name!r} is no sum: a maximum, a last value or an "
            f"average, say.{remedy}"
        )
    _TRIED.add(metric)
    if all(variable.aggregation == "sum" for variable in metric.variables):
        check_divided(metric, args, kwargs)


def check_divided(metric: keras.Metric, args, kwargs) -> None:
    """Warns, once, if parts of a batch give another result than the whole."""
    if metric in _TRIED_DIVIDED:
        return
    _TRIED_DIVIDED.add(metric)
    found = trial.complaint("did not", _can_be_divided, metric, args, kwargs)
    if not found:
        return
    warnings.warn(
        "A metric is updated once for each part of a batch (a replica's rows, "
        "a microbatch), and should have the result of the whole. Received: "
        f"{metric.name!r}, a {metric.__class__.__name__}, {found} keeps a last "
        "value, counts updates, or averages what looks at several rows (a "
        "maximum, say). Keep sums over rows, gather the rows of all replicas "
        "(docs/numbers.md), or train in one part if that matters.",
        stacklevel=2,
    )


def no_sum(metric: keras.Metric, args, kwargs) -> keras.Variable | None:
    """The first variable that an update does not add to, or None.

    Raises what the metric raises on sample inputs.
    """
    variables = list(metric.variables)
    sums = [v.aggregation == "sum" and v.dtype != "bool" for v in variables]
    initial = _initial(metric, variables)
    for is_sum, variable, value in zip(sums, variables, initial):
        if is_sum and not np.all(np.abs(value) < 1e-6):
            return variable
    update, inputs = trial.traced(
        _plain_update(metric), args, kwargs, variables
    )

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


def _can_be_divided(metric, args, kwargs):
    variables = list(metric.variables)
    update = _plain_update(metric)

    def result(*args, **kwargs):
        update(*args, **kwargs)
        results = keras.tree.flatten(metric.result())
        return tf.concat(
            [tf.reshape(tf.cast(x, "float64"), [-1]) for x in results], 0
        )

    whole, inputs = trial.traced(result, args, kwargs, variables, rows=6)
    with tf.device("CPU:0"):
        states = [tf.constant(x) for x in _initial(metric, variables)]
        expected, *_ = whole(*states, *inputs)
    # Classes are 0 and 1 by turns. What a function returns counts by rows:
    # parts of equal size will do.
    groups = [[0, 2], [1, 3, 4, 5]]
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        groups = [[0, 2, 4], [1, 3, 5]]
    for rows in groups:
        divided, _ = trial.traced(result, args, kwargs, variables, len(rows))
        with tf.device("CPU:0"):
            found, *states = divided(
                *states,
                *(tf.gather(x, rows) if x.shape.rank else x for x in inputs),
            )
    return np.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def _plain_update(metric):
    """The `update_state` of the user's class, which tries nothing."""
    return functools.partial(metric.__class__.update_state, metric)


def _initial(metric, variables):
    """The values of a metric's variables after `reset_state`."""
    zeros = [tf.zeros(v.shape, v.dtype) for v in variables]
    with keras.StatelessScope(list(zip(variables, zeros))) as scope:
        metric.reset_state()
    return [np.array(scope.get_current_value(v)) for v in variables]


def _rounding(dtype):
    """The spacing of numbers at one; 0 for integers."""
    if dtype.is_integer:
        return 0.0
    one = tf.ones((), dtype.real_dtype)
    steps = 2.0 ** -np.arange(60)
    differ = tf.cast(1.0 + steps, one.dtype) > one
    return float(steps[np.array(differ)].min())
