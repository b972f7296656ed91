"""A step of a pipeline whose actions wait in place of computing."""

import time

import tensorflow as tf

from tfscale.pipeline.running.step import PipelineStep


def waiting_step(model, strategy, seconds, rows):
    """A function that runs a step of a pipeline of Dense(2) and the like.

    Args:
        model: A compiled `PipelineModel`.
        strategy: Its strategy.
        seconds: Those that an action waits, a function of the action. A B waits
            for its W too where none of its stage is apart.
        rows: Of the batch of a replica.
    """
    plan = model.plan
    x = tf.ones((rows, *model.inputs[0].shape[1:]))
    with strategy.scope():
        y = model.compute_output_spec(x)
        model._symbolic_build(data_batch=(x, tf.ones(y.shape)))
    # The executor has a W for every B of a stage that has one for some.
    apart = {a.stage for a in plan.schedule.order() if a.kind == "W"}

    def emit(action, function, arguments):
        waited = seconds(action)
        if action.kind == "B" and action.stage not in apart:
            waited += seconds(action._replace(kind="W"))

        def wait(*results):
            time.sleep(waited)
            return results

        results = function(*arguments)
        dtypes = [result.dtype for result in results]
        late = tf.numpy_function(wait, results, dtypes, stateful=False)
        for result, waiting in zip(results, late, strict=True):
            waiting.set_shape(result.shape)
        return late

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

    run()
    return run
