"""One step of one replica: divide batches, run the schedule, add up.

Everything here runs in replica context, while Keras traces a step. Each model
rank does all of it with its shards, but for the schedule, which is written once
for all ranks of a replica.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import symbols
from tfscale.collectives import rank_collectives
from tfscale.mesh.gradient_reduction import sum_over_replicas
from tfscale.mesh.strategy import MeshStrategy
from tfscale.pipeline.running.batch import Batch
from tfscale.pipeline.running.executor import Tensors
from tfscale.pipeline.running.executor import run_schedule
from tfscale.pipeline.stages.plan import PipelinePlan
from tfscale.pipeline.tracing import keys
from tfscale.pipeline.tracing.program import Program
from tfscale.step import batch_norm
from tfscale.step.microbatches import Microbatches


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The results of a step, of the batch of this replica.

    Attributes:
        inputs: Flat inputs of the model.
        loss: This replica's part of the loss of the global batch, without
            weight regularizers, times the replicas' number of rows over its
            own: so that the mean over replicas, by rows, is that loss.
        losses: The same of each loss given to `compile`, not weighted.
        share: This replica's share of the rows of the global batch.
        outputs: Flat outputs of the model, with their Keras masks; none if
            nothing reads them.
        gradients: Of this replica, by the number of the trainable variable.
        states: New values of seeds and the like, by number.
        moments: For each call of a BatchNormalization its layer, and the
            moments of all microbatches.
    """

    inputs: list[tf.Tensor]
    loss: tf.Tensor
    losses: list[tf.Tensor]
    share: tf.Tensor
    outputs: list[tf.Tensor]
    gradients: dict[int, tf.Tensor]
    states: dict[int, tf.Tensor]
    moments: list[tuple[keras.layers.BatchNormalization, tf.Tensor]]


