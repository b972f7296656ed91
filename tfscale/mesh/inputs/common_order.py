"""Checks that all workers read the same dataset in the same order.

Where TensorFlow divides a dataset over workers, each worker reads all of it and
keeps its shard. If workers shuffle by different seeds, some records are read
twice and others never: two workers with arrays and `shuffle=True` saw 49 of 64
rows.
"""

import tensorflow as tf

from tfscale._internals import datasets
from tfscale.cluster.coordination import Coordination
from tfscale.graphs import dataset_graph

_OFF = tf.data.experimental.AutoShardPolicy.OFF


def check(dataset: tf.data.Dataset, coordination: Coordination) -> None:
    """Raises a ValueError if workers are known to have different datasets.

    They may differ in seeds, batches or length, or have no fixed order.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    fact = f"{dataset.element_spec}, {int(dataset.cardinality())} batches"
    if policy != _OFF:
        reason = dataset_graph.without_order(dataset)
        if dataset.options().deterministic is False:
            reason = "the option `deterministic` set to False"
        if reason:
            raise ValueError(
                "A dataset that workers divide must have the same order in "
                "all of them, or some records are seen twice and others "
                f"never. Received: {reason}. Give each worker other records, "
                "by `strategy.distribute_datasets_from_function`."
            )
        seeds = dataset_graph.shuffle_seeds(dataset)
        if any(seed == (0, 0) for seed in seeds):
            raise ValueError(
                "A dataset that workers divide must be shuffled by the same "
                "seed in all of them, or some records are seen twice and "
                "others never. Received: a shuffle without one. Pass `seed=` "
                "to `shuffle`; call `keras.utils.set_random_seed` with the "
                "same seed in all workers; pass shuffle=False to `fit`; use "
                "`tfscale.data`; or give each worker other records, by "
                "`strategy.distribute_datasets_from_function`."
            )
        sizes = dataset_graph.batch_sizes(dataset)
        fact += f", batched by {sizes}, seeds of shuffles {seeds}"
    facts = {"dataset": fact, "order of `tfscale.data`": of_pipelines(dataset)}
    coordination.check_same("dataset", facts)


def has_position(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a pipeline of `tfscale.data`."""
    return hasattr(dataset, "position") and hasattr(dataset, "batches_left")


def of_pipelines(dataset: tf.data.Dataset, *, of_all: bool = True) -> str:
    """The arguments that determine the order of records of `tfscale.data`.

    `of_all` is False for those that a worker has for itself, without an
    `input_context`: they count only if they know of other workers.
    """
    if not has_position(dataset):
        inputs = datasets.inputs_of(dataset)
        found = (of_pipelines(each, of_all=of_all) for each in inputs)
        return "; ".join(filter(None, found))
    recipe = dataset.recipe
    plan = recipe.plan
    if not of_all and max(plan.num_workers, plan.lines) == 1:
        return ""
    return (
        f"{plan.limit} records, {plan.global_batch} in a step, of "
        f"{plan.num_workers} workers, remainder={plan.remainder!r}, "
        f"shuffle={recipe.shuffle}, {dataset.position.value}"
    )
