"""The same numbers as on one device: the harness, to which features add rows.

A `Job` is trained twice from the same initial weights: by plain Keras on one
device, and under a `tfscale.MeshStrategy`: as a `tfscale.PipelineModel`, or
with its layers split over model ranks. Then all weights, all other variables of
the model, all slots of the optimizer, and what `fit` logged have to be equal.

Equal means: at most `RTOL` times the largest magnitude in the tensor away,
before or after the training. The two sides add the same numbers up in another
order, so the error of an element is that of the largest terms of its sum and
not of its own size; an element that comes out near zero has no correct digits
on either side.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfscale
from tfscale.adapters import shared_model
from tfscale.adapters.function import for_any_rows
from tfscale.adapters.row_optimizer import adapt_dense_optimizer
from tfscale.comparison.training import reset
from tfscale.pipeline import PipelineModel

RTOL = 1e-5
_SLOTS = ("", "_momentum", "_velocity")


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        build: Makes the model. Called for each side, with the same seeds.
        data: Arguments of `fit` with the data: `x`, `y`, `sample_weight`, ...
        optimizer: Makes the optimizer.
        loss: Makes the loss.
        compile: Makes the other arguments of `compile`.
        fit: Other arguments of `fit`.
    """

    build: Callable[[], keras.Model]
    data: dict[str, Any]
    optimizer: Callable[[], keras.Optimizer] = lambda: keras.optimizers.SGD(
        0.05, momentum=0.9
    )
    loss: Callable[[], Any] = lambda: "mse"
    compile: Callable[[], dict[str, Any]] = dict
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of a training.

    Attributes:
        model: What was fitted.
        initial: Variables of the user's model before training, by path.
        variables: Likewise after it.
        slots: All variables of the optimizer, in its order.
        logs: What `fit` logged, a list of one value per epoch by name.
    """

    model: keras.Model
    initial: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    slots: list[tuple[str, np.ndarray]]
    logs: dict[str, list[float]]


def on_one_device(job: Job) -> Outcome:
    """Trains with plain Keras, gradients of lookups made dense first.

    It runs operation by operation: to trace and optimize a graph of three
    steps takes several times as long as they do. Of several losses Keras logs
    other means there, because it knows the size of each batch.
    """
    one_loss = not isinstance(job.loss(), dict | list)
    if one_loss and "jit_compile" not in job.compile():
        compile_ = job.compile
        job = dataclasses.replace(
            job, compile=lambda: {"run_eagerly": True, **compile_()}
        )
    reset()
    model = job.build()
    optimizer = with_dense_gradients(job.optimizer())
    # As Keras does under a strategy. On one device it is done within the
    # first step, where an initial value becomes an assignment in every step.
    optimizer.build(model.trainable_variables)
    return _train(model, model, optimizer, job, is_one_device=True)


def plain(job: Job, strategy=None) -> Outcome:
    """Trains with plain Keras as `job` says, on one device or a strategy's."""
    reset()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = job.build()
        return _train(model, model, job.optimizer(), job)


def on_mesh(
    job: Job,
    num_stages: int,
    num_microbatches: int,
    num_replicas: int = 1,
    num_ranks: int = 1,
    layouts=None,
    devices=None,
    speeds=None,
    **options,
) -> Outcome:
    """Trains as a pipeline; `options` are those of `PipelineModel`."""
    mesh = tfscale.device_mesh(
        data=num_replicas,
        pipeline=num_stages,
        model=num_ranks,
        devices=devices,
        speeds=speeds,
    )
    layout_map = layout_map_for(job, mesh, layouts) if num_ranks > 1 else None
    reset()
    with tfscale.MeshStrategy(mesh, layout_map).scope():
        model = job.build()
        options = {"balance": "params", **options}
        pipeline = PipelineModel(model, num_microbatches, **options)
        return _train(pipeline, model, job.optimizer(), job)


def on_ranks(
    job: Job, num_ranks: int, num_replicas: int = 1, layouts=None, devices=None
) -> Outcome:
    """Trains the plain Keras model with its layers split over model ranks.

    Args:
        job: What is trained.
        num_ranks: Size of the axis "model".
        num_replicas: Size of the axis "data".
        layouts: Layout of variables by pattern. Defaults to what
            `tfscale.auto_layout_map` finds.
        devices: Those of the mesh, if not the first ones.
    """
    mesh = tfscale.device_mesh(
        data=num_replicas, model=num_ranks, devices=devices
    )
    layout_map = layout_map_for(job, mesh, layouts)
    reset()
    with tfscale.MeshStrategy(mesh, layout_map).scope():
        model = job.build()
        return _train(model, model, job.optimizer(), job)


