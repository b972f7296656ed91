"""Puts variables, and operations on them, on the devices of their stages."""

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.stages.plan import PipelinePlan


def move_variables(
    plan: PipelinePlan,
    strategy: MeshStrategy,
    before: PipelinePlan | None = None,
) -> bool:
    """Creates every variable anew on its stage's device of every replica.

    They were created on the host, before it was known where the model is cut,
    or lie on the devices of the plan `before`; those that are not in that plan
    may have been created outside of the scope. One is moved after the other and
    its first copy freed. Models that share some are traced anew: they would go
    on with the copies. Returns whether any was moved.
    """
    strategy.extended.pipelined.update((id(v), v) for v in plan.variables)
    if plan.schedule.num_devices == 1 and before is None:
        return False
    ranks_before = {} if before is None else _ranks(before)
    ranks, moved = _ranks(plan), set()
    for variable in plan.variables:
        rank = ranks[id(variable)]
        if ranks_before.get(id(variable)) == rank:
            continue
        value = variable.value
        creator = strategy.extended.variable_creator
        with strategy.scope(), creator.placed_on(rank, like=value):
            attributes.make_value_anew(variable, value.read_value)
        moved.add(id(variable))
    for model in list(strategy.extended.traced_models):
        if not moved.isdisjoint(map(id, model.variables)):
            _trace_anew(model)
    return ranks != ranks_before


def _trace_anew(model: keras.Model) -> None:
    if model.train_function is not None:
        model.make_train_function(force=True)
    if model.test_function is not None:
        model.make_test_function(force=True)
    if model.predict_function is not None:
        model.make_predict_function(force=True)


def _ranks(plan):
    return {
        id(variable): plan.schedule.stage_devices[home]
        for variable, home in zip(plan.variables, plan.homes)
    }


def on_device_of_inputs():
    """Without it, all norms, clipping and scaling would be on one device."""

    def device(operation):
        for tensor in operation.inputs:
            if tensor.device and tensor.shape.rank:
                return tensor.device
        return operation.device

    return tf.compat.v1.get_default_graph().device(device)
