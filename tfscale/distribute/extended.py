"""What `MeshStrategy` does: makes variables, sums gradients, updates."""

import functools
import weakref
from typing import Any

import tensorflow as tf

from tfscale import step_context
from tfscale._internals import attributes
from tfscale._internals import symbols
from tfscale.adapters.model import adapt_model
from tfscale.collectives.workers import check_one_process
from tfscale.distribute.fully_sharded import gather_again
from tfscale.distribute.mesh_config import MeshConfig
from tfscale.distribute.model_ranks import ModelRanks
from tfscale.distribute.models.packed_logs import PackedLogs
from tfscale.distribute.optimizers import mixed_update
from tfscale.distribute.replica_function import are_per_replica
from tfscale.distribute.replica_function import check_in_scope
from tfscale.distribute.replica_function import check_trains
from tfscale.distribute.replica_function import draw_apart
from tfscale.distribute.replica_function import trained_by
from tfscale.distribute.replica_function import with_input_dependencies
from tfscale.distribute.variables import zero
from tfscale.distribute.variables.variable_creator import VariableCreator
from tfscale.sharding.shards import shard
from tfscale.whole_batch import batch_norm
from tfscale.whole_batch import step as whole_batch_step


class MeshExtended(ModelRanks):
    """The `extended` of a `MeshStrategy`.

    As far as tf.distribute is concerned a replica is the devices of its first
    stage: they get the inputs and run what has no other place.

    Attributes:
        layouts: They say which variables are sharded.
        optimizer_states: How the states of optimizers are sharded.
        variable_creator: Makes the variables.
        pipelined: The variables of models that were cut over the axis
            "pipeline", by `id(variable)`.
        gradient_noise: Who looks at gradients before and after they are
            summed, a `GradientNoise`, or None.
    """

    def __init__(self, strategy, config: MeshConfig):
        self.layouts = config.layouts
        self.pipelined: weakref.WeakValueDictionary = (
            weakref.WeakValueDictionary()
        )
        self.gradient_noise: Any = None
        self._num_stages = len(config.devices[0])
        self.optimizer_states = zero.OptimizerStateSharding(
            config.zero_stage,
            config.num_replicas,
            config.num_model_ranks,
            config.offloads_slots,
        )
        self.variable_creator = VariableCreator(
            config.devices, config.layouts, self.optimizer_states
        )
        super().__init__(strategy, config)

    @property
    def has_workers(self) -> bool:
        """Whether other processes have replicas too."""
        return self.workers is not None

    @property
    def has_several_replicas(self) -> bool:
        """Whether gradients are added up, here or over workers."""
        # `num_replicas_in_sync` notes that who wrote the step has asked.
        return self.num_replicas > 1 or self.has_workers

    def _create_variable(self, next_creator, **kwargs):
        colocate_with = kwargs.get("colocate_with")
        if not isinstance(
            colocate_with, (symbols.DistributedVariable, type(None))
        ):
            # A single device: the state of a numpy dataset and the like.
            return super()._create_variable(next_creator, **kwargs)
        return self.variable_creator.create(
            self._container_strategy(), next_creator, **kwargs
        )

    def _call_for_each_replica(self, fn, args, kwargs):
        self.layouts.check_all_matched(self.variable_creator.paths)
        self._check_not_compiled(fn)
        self._check_has_pipeline(fn)
        self._check_divides_weights()
        model = whole_batch_step.model_of(fn)
        if self.has_workers and model is not None:
            adapt_model(model)
            results = self._call(fn, args, kwargs)
            self._logs = PackedLogs(
                results, self._parts_of, self._reducer.means
            )
            return results
        return self._call(fn, args, kwargs)

    def _call(self, fn, args, kwargs):
        if attributes.predicts(fn) and not are_per_replica(args):
            check_one_process(
                self._container_strategy(),
                "`predict_on_batch`, of which nobody knows whose rows it has,",
                "Call `model.predict(x, batch_size=len(x))` in all workers.",
            )
            # `predict_on_batch`: all of them make the same of it, and Keras
            # would return it once for each.
            results = super()._call_for_each_replica(fn, args, kwargs)
            return tf.nest.map_structure(self._of_first_replica, results)
        call = super()._call_for_each_replica
        fn = whole_batch_step.checking_gradients(with_input_dependencies(fn))
        # A function of TensorFlow has a graph of its own in each replica, in
        # which no two of them meet.
        if self._num_replicas_in_sync == 1 or isinstance(
            fn, tf.types.experimental.PolymorphicFunction
        ):
            return call(fn, args, kwargs)
        check_trains(fn)
        draw_apart(fn)
        with whole_batch_step.prepared(fn, are_per_replica(args)) as step:
            return call(step, args, kwargs)

    def _of_first_replica(self, value):
        return self._local_results(value)[0]

    def _check_has_pipeline(self, fn):
        # With no variable there is nothing to train.
        if self._num_stages == 1 or not self.variable_creator.paths:
            return
        model = whole_batch_step.model_of(fn)
        # Its class is in a higher layer, and checks its variables itself.
        is_pipeline = hasattr(model, "pipeline_summary")
        if not self.pipelined or any(
            id(variable) not in self.pipelined and not is_pipeline
            for variable in trained_by(fn)
        ):
            raise ValueError(
                "A mesh with a 'pipeline' axis is for a "
                "`tfscale.PipelineModel`. Received: `strategy.run`, or `fit`, "
                f"on a mesh with pipeline={self._num_stages}, of a model that "
                "was not cut: it would train on one device of each row. "
                "Wrap the model, `tfscale.PipelineModel(model, "
                "num_microbatches)`, in the strategy's scope, or make a mesh "
                "with data= and model= only."
            )

    def _check_divides_weights(self):
        states, paths = self.optimizer_states, self.variable_creator.paths
        if self.gathers_weights and paths and not states.max_gathered_bytes:
            raise ValueError(
                "zero_stage=3 must find weights to divide: trainable ones of "
                f"at least {zero.MIN_ELEMENTS} elements with a dim that the "
                f"replicas divide. Received: {len(paths)} variables, "
                f"{paths[0]!r} the first, and none that {self.num_replicas} "
                "replicas divide. Use zero_stage=0 for a small model, or name "
                "dims in a layout map: {'.*kernel': ('data', None)}."
            )

    def _check_not_compiled(self, fn):
        graph = tf.compat.v1.get_default_graph()
        count = len(self._devices)
        # Ranks of a replica meet in one function, replicas have one each.
        offloads = self.optimizer_states.are_on_host
        is_compiled = symbols.is_compiled_by_xla(graph) or (
            (self.num_model_ranks > 1 or self.gathers_weights or offloads)
            and attributes.asks_for_xla(fn)
        )
        if (count > 1 or offloads) and is_compiled:
            raise ValueError(
                "XLA compiles a function for one device. Received: "
                f"`strategy.run`, on a mesh of {count} devices"
                f"{' with slots on the host' * offloads}, in or of a "
                "function with jit_compile=True. Pass jit_compile=False to "
                "`compile` or `tf.function`, or leave it out; on a mesh "
                "without a 'model' axis XLA can compile the stages of a "
                "`tfscale.PipelineModel`."
            )

    @property
    def gathers_weights(self) -> bool:
        """See `ModelRanks`."""
        return self.optimizer_states.are_weights_sharded

    @property
    def accumulates_shards(self) -> bool:
        """Whether replicas have parts of sums of microbatches' gradients."""
        states = self.optimizer_states
        return states.stage >= 2 and states.are_sharded

    @property
    def gradients_are_summed(self) -> bool:
        """Whether an optimizer applies sums over the replicas in this thread.

        Keras sums gradients after it has clipped, unscaled and checked them,
        which is wrong with more than one replica: they are summed before.
        Every replica then does the same to its own components, with no merge
        call, so that `apply` may stand inside a `tf.cond`.
        """
        return step_context.current().update is not None

    def sum_gradients(self, gradients, variables) -> list:
        """Gradients summed over the replicas; in replica context.

        Of a variable whose slots the replicas divide it is this replica's part.

        Raises:
            ValueError: If a variable was made outside of the scope.
        """
        for variable in variables:
            check_in_scope(variable)
        sums = list(gradients)
        if self._num_replicas_in_sync == 1:
            return sums
        if self.optimizer_states.are_weights_sharded:
            gather_again.gather_again()
        dims: list[Any] = [
            self.optimizer_states.dim_of(variable) for variable in variables
        ]
        given = [i for i, value in enumerate(gradients) if value is not None]
        whole = [i for i in given if dims[i] is None]
        divided = [i for i in given if dims[i] is not None]
        context = tf.distribute.get_replica_context()

        def dense(places):
            return [tf.convert_to_tensor(gradients[i]) for i in places]

        # Not by `context.all_reduce`, which has an operation for all of them,
        # on one device, where they would meet from all stages.
        all_reduce = functools.partial(context.merge_call, _sums)
        found = batch_norm.all_sums_and_statistics(all_reduce, dense(whole))
        for i, total in zip(whole, found):
            sums[i] = total
        parts = zero.reduce_scatter(
            dense(divided),
            [
                None if self._is_part(gradients[i], variables[i]) else dims[i]
                for i in divided
            ],
        )
        for i, part in zip(divided, parts):
            sums[i] = part
        if self.gradient_noise is not None:
            self.gradient_noise.of_replicas(gradients, sums, variables, self)
        return sums

    def scatter_microbatch(self, gradients, variables, weight) -> list:
        """Gradients of a microbatch, reduce-scattered over the replicas.

        With `zero_stage=3` those of sharded weights have been so by the tape.

        Args:
            gradients: For each variable a dense tensor or None.
            variables: Trainable Keras variables.
            weight: What this replica's gradients are multiplied by first.
        """
        found, dims = list(gradients), {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None or zero.is_divided(variable):
                continue
            factor = tf.cast(weight, gradient.dtype)
            found[i] = tf.math.multiply_no_nan(gradient, factor)
            dim = self.optimizer_states.dim_of(variable)
            if dim is not None:
                dims[i] = dim
        shards = zero.reduce_scatter_here(
            [found[i] for i in dims], list(dims.values())
        )
        for i, gradient in zip(dims, shards):
            shape = self.optimizer_states.sharding_of(variables[i]).local_shape
            found[i] = tf.ensure_shape(gradient, shape)
        return found

    def _is_part(self, gradient, variable):
        """Whether a gradient is a part of this worker's sum already."""
        local_shape = self.optimizer_states.sharding_of(variable).local_shape
        return zero.is_divided(variable) or gradient.shape == local_shape

    def sum_over_workers(self, tensors) -> list[tf.Tensor]:
        """Sums over the workers of tensors that are summed here."""
        if self.workers is None:
            return list(tensors)
        return self.workers.all_reduce(tensors)

    def from_first_worker(self, tensor: tf.Tensor, path: str) -> tf.Tensor:
        """Worker 0's tensor, if there are several workers."""
        if self.workers is None:
            return tensor
        fact = f"{path} {tensor.shape} {tensor.dtype.name}"
        self.workers.coordination.check_same("variables", fact)
        return self.workers.from_first(tensor)

    def shard_gradient(self, gradient, variable) -> tf.Tensor:
        """This device's part of a gradient that all devices have whole.

        It is what `apply_sums` takes; see `adapters/optimizer.py`.
        """
        sharding = self.optimizer_states.sharding_of(variable)
        return shard(gradient, sharding, *self.replica_and_rank())

    def _update(self, var, fn, args, kwargs, group):
        check_in_scope(var)
        update = mixed_update.of_parts(super()._update, self.optimizer_states)
        return update(var, fn, args, kwargs, group)

    def _replica_ctx_update(self, var, fn, args, kwargs, group):
        if not self.optimizer_states.are_parts_read:
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        part = self.optimizer_states.local_shard(var)
        with tf.device(part.device):
            return fn(part, *args, **kwargs)

    def _use_merge_call(self):
        return not self.gradients_are_summed and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if self.gradients_are_summed:
            return value
        return super()._replica_ctx_all_reduce(reduce_op, value, options)


def _sums(strategy, *values):
    """Sums over the replicas; where these meet."""
    return strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, [(value, value) for value in values]
    )
