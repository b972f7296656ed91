"""The summary of a divided model: who has what, and what ranks exchange."""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable

import keras
import rich.console
import rich.markup
import rich.table
import tensorflow as tf

from tfscale.distribute import _tf_internals
from tfscale.formatting import colored
from tfscale.formatting import readable_bytes
from tfscale.tensor_parallel import analysis
from tfscale.tensor_parallel import sequence_report

# As `model.summary()` has it for models with branches.
_LINE_LENGTH = 108
_LEAST_LENGTH = 96
_WIDE = 10_000  # of the lines below the table, which are not wrapped


def sharding_summary(
    model: keras.Model,
    line_length: int | None = None,
    print_fn: Callable[[str], None] | None = None,
) -> None:
    """Prints how a model is divided over the model ranks of a mesh.

    One row for each layer with variables: by which rule it runs, the layout of
    each variable, the shape and the bytes that a device has of it, and what
    ranks exchange in one forward and backward. "gathered" is a layer without a
    rule, whose weights are put together where they are used. Below it: why
    outputs do not stay divided, layouts that are not as they were asked for,
    and bytes per device.

    Args:
        model: A built model, made in the scope of a `tfscale.MeshStrategy`
            with a model axis, or with `zero_stage=1`. Layers that have not
            been called on ranks yet are analysed now, with the warnings that
            this may give.
        line_length: Columns of the table. Defaults to 108, or to the width
            of the terminal if that is less.
        print_fn: What to call with the text, as in `keras.Model.summary`.

    Raises:
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
    line_length = line_length or _default_length()
    if line_length < _LEAST_LENGTH:
        raise ValueError(
            "A summary needs room for its columns. Received: "
            f"line_length={line_length}. Use {_LEAST_LENGTH} or more."
        )
    extended = _extended(model)
    _analyse(model, extended.num_model_ranks)
    if print_fn is None:
        console = rich.console.Console(width=_WIDE, highlight=False)
        _render(console, model, extended, line_length)
        return
    console = rich.console.Console(
        width=_WIDE, highlight=False, force_terminal=False, color_system=None
    )
    with console.capture() as capture:
        _render(console, model, extended, line_length)
    print_fn("\n".join(line.rstrip() for line in capture.get().splitlines()))


@dataclasses.dataclass(frozen=True)
class _Variable:
    """What a device has of a variable."""

    name: str
    layout: str
    shape: tuple[int, ...]
    num_bytes: int
    whole_bytes: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """What there is to say of a layer."""

    path: str
    how: str
    variables: list[_Variable]
    exchanged: tuple[str, ...]
    reason: str | None


def _extended(model):
    for variable in model.variables:
        strategy = getattr(variable.value, "distribute_strategy", None)
        extended = getattr(strategy, "extended", None)
        if getattr(extended, "num_model_ranks", 1) > 1 or (
            hasattr(extended, "slot_parts") and extended.slot_parts.are_divided
        ):
            return extended
    raise ValueError(
        "A sharding summary is of a built model on a mesh with a 'model' axis, "
        f"or with zero_stage=1. Received: {model.name!r}, whose variables have "
        "no model ranks. Build it in the scope of a `tfscale.MeshStrategy` "
        "whose mesh has a 'model' axis larger than 1."
    )


def _plan(model, extended):
    """What of the model is divided along the sequence, if something is."""
    if not extended.sequence_parallel or extended.num_model_ranks == 1:
        return None
    return sequence_report.plan_of(model, extended.num_model_ranks)


def _analyse(model, num_ranks):
    """Analyses what is not, as the first call on ranks would."""
    if isinstance(model, _tf_internals.Functional | keras.Sequential):
        calls = analysis.sharded_calls(model)
        if any(call.rule and not call.is_decided for call in calls):
            analysis.analyse(model, num_ranks)
        return
    for layer in model._layers:
        _analyse(layer, num_ranks)


def _rows(model, plan):
    seen = set()
    for layer in model._flatten_layers():
        own = [
            variable
            for variable in (
                *layer._trainable_variables,
                *layer._non_trainable_variables,
            )
            if id(variable) not in seen
        ]
        seen.update(map(id, own))
        call = getattr(layer, "_sharded_call", None)
        if not own and (call is None or call.rule is None):
            continue
        variables = [_variable(v) for v in own]
        sharded = any(v.num_bytes < v.whole_bytes for v in variables)
        path = own[0].path.rpartition("/")[0] if own else layer.name
        row = _Row(path, variables=variables, **_how(call, sharded, variables))
        if plan is not None:
            names = sequence_report.exchanged(layer, row.exchanged, plan)
            row = dataclasses.replace(row, exchanged=names)
        yield row


def _variable(variable):
    value = variable._value
    shape = tuple(variable.shape)
    split_dim = getattr(value, "split_dim", None)
    layout, local = "replicated", tuple(value.values[0].shape)
    if split_dim is not None:
        axes = ["None"] * len(shape)
        axes[split_dim] = "model"
        layout = f"({', '.join(axes)}{',' * (len(axes) == 1)})"
    size = tf.as_dtype(variable.dtype).size
    return _Variable(
        variable.name,
        layout,
        local,
        math.prod(local) * size,
        math.prod(shape) * size,
    )


def _how(call, sharded, variables):
    if call is None or not (sharded or call.rule):
        return dict(how="replicated", exchanged=(), reason=None)
    rule = call.rule
    if rule is None:
        missing = sum(v.whole_bytes - v.num_bytes for v in variables)
        return dict(
            how="gathered",
            exchanged=(f"all-gather of weights, {readable_bytes(missing)}",),
            reason=None,
        )
    how, reason = _kind(rule), call.reason
    if "all-gather of the output" in rule.collectives or rule.keeps:
        how += "\noutput divided" if rule.keeps else "\noutput gathered"
        if not rule.keeps and reason is None:
            reason = (
                "its activation needs the whole, or it asks for it"
                if call.is_decided
                else "it is called by code that is not looked into, and not "
                "in a functional or sequential model"
            )
    return dict(how=how, exchanged=rule.collectives, reason=reason)


def _kind(rule):
    if rule.passes:
        return "local"
    if isinstance(rule.layer, keras.layers.Embedding):
        by_rows = rule.layer._embeddings._value.split_dim == 0
        return "vocabulary-parallel" if by_rows else "column-parallel"
    return "row-parallel" if rule.source_dim is None else "column-parallel"


def _render(console, model, extended, line_length):
    plan = _plan(model, extended)
    rows = list(_rows(model, plan))
    ranks = extended.num_model_ranks
    name = rich.markup.escape(model.name)
    console.print(
        f'[bold]Sharding: "{name}"[/] on {colored(ranks)} model ranks'
    )
    console.print(_table(rows, line_length))
    for row in rows:
        if row.reason:
            _line(console, f"Gathered, {row.path}", row.reason)
    if plan is not None:
        _line(console, *sequence_report.line(plan, ranks))
    ignored = extended.layouts.ignored
    if ignored:
        _line(
            console,
            "Replicated over the data axis, which their layouts name",
            ", ".join(ignored),
        )
    variables = [v for row in rows for v in row.variables]
    _totals(console, "Bytes per device", variables, ranks, 1)
    optimizer = getattr(model, "optimizer", None)
    # Before the first step it has no slots yet.
    if optimizer is not None and optimizer.built:
        slots = [_variable(v) for v in optimizer.variables]
        replicas = extended.slot_parts.num_replicas
        _totals(console, "Optimizer", slots, ranks, replicas)


def _totals(console, title, variables, ranks, replicas):
    whole = sum(v.whole_bytes for v in variables)
    over = [
        f"{colored(count)} {what}"
        for count, what in ((ranks, "ranks"), (replicas, "replicas"))
        if count > 1
    ] or [f"{colored(1)} device"]
    console.print(
        f"[bold] {title}:[/] "
        f"{colored(readable_bytes(sum(v.num_bytes for v in variables)))} of "
        f"{colored(readable_bytes(whole))} (ideal for {' of '.join(over)}: "
        f"{colored(readable_bytes(whole / ranks / replicas))})",
        soft_wrap=True,
    )


def _line(console, title, text):
    console.print(
        f"[bold] {rich.markup.escape(title)}:[/] {rich.markup.escape(text)}",
        soft_wrap=True,
    )


def _table(rows, line_length):
    column = functools.partial(
        rich.table.Column, no_wrap=True, overflow="ellipsis"
    )
    table = rich.table.Table(
        rich.table.Column("Layer", ratio=1, min_width=20, overflow="fold"),
        column("Variable"),
        column("Layout"),
        column("Shard", justify="right"),
        column("Bytes", justify="right"),
        rich.table.Column("Exchanged", ratio=1, min_width=16),
        width=line_length,
        show_lines=True,
    )
    for row in rows:
        variables = row.variables
        table.add_row(
            f"[bold]{rich.markup.escape(row.path)}[/]\n{row.how}",
            "\n".join(rich.markup.escape(v.name) for v in variables),
            "\n".join(v.layout for v in variables),
            "\n".join(colored(v.shape) for v in variables),
            "\n".join(colored(readable_bytes(v.num_bytes)) for v in variables),
            "\n".join(row.exchanged),
        )
    return table


def _default_length():
    columns = shutil.get_terminal_size().columns - 4
    return max(_LEAST_LENGTH, min(_LINE_LENGTH, columns))
