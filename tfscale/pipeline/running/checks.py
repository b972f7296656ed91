"""Checks of a `PipelineModel`: its arguments, its model and its data."""

import math
import numbers

import keras
import tensorflow as tf

from tfscale.integers import check_integer
from tfscale.mesh.models.wrapped_model import WrappedModel
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.variables.variable import MeshAccumulator
from tfscale.variables.variable import MeshVariable

# Methods of a model that Keras' loops would call, and the steps of a pipeline
# do not.
_STEP_METHODS = (
    "train_step",
    "test_step",
    "make_train_function",
    "make_test_function",
    "compute_metrics",
    "get_metrics_result",
    "reset_metrics",
    "metrics",
)
_PREDICT_METHODS = ("predict_step", "make_predict_function")
_TEACHER_AND_STUDENT = (
    "Write a teacher and a student as one functional model, `keras.Model(x, "
    '{"hard": student(x), '
    '"soft": keras.ops.stack([student(x), teacher(x)], 1)})` '
    "with `teacher.trainable = False`, compiled with a loss for each output, "
    "as in examples/distillation.py."
)


def check_arguments(
    num_microbatches,
    recompute,
    memory_limit,
    microbatch_size,
    stages_per_device,
) -> None:
    """Refuses arguments of the wrong type (TypeError) or size (ValueError)."""
    check_integer("num_microbatches", num_microbatches)
    check_integer("microbatch_size", microbatch_size)
    if stages_per_device is not None:
        check_integer("stages_per_device", stages_per_device)
    if not isinstance(recompute, bool):
        raise TypeError(
            "`recompute` must be True or False. Received: "
            f"recompute={recompute!r}."
        )
    if memory_limit is None:
        return
    if not isinstance(memory_limit, numbers.Real):
        raise TypeError(
            "`memory_limit` must be a number of bytes, or None. Received: "
            f"memory_limit={memory_limit!r}. 16 GiB are 16 * 2**30."
        )
    if not 0 < float(memory_limit) < math.inf:
        raise ValueError(
            "`memory_limit` must be a positive number of bytes, or None. "
            f"Received: memory_limit={memory_limit!r}."
        )


def check_strategy(strategy) -> None:
    """Refuses any but a `MeshStrategy`."""
    if not isinstance(strategy, MeshStrategy):
        raise ValueError(
            "`PipelineModel` must be made in the scope of a "
            f"`tfscale.MeshStrategy`. Received: {type(strategy).__name__}. "
            "Use `with strategy.scope():`."
        )


def is_custom(model: keras.Model, name: str) -> bool:
    """Whether the model's class has a method of its own for one of Keras'."""
    return getattr(model.__class__, name) is not getattr(keras.Model, name)


def check_steps(model: keras.Model) -> None:
    """Refuses a model with steps of its own, which would not be called."""
    if isinstance(model, WrappedModel):
        raise ValueError(
            f"A model can be wrapped only once. Received: {model.name!r} of "
            f"type {type(model).__name__}. Wrap its `model`."
        )
    _refuse_custom(model, _STEP_METHODS)


def check_predictions(model: keras.Model) -> None:
    """Refuses to predict for a model that does so in its own way."""
    _refuse_custom(model, _PREDICT_METHODS)


def _refuse_custom(model, names):
    custom = [name for name in names if is_custom(model, name)]
    if not custom:
        return
    if custom[0].startswith("predict") or custom[0] == "make_predict_function":
        advice = (
            "Predict with the model inside: `model.model.predict(...)`, which "
            "runs it without a pipeline."
        )
    elif isinstance(model, keras.distillation.Distiller):
        advice = _TEACHER_AND_STUDENT
    elif custom[0] in ("train_step", "test_step"):
        advice = (
            "A custom `compute_loss` is called: move what the step does with "
            f"outputs and targets there. {_TEACHER_AND_STUDENT} A step with "
            "several forwards cannot be a pipeline; train the model itself "
            "under `MeshStrategy`."
        )
    else:
        advice = "Override it in a subclass of `tfscale.PipelineModel`."
    raise ValueError(
        f"A pipeline runs its own steps. Received: {model.name!r} of type "
        f"{type(model).__name__}, whose `{custom[0]}` would not be called. "
        f"{advice}"
    )


def changed_variables(plan: PipelinePlan) -> list[keras.Variable]:
    """Variables that layers have got, or have lost, since the plan was made."""
    found = {id(v): v for call in plan.graph.calls for v in call.variables}
    return [
        *(v for number, v in found.items() if number not in plan.numbers),
        *(v for v in plan.variables if id(v) not in found),
    ]


def check_variables(plan: PipelinePlan) -> None:
    """Refuses to trace a plan for other variables than those of the layers."""
    changed = changed_variables(plan)
    if changed:
        raise ValueError(
            "The variables of a pipeline must stay the same. Received: the "
            f"variable {changed[0].path!r}, which was created or removed "
            "later, as `quantize` and `enable_lora` do. Call "
            "`make_train_function`, `make_test_function` or "
            "`make_predict_function` first, as `fit`, `evaluate` and "
            "`predict` do."
        )


def check_made_in_scope(variables) -> None:
    """Refuses variables that the strategy does not know."""
    for variable in variables:
        if not isinstance(variable.value, MeshVariable | MeshAccumulator):
            raise ValueError(
                "A model must be built in the scope of the strategy that "
                f"trains it. Received: variable {variable.path!r}, made "
                "outside. Put the code that builds the model under "
                "`with strategy.scope():`."
            )


def are_built(made) -> bool:
    """Whether all have their variables; metrics but that of `compile` do."""
    return all(getattr(each, "built", True) for each in made)


def check_built(model: keras.Model, loss) -> None:
    """Refuses to run before loss, metrics and optimizer have variables."""
    if are_built([*model.metrics, loss, model.optimizer]):
        return
    raise ValueError(
        "Loss, metrics and optimizer must have their variables before "
        "`strategy.run`, which cannot create any. Received: a first step of "
        f"{model.name!r}. Call `model.test_on_batch(x, y)` on one batch first."
    )


def check_batch(batch) -> None:
    """Refuses tensors that cannot be divided into microbatches."""
    for tensor in keras.tree.flatten(batch):
        if isinstance(tensor, tf.SparseTensor | tf.RaggedTensor):
            raise ValueError(
                "The tensors of a pipeline must be dense. Received: a "
                f"{type(tensor).__name__} of shape {tensor.shape}. Make it "
                "dense in the input pipeline: `dataset.map` with "
                "`tf.sparse.to_dense(x)`, or with `x.to_tensor(shape=[None, "
                "length])` and a mask for the padding."
            )


def check_preprocessed(model: keras.Model, inputs) -> None:
    """Refuses strings that a task's own preprocessor should have had."""
    if getattr(model, "preprocessor", None) is not None and any(
        getattr(x, "dtype", None) == tf.string
        for x in keras.tree.flatten(inputs)
    ):
        raise ValueError(
            "The inputs of a pipeline must be preprocessed: a task's "
            "preprocessor is not one of its layers. Received: strings, for "
            f"{model.name!r}. Use `dataset.map(task.preprocessor)` with the "
            "wrapped task."
        )
