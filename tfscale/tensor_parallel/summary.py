"""The summary of a sharded model: shards, and exchanges between ranks."""

import collections
import math
from collections.abc import Callable
from itertools import starmap

import keras
import rich.markup
import rich.table

from tfscale.formatting import colored
from tfscale.formatting import print_table
from tfscale.formatting import readable_bytes
from tfscale.formatting import table_length
from tfscale.step_memory import update_bytes
from tfscale.step_memory import whole_step_peak
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import sharding_rows
from tfscale.variables import gather_window
from tfscale.variables.of_variable import sharding_of

_LEAST_LENGTH = 64
_LAYER, _EXCHANGED = 20, 16  # The least number of columns of these.


def sharding_summary(
    model: keras.Model,
    line_length: int | None = None,
    print_fn: Callable[[str], None] | None = None,
) -> None:
    """Prints how a model is sharded over the replicas and ranks of a mesh.

    One row for each layer with variables: by which rule it runs, the layout of
    each variable, the shape and the bytes that a device has of it, and what
    ranks exchange in one forward and backward. "gathered" is a layer without a
    rule, whose weights are gathered where they are used. Below it: why
    outputs do not stay sharded, layouts that are not as they were asked for,
    bytes per device at rest and at the peak of a step, and what a device sends.

    Args:
        model: A built model, made in the scope of a `tfscale.MeshStrategy`
            with several replicas or model ranks, or with `offload`. Layers that
            have not been called on ranks yet are analyzed now, with the
            warnings that this may give.
        line_length: Columns of the table. Defaults to 108, or to the width
            of the terminal if that is less.
        print_fn: Called with the text, as in `keras.Model.summary`.

    Raises:
        TypeError: If it is no model.
        ValueError: If the model was not made on such a mesh, or
            `line_length` is too small for a table.

    Example:

    >>> import keras
    >>> import tfscale
    >>> tfscale.use_virtual_devices(8)
    >>> layouts = {".*up/kernel": (None, "model"),
    ...            ".*down/kernel": ("model", None)}
    >>> mesh = tfscale.device_mesh(model=2)
    >>> with tfscale.MeshStrategy(mesh, layouts).scope():
    ...     x = keras.Input((8,))
    ...     y = keras.layers.Dense(32, activation="relu", name="up")(x)
    ...     model = keras.Model(x, keras.layers.Dense(8, name="down")(y))
    >>> lines = []
    >>> tfscale.sharding_summary(model, print_fn=lines.append)
    >>> print(lines[0].splitlines()[-1])
     Bytes per device: 1.16 KB of 2.16 KB (ideal for 2 ranks: 1.08 KB)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`sharding_summary` needs a `keras.Model`. Received: {model!r}. "
            "Pass a model that was built in the scope of a "
            "`tfscale.MeshStrategy`."
        )
    line_length = table_length(line_length, _LEAST_LENGTH)
    extended = _extended(model)
    ranks, plan = extended.num_model_ranks, None
    _analyze(model, ranks)
    if extended.sequence_parallel and ranks > 1:
        plan = sharding_rows.plan_of(model, ranks)
    rows = sharding_rows.rows(model, plan)
    on = f"{colored(ranks)} model ranks"
    if ranks == 1:
        count = extended.num_replicas
        on = f"{colored(count)} replica{'s' * (count > 1)}"
    print_table(
        f'[bold]Sharding: "{rich.markup.escape(model.name)}"[/] on {on}',
        _table(rows, line_length),
        _lines(model, extended, rows, plan),
        line_length,
        print_fn,
    )


def _extended(model):
    for variable in model.variables:
        strategy = getattr(variable.value, "distribute_strategy", None)
        extended = getattr(strategy, "extended", None)
        if hasattr(extended, "optimizer_states") and (
            extended.num_replicas * extended.num_model_ranks > 1
            or extended.optimizer_states.are_on_host
        ):
            return extended
    raise ValueError(
        "`sharding_summary` needs a built model on a mesh with a 'data' or "
        "'model' axis larger than 1, or with offload. Received: "
        f"{model.name!r}, whose variables are on one device. Build it in the "
        "scope of a `tfscale.MeshStrategy` for such a mesh."
    )


def _analyze(model, num_ranks):
    for call in analysis.sharded_calls(model):
        if call.rule is not None:
            call.rule.reset()
    for functional in analysis.functional_models(model):
        if any(call.rule for call in analysis.sharded_calls(functional)):
            analysis.ensure_analyzed(functional, num_ranks)


def _lines(model, extended, rows, plan):
    """The titles and texts of the lines below the table."""
    ranks = extended.num_model_ranks
    plain = [
        (f"Gathered, {row.path}", row.reason) for row in rows if row.reason
    ]
    if plan is not None:
        plain.append(sharding_rows.sequence_line(plan, ranks))
    if extended.layouts.ignored:
        plain.append(
            (
                "Replicated over the data axis, which their layouts name",
                ", ".join(extended.layouts.ignored),
            )
        )
    for title, text in plain:
        yield rich.markup.escape(title), rich.markup.escape(text)
    variables = [sharding for row in rows for _, sharding in row.variables]
    states = extended.optimizer_states
    divides = states.are_weights_sharded
    replicas = states.num_replicas if divides else 1
    yield "Bytes per device", _totals(variables, ranks, replicas)
    gathers = _gathers(model, extended)
    if gathers:
        size = readable_bytes(states.max_gathered_bytes)
        yield "Gathered at a time", f"at most {colored(size)}"
        times = collections.Counter(stay.gather for stay in gathers)
        yield (
            "Gathered for the forward, and kept for the backward",
            ", ".join(name for name, count in times.items() if count == 1),
        )
    if extended.num_replicas > 1:
        yield (
            "Sent by a device in a step",
            _sent_text(model, extended, gathers),
        )
    optimizer = getattr(model, "optimizer", None)
    # Before the first step the optimizer has no slots.
    if optimizer is not None and optimizer.built:
        slots = [sharding_of(v) for v in optimizer.variables]
        yield (
            f"Optimizer{', on the host (CPU:0)' * states.are_on_host}",
            _totals(slots, ranks, states.num_replicas),
        )
        on_device = variables + slots * (not states.are_on_host)
        peak = sum(sharding.local_bytes for sharding in on_device)
        peak += _gradient_bytes(model, optimizer, extended)
        yield (
            "A device at the peak of a step",
            f"about {colored(readable_bytes(peak))}, and activations",
        )


def _gathers(model, extended):
    """The stays of gathered weights in a step, in the order of layers."""
    states = extended.optimizer_states
    sizes = {
        variable.path: sharding_of(variable).shard_bytes
        for variable in model.trainable_variables
        if sharding_of(variable).data_dim is not None
    }
    return gather_window.stays(sizes, states.max_gathered_bytes)


def _sent_text(model, extended, gathers):
    """Weights are gathered once or twice, gradients reduced and scattered."""
    stage, count = extended.optimizer_states.stage, extended.num_replicas
    times = collections.Counter(stay.gather for stay in gathers)
    num_bytes = sum(
        # An all-reduce counts as a reduce-scatter and a gather.
        (1 + times.get(variable.path, 1)) * sharding_of(variable).shard_bytes
        for variable in model.trainable_variables
    )
    of_it = {2: ", half of it", 3: ","}.get(stage)
    return (
        f"{colored(readable_bytes(num_bytes * (count - 1) / count))} over "
        f"{colored(count)} replicas"
        + ("" if of_it is None else f"{of_it} in each microbatch")
    )


def _gradient_bytes(model, optimizer, extended):
    """Bytes of gradients, updates and gathered weights at the peak."""
    states = extended.optimizer_states
    shardings = [sharding_of(v) for v in model.trainable_variables]
    gradients = [sharding.shard_bytes for sharding in shardings]
    # A norm or a check needs all gradients, and all of them wait for it.
    needs_all = getattr(optimizer, "global_clipnorm", None) or hasattr(
        optimizer, "inner_optimizer"
    )
    divides = states.are_weights_sharded
    waits = 1 if divides else extended.num_replicas
    moment = whole_step_peak(
        kept=[0] * len(shardings),
        working=gradients,
        gradients=[sharding.local_bytes for sharding in shardings],
        updates=[
            update_bytes(each, states.num_replicas, gathers=not divides)
            for each in gradients
        ],
        num_replicas=math.inf if needs_all else waits,
    )
    return int(sum(moment)) + divides * states.max_gathered_bytes


def _totals(shardings, ranks, replicas):
    whole = sum(sharding.num_bytes for sharding in shardings)
    local = sum(sharding.local_bytes for sharding in shardings)
    over = [
        f"{colored(count)} {what}"
        for count, what in ((ranks, "ranks"), (replicas, "replicas"))
        if count > 1
    ] or [f"{colored(1)} device"]
    return (
        f"{colored(readable_bytes(local))} of "
        f"{colored(readable_bytes(whole))} (ideal for {' of '.join(over)}: "
        f"{colored(readable_bytes(whole / ranks / replicas))})"
    )


def _table(rows, line_length):
    # All but the other columns, borders and spaces.
    width = line_length - _LAYER - _EXCHANGED - 10
    table = rich.table.Table(
        rich.table.Column("Layer", ratio=1, min_width=_LAYER, overflow="fold"),
        rich.table.Column(
            "Variable, on a device", overflow="fold", max_width=width
        ),
        rich.table.Column("Exchanged", ratio=1, min_width=_EXCHANGED),
        width=line_length,
        show_lines=True,
    )
    for row in rows:
        table.add_row(
            f"[bold]{rich.markup.escape(row.path)}[/]\n{row.how}",
            "\n".join(starmap(_variable, row.variables)),
            "\n".join(row.exchanged),
        )
    return table


def _variable(name, sharding):
    return (
        f"{rich.markup.escape(name)} {sharding_rows.layout_of(sharding)}\n"
        f"  {colored(sharding.local_shape)}, "
        f"{colored(readable_bytes(sharding.local_bytes))}"
    )
