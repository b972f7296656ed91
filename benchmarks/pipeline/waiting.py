"""A step of a pipeline whose actions wait in place of computing."""

import time

import numpy as np
import tensorflow as tf

from tfscale.graphs.function_options import no_grappler
from tfscale.pipeline.running.step import PipelineStep


def waiting(seconds, apart=()):
    """What a `PipelineStep` emits: actions that wait in place of computing.

    Args:
        seconds: Those that an action waits, a function of the action.
        apart: The stages whose W is apart; a B of others waits for W too.
    """

    def emit(action, function, arguments):
        waited = seconds(action)
        if action.kind == "B" and action.stage not in apart:
            waited += seconds(action._replace(kind="W"))

        def wait(*_):
            time.sleep(waited)
            return np.float32(0)

        # What is computed is computed meanwhile.
        done = tf.numpy_function(wait, arguments, tf.float32, stateful=False)
        results = function(*arguments)
        with tf.control_dependencies([done]):
            return [tf.identity(result) for result in results]

    return emit


def waiting_step(model, strategy, seconds, rows):
    """A function that runs a step of a pipeline of Dense(2) and the like.

    Args:
        model: A compiled `PipelineModel`.
        strategy: Its strategy.
        seconds: Those that an action waits, a function of the action.
        rows: Of the batch of a replica.
    """
    plan = model.plan
    x = tf.ones((rows, *model.inputs[0].shape[1:]))
    with strategy.scope():
        y = model.compute_output_spec(x)
        model._symbolic_build(data_batch=(x, tf.ones(y.shape)))
    # The executor has a W for every B of a stage that has one for some.
    apart = {a.stage for a in plan.schedule.order() if a.kind == "W"}
    emit = waiting(seconds, apart)

    def replica_step():
        targets = tf.ones(y.shape), None
        program = model._programs.get([x], targets, training=True)
        step = PipelineStep(plan, program, strategy, emit=emit)
        actions = plan.schedule.order()
        (made,) = step.run([([x], targets)], actions=actions, training=True)
        return made.loss, made.gradients

    @tf.function(autograph=False)
    def run():
        return strategy.run(replica_step)

    def step():
        # Grappler leaves out what no operation takes, also as `fit` has it.
        with no_grappler():
            return run()

    step()
    return step


def seconds_in_turns(steps, rounds):
    """Lists of the seconds that steps took, in turns; dicts by their names."""
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times
