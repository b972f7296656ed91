"""The planner's table of a Keras model, whose variables get no values."""

import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

import keras

from tfscale.pipeline.stages import memory
from tfscale.pipeline.stages.call_costs import cut_bytes
from tfscale.pipeline.stages.plan import make_plan
from tfscale.planner.layers import LARGE_WEIGHT
from tfscale.planner.layers import Layer
from tfscale.planner.layers import ModelTable
from tfscale.planner.layers import Work
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.tensor_parallel.layouts.auto_layout import build_aside
from tfscale.tensor_parallel.layouts.layout_search import LayoutPlan
from tfscale.tensor_parallel.layouts.layout_search import plan_layouts


def trace_table(
    build_model: Callable[[], keras.Model],
    ranks: Iterable[int],
    length: int | None = None,
) -> ModelTable:
    """Builds a model without values, and traces each of its layers.

    The table has the layers for one model rank, and for each number in `ranks`
    of model ranks that can divide weights. Sizes that inputs leave open count
    as `length`.
    """
    if not callable(build_model) or isinstance(build_model, keras.Layer):
        raise TypeError(
            "`build_model` must be a function of no arguments that returns a "
            f"`keras.Model`. Received: {build_model!r}. Put the code that "
            "builds the model into a function."
        )

    def trace():
        # Keras would make all values at the end of this scope, or of the
        # next one in this thread. The thread ends before that.
        with keras.StatelessScope(initialize_variables=False):
            return _Tracer(_build(build_model), length).table(ranks)

    return build_aside(trace)


def _build(build_model):
    try:
        return build_model()
    except ValueError as error:
        if "in a stateless scope" not in str(error):
            raise
        raise ValueError(
            "`build_model` must create variables without values. Received: a "
            "function that creates a variable of a value, as optimizers and "
            "`compile` do. Call `compile` after `plan`, and create variables "
            "by `add_weight` with a shape and an initializer."
        ) from error


