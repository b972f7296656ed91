"""Steps that are traced before a batch is there, for any number of rows."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from tfscale._internals import attributes
from tfscale._internals import datasets
from tfscale._internals import in_place
from tfscale._internals import releases


class TracedFunction(in_place.Mixin):
    """Members that are put before the class of a `tf.function`."""

    # Whether a call does not run it.
    is_only_traced = False

    def __call__(self, *args, **kwargs):
        """Runs the function, or only traces it and returns None."""
        if not self.is_only_traced:
            return super().__call__(*args, **kwargs)
        self.get_concrete_function(*args, **kwargs)
        return None


def trace(function: Callable[[Any], Any], element_spec: Any) -> None:
    """Traces the step of a train or test function, and does not run it.

    Args:
        function: What Keras calls with an iterator.
        element_spec: The spec of a batch, as `tf.data.Dataset.element_spec`.
    """
    step = attributes.step_function(function)
    if step is None:
        return

    batch = datasets.spec_of_batch(element_spec)
    in_place.put(step, TracedFunction, is_only_traced=True)
    try:
        # No iterator of tf.data, from which Keras would take a batch.
        function(itertools.repeat(batch))
    finally:
        step.is_only_traced = False


def for_any_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A train or test function that is traced once, for any number of rows.

    Keras does so until 3.15. Later it gives a step its batch, and a last batch
    of fewer rows is traced once more.
    """
    step = attributes.step_function(function)
    if releases.TRACES_ITERATORS or step is None:
        return function

    @functools.wraps(function)
    def call(iterator):
        spec = getattr(iterator, "element_spec", None)
        if spec is not None and not attributes.concrete_functions(step):
            trace(function, spec)
        return function(iterator)

    return call
