"""The transformations of a dataset, read from the objects of tf.data.

Nothing is serialized, so a dataset of large arrays costs no more than others.
"""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale._internals import datasets
from tfscale.graphs import random_operations

# Keras' random layers draw from a seed in a variable, and move that seed on.
_SEED_MOVES = ("AssignAddVariableOp", "AssignVariableOp")
_PYTHON = ("EagerPyFunc", "GeneratorDataset", "PyFunc")


class DatasetStage:
    """One transformation; `dataset` is the chain up to and with it.

    `kind` is a string like `"ParallelMap"`, `settings` a dict of integers,
    bools and strings like `{"batch_size": 2}`.
    """

    def __init__(
        self, dataset: tf.data.Dataset, inputs: "list[DatasetStage]"
    ) -> None:
        self.dataset = dataset
        self.inputs = inputs
        self.kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
        self.settings = datasets.settings_of(dataset)

    def is_a(self, *kinds: str) -> bool:
        """Whether the stage is of one of the kinds."""
        return self.kind in kinds

    @property
    def name(self) -> str:
        """The kind in words: `"parallel map"`."""
        words = (f" {c.lower()}" if c.isupper() else c for c in self.kind)
        return "".join(words).strip()

    @functools.cached_property
    def functions(self) -> list[Any]:
        """The nodes of each function of the stage, nested ones included."""
        return list(datasets.functions_of(self.dataset))

    @functools.cached_property
    def operations(self) -> list[str]:
        """Types of the operations in its functions, sorted."""
        return sorted({node.op for nodes in self.functions for node in nodes})

    @property
    def seeded_random(self) -> list[str]:
        """Operations that draw from a seed that they are given."""
        return list(filter(random_operations.draws_from_seed, self.operations))

    @property
    def stateful_random(self) -> list[str]:
        """Operations that draw from hidden state."""
        drawn = list(
            filter(random_operations.draws_from_state, self.operations)
        )
        if self.seeded_random:
            drawn.extend(op for op in self.operations if op in _SEED_MOVES)
        return sorted(drawn)

    @property
    def random(self) -> list[str]:
        """Operations that draw random numbers."""
        return self.stateful_random + self.seeded_random

    @property
    def python(self) -> list[str]:
        """Operations that call Python."""
        return [op for op in self.operations if op.startswith(_PYTHON)]


def stages_of(dataset: tf.data.Dataset) -> list[DatasetStage]:
    """All stages of a dataset; the inputs of a stage come before it."""
    found: dict[int, DatasetStage] = {}

    def visit(one):
        if id(one) not in found:
            inputs = [visit(each) for each in datasets.inputs_of(one)[::-1]]
            found[id(one)] = DatasetStage(one, inputs[::-1])
        return found[id(one)]

    visit(dataset)
    return list(found.values())


def chain_of(dataset: tf.data.Dataset) -> list[DatasetStage]:
    """The stages from the source to the dataset.

    A transformation of several datasets, such as `zip`, is a source.
    """
    stage = stages_of(dataset)[-1]
    chain = [stage]
    while len(stage.inputs) == 1:
        (stage,) = stage.inputs
        chain.append(stage)
    return chain[::-1]


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """The seeds of all random orders, such as those of shuffles.

    A shuffle without a seed has `(0, 0)`. Shuffles in functions count.
    """
    seeds = []
    for stage in stages_of(dataset):
        if "seed2" in stage.settings:
            seeds.append((stage.settings["seed"], stage.settings["seed2"]))
        for nodes in stage.functions:
            seeds += _seeds_in(nodes)
    return seeds


def batch_sizes(dataset: tf.data.Dataset) -> list[int]:
    """The sizes of batches."""
    settings = (stage.settings for stage in stages_of(dataset))
    return [each["batch_size"] for each in settings if "batch_size" in each]


def without_order(dataset: tf.data.Dataset) -> str | None:
    """The transformation that may change the order of the records, or None.

    Only generators, and maps with `deterministic=False`, are known to do so.
    """
    for stage in stages_of(dataset):
        if stage.settings.get("deterministic") == "false":
            return "a map with deterministic=False"
        if "GeneratorDataset" in stage.operations:
            return "a generator, or a `PyDataset`"
    return None


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Whether functions of Python compute what is in the records."""
    return any(stage.python for stage in stages_of(dataset))


def _seeds_in(nodes) -> Iterator[tuple[int, int]]:
    known = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in nodes
        if node.op == "Const"
    }
    for node in nodes:
        if node.op == "RandomShuffle":
            yield node.attr["seed"].i, node.attr["seed2"].i
        elif node.op.startswith("Shuffle"):
            # The inputs of a dataset: a dataset, the buffer's size, two seeds.
            seeds = [x.partition(":")[0] for x in node.input[2:4]]
            if all(seed in known for seed in seeds):
                yield int(known[seeds[0]]), int(known[seeds[1]])