@dataclasses.dataclass(eq=False)
class PipelineStep:
    """Runs a program on batches in the current replica.

    With `reads_outputs` a loop keeps the outputs of the model of all
    microbatches. For `emit` see `run_schedule`.
    """

    plan: PipelinePlan
    program: Program
    strategy: MeshStrategy
    emit: Callable | None = None
    reads_outputs: bool = True

    def __post_init__(self):
        # The number of the replica among those of this worker.
        self._replica, rank = self.strategy.extended.replica_and_rank()
        self._num_ranks = rank_collectives.num_ranks()
        self._index = self._replica * self._num_ranks + rank
        self._context = tf.distribute.get_replica_context()
        grid = self.strategy.device_grid[self._replica]
        self._ranks = [grid[d] for d in self.plan.schedule.stage_devices]
        self.devices = [ranks[rank] for ranks in self._ranks]

    def run(
        self,
        batches,
        *,
        actions,
        loss_scale=1.0,
        training=False,
        update=None,
    ) -> list[StepResult]:
        """Runs `actions`, in an order that respects dependencies, on batches.

        `batches` have for each batch of the schedule the flat inputs of the
        model, `(y, sample_weight)`, or None to predict, and its `BatchShard`.
        Gradients are multiplied by `loss_scale`. `update` updates a stage,
        given all tensors, each `Batch` and a U.
        """
        replica = self._context.replica_id_in_sync_group
        tensors = Tensors(
            shared={
                keys.REPLICA: tf.cast(replica, tf.int64),
                **self._read("trainable", keys.Param),
            },
            states=self._read("state", keys.State),
            sums=self._zeros() if training else {},
            microbatches=[],
        )
        prepared = [self._prepare(tensors, *batch) for batch in batches]
        if training or self.program.divisors is not None:
            for batch in prepared:
                batch.weigh(loss_scale)
        if update is not None:
            update = functools.partial(update, tensors, prepared)
        self._run(list(actions), tensors, update)
        with tf.device(self.devices[-1]):
            gradients = {}
            if training and update is None:
                gradients = self._gradients(tensors)
            states = self._states(tensors)
            return [
                self._result(batch, gradients, states) for batch in prepared
            ]

    def _prepare(self, tensors, inputs, targets, shard):
        """Adds the microbatches of a batch to those of the step."""
        targets = [x for x in keras.tree.flatten(targets) if x is not None]
        fed = map(keys.Activation, self.plan.graph.inputs)
        # An optional input may be None.
        batch: dict[Hashable, Any] = {
            key: x for key, x in zip(fed, inputs) if x is not None
        }
        inputs = list(batch.values())
        batch.update((keys.Target(i), x) for i, x in enumerate(targets))
        size = self.plan.schedule.microbatches_per_batch
        divided = Microbatches(list(batch.values()), size).split()
        microbatches: list[dict[Hashable, Any]] = [
            {keys.ROWS: rows, **dict(zip(batch, values))}
            for rows, values in divided
        ]
        tensors.microbatches.extend(microbatches)
        return Batch(
            self.program,
            inputs,
            dataclasses.replace(tensors, microbatches=microbatches),
            self.devices[-1],
            shard,
        )

    def _result(self, batch, gradients, states):
        loss, losses = batch.total()
        shard = batch.shard
        to_mean = tf.math.divide_no_nan(shard.all_rows, shard.rows)
        return StepResult(
            inputs=batch.inputs,
            loss=loss * to_mean,
            losses=[each * to_mean for each in losses],
            share=shard.share,
            outputs=self._outputs(batch),
            gradients=gradients,
            states=states,
            moments=self._moments(batch.tensors),
        )

    def _run(self, actions, tensors, update):
        """Runs a schedule: a replica's model ranks run each action together."""
        if self._num_ranks == 1:
            self._run_schedule(actions, [tensors], update)
            return

        def run_all(strategy, steps, tensors):
            del strategy
            for first in range(0, len(steps.values), self._num_ranks):
                of_replica = tensors.values[first : first + self._num_ranks]
                steps.values[first]._run_schedule(actions, of_replica)

        self._context.merge_call(run_all, args=(self, tensors))

    def _run_schedule(self, actions, tensors_of_ranks, update=None):
        stages = [x.of_replica(self._replica) for x in self.program.stages]
        run_schedule(
            actions,
            stages,
            self._ranks,
            tensors_of_ranks,
            results=self._results(),
            emit=self.emit,
            update=update,
        )

    def _results(self):
        """Keys, with their rank, of what the step reads of microbatches."""
        wanted = {keys.LOSSES, keys.DIVISORS}
        for index, stage in enumerate(self.program.stages):
            wanted |= {keys.AddedLoss(index), *stage.batch_norms}
        if self.reads_outputs:
            for value in self.plan.graph.outputs:
                wanted |= {keys.Activation(value), keys.Mask(value)}
        return {(r, key) for r in range(self._num_ranks) for key in wanted}

    def sum_gradients(self, gradients) -> dict[int, tf.Tensor]:
        """Gradients of the global batch, by number, or this replica's shard.

        The moments that layers noted are summed in the same all-reduce.
        """
        sums = sum_over_replicas(
            self.strategy.extended,
            list(gradients.values()),
            [self.plan.variables[number] for number in gradients],
        )
        return dict(zip(gradients, sums))

    def assign(
        self, result: StepResult, noting: batch_norm.NotedMoments
    ) -> None:
        """Assigns states; `noting` updates averages with sums of gradients."""
        for layer, moments in result.moments:
            with tf.device(moments.device):
                averages = batch_norm.MovingAverages.of(layer, moments.shape[1])
            noting.calls.append((averages, moments))
        for number, value in sorted(result.states.items()):
            component = self.component(self.plan.variables[number])
            with tf.device(component.device):
                component.assign(tf.cast(value, component.dtype))

    def component(self, variable: keras.Variable) -> tf.Variable:
        """The shard of a variable on this replica and rank."""
        return self.strategy.experimental_local_results(variable.value)[
            self._index
        ]

    def _read(self, variables, kind):
        """Values of variables, each read once and where it lives."""
        values = {}
        for stage in self.plan.stages:
            for variable in getattr(stage, variables):
                key = kind(self.plan.numbers[id(variable)])
                if key not in values:
                    component = self.component(variable)
                    with tf.device(component.device):
                        values[key] = component.read_value()
        return values

    def _zeros(self):
        if self.plan.schedule.microbatches_per_batch == 1:
            return {}
        zeros = {}
        for stage, device in zip(self.program.stages, self.devices):
            with tf.device(device):
                for key, spec in stage.sums.items():
                    # Not `tf.zeros`, a constant that stays on the device.
                    zeros[key] = tf.raw_ops.Empty(
                        shape=spec.shape, dtype=spec.dtype, init=True
                    )
        return zeros

    def _outputs(self, batch):
        if not self.reads_outputs:
            return []
        microbatches = batch.tensors.microbatches
        count, rows = len(microbatches), tf.shape(batch.inputs[0])[0]

        def join(key):
            slices = [m[key] for m in microbatches if key in m]
            if not slices or slices[0].shape.rank == 0:
                return slices[0] if slices else None
            joined = tf.concat(slices, axis=0)
            size = tf.shape(joined)[0]
            # Of fewer rows than microbatches each has one, which need not
            # count. With frames folded into the batch that is several here.
            return joined[: tf.where(rows < count, size // count * rows, size)]

        outputs, gathered = [], self.program.stages[-1].gathered
        graph = self.plan.graph
        for value, known in zip(graph.outputs, graph.functional.outputs):
            output, mask = join(keys.Activation(value)), join(keys.Mask(value))
            if value in gathered:
                output = rank_collectives.gather_from_ranks(
                    output, gathered[value]
                )
            # Stages of any number of rows do not know all sizes. Those that
            # Keras leaves open are the plan's, which takes a length.
            sizes = graph.specs[value].shape
            if graph.length is not None:
                sizes = [n if m else None for n, m in zip(sizes, known.shape)]
            if output.shape.rank != 0:
                output.set_shape([None, *sizes[1:]])
            if mask is not None:
                symbols.set_keras_mask(output, mask)
            outputs.append(output)
        return outputs

    def _gradients(self, tensors):
        """Gradients by variable number, summed over stages."""
        terms = {}
        for key, tensor in tensors.sums.items():
            terms.setdefault(key.number, []).append(tensor)
        gradients = {}
        for number, found in sorted(terms.items()):
            variable = self.plan.variables[number]
            with tf.device(self.devices[self.plan.homes[number]]):
                gradients[number] = tf.cast(tf.add_n(found), variable.dtype)
        return gradients

    def _states(self, tensors):
        return {
            key.number: tensors.states[keys.State(key.number)]
            for stage in self.program.stages
            for key in stage.outputs
            if isinstance(key, keys.NewState)
        }

    def _moments(self, tensors):
        found = []
        rows = [m[keys.ROWS] for m in tensors.microbatches]
        may_be_empty = any(tf.get_static_value(x) is None for x in rows)
        rows = tf.reshape(tf.stack(rows), [-1, 1, 1])
        for stage, device in zip(self.program.stages, self.devices):
            for key, layers in stage.batch_norms.items():
                with tf.device(device):
                    noted = tf.stack([m[key] for m in tensors.microbatches])
                    if may_be_empty:
                        # Not of a row that counts nothing.
                        noted = tf.where(rows > 0, noted, 0.0)
                    moments = batch_norm.combined(noted)
                    sizes = [num_channels for _, num_channels in layers]
                    split = tf.split(moments, sizes, axis=1)
                found += [(x, each) for (x, _), each in zip(layers, split)]
        return found
