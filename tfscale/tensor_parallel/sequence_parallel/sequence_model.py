"""Prepares models for sequence parallelism, and finds the plan of each call."""

import functools
import warnings
import weakref

import keras
import tensorflow as tf

from tfscale import _internals
from tfscale import in_place
from tfscale import rank_context
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import collectives
from tfscale.tensor_parallel import decisions
from tfscale.tensor_parallel.sequence_parallel import boundary_layer
from tfscale.tensor_parallel.sequence_parallel import sequence
from tfscale.tensor_parallel.sequence_parallel import sequence_analysis

# What there was a warning of.
_warned = weakref.WeakSet()


class _Prepared(BaseException):
    """Ends a trial run: a model has been prepared.

    No `Exception`, which Keras would take for one of a layer.
    """


def prepare_called(fn, run, sharded_calls) -> None:
    """Finds the models that a function calls, and prepares them.

    Where activations are to be sharded, a model has to be known before any of
    its layers runs: so there is a trial run, in a graph that is let go, which
    ends at the first layer that belongs to an unknown model.

    Args:
        fn: The function.
        run: Runs a function on ranks.
        sharded_calls: The set of calls of layers with sharded variables.
            Cleared if some of them stay undecided.
    """
    is_eager = tf.executing_eagerly()
    while any(not call.is_decided for call in sharded_calls):
        with _internals.FuncGraph("trial").as_default():
            try:
                run(_on_trial(fn))
            except _Prepared:
                continue
            except Exception as error:
                # A graph fails in the same way where it counts. What runs
                # eagerly may be right, and no graph.
                if not is_eager:
                    raise
                warnings.warn(
                    "Sequence parallelism needs a graph of what the replicas "
                    "run, to find its models before they run. Received: "
                    f"{type(error).__name__}: {error}. Activations are whole; "
                    "run it in a `tf.function` (`run_eagerly=False`).",
                    stacklevel=2,
                )
        # No model has the others, or none that is called here.
        sharded_calls.clear()


def _on_trial(fn):
    """The function, whose thread knows that it is a trial run."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with rank_context.within(prepares_models=True):
            return fn(*args, **kwargs)

    return call


def apply_decision(num_ranks: int, rule) -> None:
    """Prepares the outermost functional model that is being called.

    Args:
        num_ranks: Number of model ranks.
        rule: That of a layer about to run.

    Raises:
        _Prepared: If this is a trial run and there is such a model.
    """
    if not rank_context.current().calls.prepares_models:
        analysis.apply_decision(num_ranks, rule)
        return
    model = decisions.model_in_call()
    if model is not None and call_of(model) is None:
        prepare(model, num_ranks)
        raise _Prepared
    if model is None and not rule.is_inner:
        _warn_of_own_call(rule)
    analysis.apply_decision(num_ranks, rule)


def _warn_of_own_call(rule):
    """Once for what is called by the user, a model with a `call` of its own."""
    called = [*_internals.name_scope_callers(), rule.layer][0]
    if called not in _warned:
        _warned.add(called)
        warnings.warn(
            f"{called.name!r} runs without sequence parallelism: it is no "
            "functional or sequential model, so that it is not known what its "
            "layers do with a part. Activations are whole between its sharded "
            "layers.",
            stacklevel=2,
        )


def prepare(model, num_ranks: int) -> "ModelCall":
    """Analyses a model, and puts boundaries around its layers, once.

    Args:
        model: A functional or sequential model.
        num_ranks: Number of model ranks.
    """
    if call_of(model) is None:
        analysis.ensure_analysed(model, num_ranks)
        for layer in _internals.flatten_layers(model, include_self=False):
            if not isinstance(layer, _internals.Functional | keras.Sequential):
                boundary_layer.attach(layer)
        call = ModelCall(model, num_ranks)
        in_place.put(model, SequenceModel, sequence_call=call)
    return model.sequence_call


def call_of(model) -> "ModelCall | None":
    """How a model is run by plans, if it is."""
    return model.sequence_call if isinstance(model, SequenceModel) else None


class SequenceModel(in_place.Mixin):
    """A model that runs by plans, put in the place of Keras' class.

    Attributes:
        sequence_call: How it runs.
    """

    sequence_call: "ModelCall"

    def call(self, *args, **kwargs):
        """See `keras.Model`; by the plan for its inputs on ranks."""
        return self.sequence_call.run(super().call, *args, **kwargs)


class ModelCall:
    """Finds the plan to run a model by.

    Attributes:
        found: By shapes of inputs, a plan or None, and the reason if so.
    """

    def __init__(self, model, num_ranks):
        self._model = model
        self._num_ranks = num_ranks
        self.found = {}

    def run(self, call, inputs, *args, **kwargs):
        """Calls the model by its plan on ranks, and as it is elsewhere.

        Args:
            call: What the model does as it is.
            inputs: What the model is called with.
            *args: Other arguments.
            **kwargs: Other arguments by name.
        """
        if (
            rank_context.current().calls.recorder is not None
            or sequence.current() is not None
            or collectives.num_ranks() == 1
        ):
            return call(inputs, *args, **kwargs)
        plan = self.plan_for(inputs)
        if plan is None:
            return call(inputs, *args, **kwargs)
        # Also where it is called by another model: the plan is of this one.
        with sequence.following(plan), decisions.within(self._model):
            return call(inputs, *args, **kwargs)

    def plan_for(self, inputs) -> sequence.SequencePlan | None:
        """The plan for inputs of these shapes, or None.

        Args:
            inputs: What the model is called with, or `tf.TensorSpec`s of it.

        Warns:
            UserWarning: If nothing can be sharded along the sequence.
        """
        calls = list(analysis.sharded_calls(self._model))
        key = (
            # They are others once a layer has got LoRA.
            *(call.rule for call in calls),
            *(
                (tuple(x.shape[1:]), str(x.dtype))
                for x in keras.tree.flatten(inputs)
            ),
        )
        if key not in self.found:
            analysis.ensure_analysed(self._model, self._num_ranks)
            plan, reason = sequence_analysis.find_plan(
                self._model, inputs, self._num_ranks
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