class _Tracer:
    def __init__(self, model, length):
        if not isinstance(model, keras.Model):
            raise TypeError(
                "`build_model` must return a `keras.Model`. Received: "
                f"{model!r}."
            )
        if not model.built or not model.variables:
            raise ValueError(
                "`build_model` must return a built model. Received: "
                f"{model.name!r}, which has no weights yet. Begin it with "
                "`keras.Input`, or call it on one."
            )
        self.model, self.notes = model, []
        try:
            plan = make_plan(model, one_f_one_b(1, 2), "flops", length=length)
        except ValueError as error:
            self.notes.append(f"Planned without stages: {error}")
            plan = make_plan(
                _as_one_call(model), one_f_one_b(1, 1), "flops", length=length
            )
        self.can_be_cut = not self.notes
        self.graph = plan.graph
        if length is None:
            self._check_sizes()
        self.flops, self.backward, _ = plan.call_costs
        self.cut_bytes = cut_bytes(self.graph)
        # Bytes that do not double with the rows are kept once.
        one, two = (
            memory.call_memory(self.graph, rows, grappler=False)
            for rows in (1, 2)
        )
        self.internal = [b.internal - a.internal for a, b in zip(one, two)]
        self.kept_once = [
            max(2 * a.internal - b.internal, 0) for a, b in zip(one, two)
        ]
        self.drawn = [b.drawn - a.drawn for a, b in zip(one, two)]
        self.kept_values = set().union(*(each.values for each in one))

    def _check_sizes(self):
        shapes = [self.graph.specs[v].shape for v in self.graph.inputs]
        # Where layers take it, a length of nobody's choice stands for others.
        if self.graph.length is None and all(None not in s[1:] for s in shapes):
            return
        raise ValueError(
            "The planner needs all sizes but the batch. Received: "
            f"{self.model.name!r}, whose inputs leave sizes open, and "
            "length=None. Pass the number of tokens of an example, or the "
            "height and width of an image, as `length`."
        )

    def table(self, ranks: Iterable[int]) -> ModelTable:
        """The table for each number of ranks that divide weights."""
        by_ranks = {}
        for size in ranks:
            split_dims = self._split_dims(size)
            if size == 1 or split_dims:
                by_ranks[size] = tuple(self._layers(size, split_dims))
        if list(by_ranks) == [1] and list(ranks) != [1]:
            self.notes.append(
                "Planned without model ranks: `auto_layout_map` finds no "
                "weight that they can divide."
            )
        largest = max(range(len(self.flops)), key=self.flops.__getitem__)
        output = self.graph.calls[largest].outputs[0]
        inputs = self.graph.specs[self.graph.inputs[0]]
        is_tokens = len(inputs.shape) == 2 and "int" in inputs.dtype
        return ModelTable(
            self.model.name,
            by_ranks,
            flops=float(sum(self.flops)),
            num_weights=sum(math.prod(v.shape) for v in self.model.weights),
            tokens=inputs.shape[1] if is_tokens else None,
            is_half="float16" in self.graph.specs[output].dtype,
            can_be_cut=self.can_be_cut,
            notes=tuple(self.notes),
        )

    def _split_dims(self, size):
        """The dim that ranks divide, by the path of a variable."""
        if size == 1:
            return {}
        plan = LayoutPlan(size)
        plan_layouts(self.model, plan)
        layouts = plan.layouts(self.model)
        return {path: axes.index("model") for path, axes in layouts.items()}

    def _layers(self, size, split_dims) -> Iterator[Layer]:
        graph, divided, counted = self.graph, set(), set()
        kept = set(self.kept_values)

        def num_bytes(values):
            """Bytes on a rank, and the part that a divided sequence divides."""
            whole = set(values) - divided
            sequence = {v for v in whole if self._has_sequence(v, size)}
            total = self._bytes(values) - self._bytes(whole)
            return total / size + self._bytes(whole), self._bytes(sequence)

        for index, call in enumerate(graph.calls):
            # The first call of a shared layer counts its weights.
            variables = {id(v): v for v in call.variables}
            split = [v for v in variables.values() if v.path in split_dims]
            dims = [split_dims[v.path] for v in split if "bias" not in v.name]
            # Ranks sum the outputs of kernels that are divided along their
            # inputs, and the gradients of the inputs of others.
            num_sums, has_columns = dims.count(0), any(dims)
            num_shards = size if split else 1
            if (has_columns and not num_sums) or (
                not variables and divided.issuperset(call.inputs)
            ):
                divided.update(call.outputs)
            # Ranks gather the logits for the loss.
            is_last = call is graph.calls[-1]
            gathered = has_columns and not num_sums and is_last
            last_used = {*call.outputs, *call.inputs} & kept
            kept -= last_used
            kept_bytes, kept_undivided = num_bytes(
                last_used | set(graph.outputs) if is_last else last_used
            )
            if gathered:  # the loss keeps them whole
                kept_bytes += self._bytes(call.outputs) * (1 - 1 / size)
            moved, moved_undivided = num_bytes(call.outputs)
            internal = self.internal[index] / num_shards
            forward = Work(
                self.flops[index] / num_shards,
                float(self._has_product(index)),
                internal + moved,
                moved_undivided,
                self._bytes(call.outputs) * (num_sums + gathered / 2),
                num_sums + gathered,
                self.drawn[index] / num_shards,
            )
            # The loss writes probabilities, a gradient, and scales that.
            loss = 3 * self._bytes(graph.outputs) if is_last else 0
            times = self.backward[index] / max(self.flops[index], 1)
            sums = max(num_sums, 1) * (has_columns and times > 0)
            backward = Work(
                times * forward.flops,
                times * forward.products,
                forward.moved * bool(times) + loss,
                moved_undivided * bool(times),
                self._bytes(call.inputs[:1]) * sums,
                sums,
            )
            sizes: dict[bool, list[float]] = {True: [], False: []}
            for key in variables.keys() - counted:
                v = variables[key]
                ranks = size if v.path in split_dims else 1
                sizes[v.trainable].append(math.prod(v.shape) / ranks)
            counted.update(variables)
            yield Layer(
                call.name,
                forward,
                backward,
                trainable=sum(sizes[True]),
                large=sum(n for n in sizes[True] if n >= LARGE_WEIGHT),
                largest=max(sizes[True], default=0),
                frozen=sum(sizes[False]),
                kept=internal + kept_bytes,
                undivided=kept_undivided,
                kept_once=self.kept_once[index] / num_shards,
                cut_bytes=self.cut_bytes[index],
            )

    def _has_product(self, index):
        """Whether a layer does more than some FLOPs for each output."""
        outputs = self.graph.calls[index].outputs
        shapes = (self.graph.with_rows(v, 1).shape for v in outputs)
        return self.flops[index] > 2 * sum(map(math.prod, shapes))

    def _has_sequence(self, value, size):
        """Whether ranks may divide a tensor along its sequence."""
        shape = self.graph.specs[value].shape
        return size > 1 and len(shape) == 3 and shape[1] % size == 0

    def _bytes(self, values):
        return memory.value_bytes(self.graph, values, 1)


def _as_one_call(model):
    """A functional model that calls a model with a `call` of its own."""
    built_for = model.get_build_config() or {}
    if "input_shape" not in built_for:
        raise ValueError(
            "A model with a `call` of its own must be built by a call on one "
            "`keras.Input`, or on a list or dict of them. Received: "
            f"{model.name!r}, built for {built_for!r}."
        )
    inputs = keras.tree.map_shape_structure(
        lambda shape: keras.Input(shape[1:], dtype=model.input_dtype),
        built_for["input_shape"],
    )
    flat = keras.tree.flatten(inputs)  # their names need not be keys
    return keras.Model(flat, model(inputs), name=model.name)
