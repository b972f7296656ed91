"""Prepares models for sequence parallelism, and finds the plan of each call.

A layer of a prepared model has a boundary around its `call`, where tensors are
gathered or sharded by the plan, and one around each method that only reads
shapes: such a method gets whole tensors.
"""

import functools
import warnings
import weakref

import keras
import tensorflow as tf

from tfscale._internals import attributes
from tfscale.adapters.model import MeshModel
from tfscale.adapters.model import adapt_model
from tfscale.collectives import rank_collectives
from tfscale.context import step_context
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import model_trace
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel import sequence_analysis

# Models with a warning.
_warned = weakref.WeakSet()


class _Prepared(Exception):
    """Ends a trial run, whose graph is thrown away, at an unknown model."""


def prepare_called(fn, run, sharded_calls) -> None:
    """Finds the models that a function calls, and prepares them.

    A model has to be known before any of its layers runs: `run` calls the
    function on ranks in a graph that is thrown away, which ends at the first
    layer of an unknown model. `sharded_calls` is cleared if eager code calls no
    model that has them.
    """
    is_eager = tf.executing_eagerly()

    @functools.wraps(fn)
    def on_trial(*args, **kwargs):
        with step_context.within_ranks(prepares_models=True):
            return fn(*args, **kwargs)

    def trial():
        run(on_trial)

    while any(not call.is_decided for call in sharded_calls):
        try:
            tf.function(trial, autograph=False).get_concrete_function()
        except _Prepared:
            continue
        except Exception as error:
            # A graph fails in the same way in the step. Eager code may work
            # without being a graph.
            if not is_eager:
                raise
            warnings.warn(
                "Sequence parallelism needs a graph of the function that "
                "replicas run, to find its models in advance. Received: "
                f"{type(error).__name__}: {error}. Activations are whole; "
                "run it in a `tf.function` (`run_eagerly=False`).",
                stacklevel=2,
            )
        # The other layers belong to no model that is called here. Eager code
        # would be tried at each step.
        if is_eager:
            sharded_calls.clear()
        return


def apply_decision(num_ranks: int, rule) -> None:
    """Sets the rule of a layer about to run as its model has it."""
    if step_context.current().ranks.prepares_models:
        model = analysis.model_in_call()
        if model is not None and call_of(model) is None:
            prepare(model, num_ranks)
            raise _Prepared
        if model is None and not rule.is_inner:
            _warn_of_custom_call(rule)
    analysis.apply_decision(num_ranks, rule)


def _warn_of_custom_call(rule):
    called = [*attributes.name_scope_callers(), rule.layer][0]
    if called not in _warned:
        _warned.add(called)
        warnings.warn(
            f"{called.name!r} runs without sequence parallelism: it is neither "
            "functional nor sequential, so the uses of a shard cannot be "
            "analyzed. Activations are whole between its sharded layers.",
            stacklevel=2,
        )


def prepare(model, num_ranks: int) -> "ModelCall":
    """Analyzes a model, and puts boundaries around its layers, once."""
    if call_of(model) is None:
        analysis.ensure_analyzed(model, num_ranks)
        for layer in attributes.flatten_layers(model, include_self=False):
            if not analysis.is_functional(layer):
                sequence.attach_boundaries(layer)
        call = ModelCall(model, num_ranks)
        adapt_model(model, sequence_call=call)
    return model.sequence_call


def call_of(model) -> "ModelCall | None":
    """The `ModelCall` of a model, or None."""
    return model.sequence_call if isinstance(model, MeshModel) else None


class ModelCall:
    """Runs a model by the plan for its inputs.

    `found` has a plan, or None and the reason, by shapes of inputs, and by
    whether the call is of training where that makes a difference.
    """

    def __init__(self, model, num_ranks):
        self._model = model
        self._num_ranks = num_ranks
        self.found = {}

    def run(self, call, inputs, *args, **kwargs):
        """Calls the model by its plan on ranks, and unchanged elsewhere."""
        plan = None
        if (
            step_context.current().ranks.recorder is None
            and sequence.current() is None
            and rank_collectives.num_ranks() > 1
            and not step_context.is_in_nested_graph()
        ):
            training = kwargs.get("training", args[0] if args else None)
            plan = self.plan_for(inputs, bool(training))
        if plan is None:
            return call(inputs, *args, **kwargs)
        # The plan of this model counts, also within another model.
        with step_context.within_ranks(
            sequence_plan=plan.for_call(), model=self._model
        ):
            return call(inputs, *args, **kwargs)

    def plan_for(
        self, inputs, training: bool = True
    ) -> sequence.SequencePlan | None:
        """The plan for inputs, or `tf.TensorSpec`s; None, after a warning."""
        # LoRA changes the variables, and thawed layers need gradients.
        decision = analysis.ensure_analyzed(self._model, self._num_ranks)
        if training not in model_trace.modes_of(self._model):
            training = True
        key = (
            decision,
            training,
            *(
                (tuple(x.shape[1:]), str(x.dtype))
                for x in keras.tree.flatten(inputs)
            ),
        )
        if key not in self.found:
            plan, reason = sequence_analysis.find_plan(
                self._model,
                inputs,
                self._num_ranks,
                decision.is_inner,
                training,
            )
            self.found[key] = plan, reason
            if reason:
                warnings.warn(
                    f"{self._model.name!r} runs without sequence parallelism: "
                    f"{reason}. Activations are whole between its sharded "
                    "layers.",
                    stacklevel=2,
                )
        return self.found[key][0]
