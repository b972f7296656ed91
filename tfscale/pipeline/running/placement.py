"""Puts variables, and operations on them, on the devices of their stages."""

import tensorflow as tf

from tfscale._internals import attributes
from tfscale.distribute import MeshStrategy
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
    its first copy freed. Returns whether any was.
    """
    strategy.extended.pipelined.update((id(v), v) for v in plan.variables)
    if plan.schedule.num_devices == 1 and before is None:
        return False
    ranks_before = {} if before is None else _ranks(before)
    ranks = _ranks(plan)
    for variable in plan.variables:
        rank = ranks[id(variable)]
        if ranks_before.get(id(variable)) == rank:
            continue
        value = variable.value
        creator = strategy.extended.variable_creator
        with strategy.scope(), creator.placed_on(rank, like=value):
            attributes.make_value_anew(variable, value.read_value)
    return ranks != ranks_before


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
