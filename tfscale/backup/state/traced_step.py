"""State that only the traced steps of a `fit` and its validation lead to.

Global variables and those of closures are captured when Keras traces a step.
State in operations and Python functions of a step cannot be saved.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale._internals import attributes

# Variables of callbacks, which save their own state.
_OF_TFSCALE = "tfscale/"
# Operations that change what is in no variable.
_CHANGES = (
    *("LookupTableImport", "LookupTableInsert", "LookupTableRemove"),
    *("QueueDequeue", "QueueEnqueue", "StackPop", "StackPush"),
)
# Of random operations, of Python functions, and of iterators and tables.
_UNSAVED = (
    "BackupAndRestore does not save where random operations without a "
    "generator stand: after an interruption they restart. Received: %s. Give "
    "`keras.random` functions a `keras.random.SeedGenerator`, or draw from a "
    "`tf.random.Generator`.",
    "BackupAndRestore does not save what Python functions of a step keep: "
    "after an interruption they start again. Received: `tf.numpy_function` or "
    "`tf.py_function` at %s. Keep state in a `tf.Variable`.",
    "BackupAndRestore saves no iterators, tables and queues of a step: after "
    "an interruption they start again. Received: %s. Pass all data to `fit` in "
    "one dataset (`tf.data.Dataset.zip`), and keep state in a `tf.Variable`.",
)
_COPIES = re.compile(r"\b(replica_\d+|while)/")


def captured_variables(
    function: Any, known: set[int]
) -> Iterator[tuple[str, tf.Variable]]:
    """The variables that a step captured, with a name for each.

    A program that runs again creates them in the same order, also on another
    mesh: variables of one name are numbered. Those whose handles have ids in
    `known` are left out.
    """
    found = {}
    for concrete in _traced(function):
        for variable in attributes.variables_used_by(concrete):
            if id(variable.handle) not in known:
                variable = attributes.whole_of(variable)
                found[attributes.creation_number(variable)] = variable
    counts: dict[str, int] = {}
    for _, variable in sorted(found.items()):
        name = variable.name.partition(":")[0]
        if not name.startswith(_OF_TFSCALE):
            number = counts[name] = counts.get(name, -1) + 1
            yield f"captured/{name}/{number}", variable


def warn_of_unsaved_variables(model: keras.Model, known: set[int]) -> None:
    """Names variables that only the step of a validation leads to."""
    found = captured_variables(model.test_function, known)
    names = {repr(variable.name): None for _, variable in found}
    if names:
        logging.warning(
            "BackupAndRestore saves no variables that only the step of a "
            "validation uses and that are no attributes: after an interruption "
            "they start again. Received: %s. Make what changes an attribute "
            "of the model.",
            _few(names),
        )


def warn_of_unsaved(model: keras.Model, function: Any) -> None:
    """Names state of a step in operations and in Python."""
    if model.run_eagerly:
        logging.warning(
            "BackupAndRestore saves the variables that a traced step uses. "
            "Received: run_eagerly=True, with which only those are saved that "
            "attributes of the model lead to."
        )
    random: dict[str, None] = {}
    python: dict[str, None] = {}
    held: dict[str, None] = {}
    for concrete in _traced(function):
        if any(map(attributes.is_iterator, concrete.graph.external_captures)):
            held["an iterator that the step calls `next` on"] = None
        for node in _nodes(concrete.graph.as_graph_def()):
            name = repr(_COPIES.sub("", node.name))
            # Kernels of stateful random operations count what they draw.
            if "seed2" in node.attr and not node.op.startswith("CudnnRNN"):
                random[f"{node.op} at {name}"] = None
            elif node.op in ("EagerPyFunc", "PyFunc"):
                python[name] = None
            elif node.op.startswith(_CHANGES):
                held[f"{node.op} at {name}"] = None
    for text, names in zip(_UNSAVED, (random, python, held)):
        if names:
            logging.warning(text, _few(names))


def _traced(function):
    step = attributes.step_function(function)
    return [] if step is None else attributes.concrete_functions(step)


def _nodes(graph_def):
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _few(names):
    first = ", ".join(list(names)[:5])
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first