def on_zero(
    job: Job,
    data: int,
    pipeline=None,
    model=1,
    layouts=None,
    zero_stage=1,
    devices=None,
    offload=None,
) -> Outcome:
    """Trains on replicas that divide the slots of the optimizer.

    Args:
        job: What is trained.
        data: Number of replicas.
        pipeline: Number of stages, or None for the plain Keras model.
        model: Number of model ranks.
        layouts: See `on_ranks`.
        zero_stage: 0 for the same without dividing them.
        devices: Those of the mesh, if not the first ones.
        offload: That of the strategy.
    """
    mesh = tfscale.device_mesh(
        data=data, pipeline=pipeline or 1, model=model, devices=devices
    )
    layout_map = layout_map_for(job, mesh, layouts) if model > 1 else None
    reset()
    strategy = tfscale.MeshStrategy(
        mesh, layout_map, zero_stage=zero_stage, offload=offload
    )
    with strategy.scope():
        inner = trained = job.build()
        if pipeline:
            trained = PipelineModel(inner, 4, balance="params")
        return _train(trained, inner, job.optimizer(), job)


def compiled(job: Job) -> Job:
    """The same, compiled by XLA."""
    return dataclasses.replace(
        job, compile=lambda: {**job.compile(), "jit_compile": True}
    )


def layout_map_for(job: Job, mesh, layouts=None):
    """The layout map of `layouts`, or else one that is found."""
    reset()
    if layouts is None:
        return tfscale.auto_layout_map(job.build(), mesh)
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


def assert_same(
    test, expected: Outcome, actual: Outcome, rtol=RTOL, unmoved=()
):
    """Fails unless all variables, slots and logs are the same numbers.

    Args:
        test: The test case.
        expected: Of one device.
        actual: Of the pipeline.
        rtol: See the docstring of the module.
        unmoved: Ends of paths of variables that start at zero and have no
            gradient but rounding errors, which have nothing in common.
    """

    def check(actual, expected, path, initial=0.0):
        if path.replace("/", "_").endswith(
            tuple(f"{end}{slot}" for end in unmoved for slot in _SLOTS)
        ):
            test.assertLess(np.abs(expected).max(), 1e-6)
            test.assertLess(np.abs(actual).max(), 1e-6)
        else:
            assert_close(actual, expected, path, rtol, initial)

    test.assertEqual(list(expected.variables), list(actual.variables))
    for path, value in expected.initial.items():
        np.testing.assert_array_equal(actual.initial[path], value, path)
    for path, value in expected.variables.items():
        check(actual.variables[path], value, path, expected.initial[path])
    test.assertLen(actual.slots, len(expected.slots))
    for (path, value), (_, found) in zip(expected.slots, actual.slots):
        check(found, value, path)
    test.assertEqual(set(expected.logs), set(actual.logs))
    for name, value in expected.logs.items():
        assert_close(actual.logs[name], value, name, rtol)


def assert_close(actual, expected, name="", rtol=RTOL, initial=0.0):
    """Fails if an element is too far away; see the docstring of the module."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if not np.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(actual, expected, name)
        return
    largest = np.max(np.abs(expected), initial=np.max(np.abs(initial)))
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=rtol * largest, err_msg=name
    )


def calls_of_each_replica():
    """Within it replicas do not share the trace of a model's call.

    With ZeRO or offload they do not, and TensorFlow rounds otherwise what it
    optimizes as another graph.
    """
    return mock.patch.object(shared_model, "_NOT_SHARED", (keras.Optimizer,))


def assert_equal(test, expected: Outcome, actual: Outcome):
    """Fails unless variables and slots are equal to the last bit."""
    test.assertEqual(list(expected.variables), list(actual.variables))
    for path, value in expected.variables.items():
        np.testing.assert_array_equal(actual.variables[path], value, path)
    for (path, value), (_, found) in zip(
        expected.slots, actual.slots, strict=True
    ):
        np.testing.assert_array_equal(found, value, path)


def _train(model, inner, optimizer, job, is_one_device=False):
    initial = _values(inner.variables)
    model.compile(optimizer=optimizer, loss=job.loss(), **job.compile())
    if is_one_device:
        # Of several losses Keras 3.16 logs other means (docs/numbers.md).
        model.make_train_function()
        model.train_function = for_any_rows(model.train_function)
    arguments = {"shuffle": False, "verbose": 0, **job.data, **job.fit}
    history = model.fit(**arguments)
    return Outcome(
        model=model,
        initial=initial,
        variables=_values(inner.variables),
        slots=[(v.path, np.array(v)) for v in optimizer.variables],
        logs=history.history,
    )


def _values(variables):
    values = {v.path: np.array(v) for v in variables}
    if len(values) < len(variables):
        raise ValueError("Name the layers: two variables have one path.")
    return values


def with_dense_gradients(optimizer):
    """The optimizer as it would be, did Keras add up the rows of a lookup."""
    adapt_dense_optimizer(optimizer)
    return optimizer
