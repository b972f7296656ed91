"""Collectives in NumPy: what they give, and plans played through with arrays.

Written apart from the package's own code, with a plan's numbers only.
"""

import numpy as np

from tfscale import collectives
from tfscale.collectives.planning import algorithms
from tfscale.collectives.planning.contents import OPERATIONS

SHARDED = ("reduce_scatter", "all_gather")


def ring(operation, num_devices):
    """A plan of one's own, of many rounds: each sends to the next one."""
    devices = range(num_devices)

    def rounds(first, sign):
        return [
            [
                f"{d}>{(d + 1) % num_devices}{sign}"
                f"{(d - number - first) % num_devices}"
                for d in devices
            ]
            for number in range(num_devices - 1)
        ]

    sums, gather = rounds(1, "+"), rounds(0, ":")
    return collectives.CollectivePlan(
        operation,
        num_devices,
        num_devices,
        {
            "reduce_scatter": sums,
            "all_gather": gather,
            "all_reduce": sums + gather,
        }[operation],
        name="ring",
    )


def plans(num_devices):
    """All algorithms and operations for a number of devices."""
    made = []
    for operation in OPERATIONS:
        if operation != "reduce":
            made.append(ring(operation, num_devices))
        made.append(collectives.direct(operation, num_devices))
        made += [
            collectives.hierarchical(
                operation, num_devices, devices_per_machine=size
            )
            for size in range(1, num_devices + 1)
            if num_devices % size == 0
        ]
    for make in (collectives.two_shot, algorithms.parameter_server):
        made.append(make("all_reduce", num_devices))
    return made


def inputs(plan, columns=3, seed=0, integers=True):
    """An array for each device, with rows that chunks divide."""
    random = np.random.RandomState(seed)
    rows = plan.num_devices
    if plan.operation == "all_gather":
        rows = 2
    shape = (plan.num_devices, rows, columns)
    if integers:
        return random.randint(-50, 50, shape).astype("float32")
    return random.normal(size=shape).astype("float32")


def expected(plan, x):
    """What the operation promises, by device; `None` for nothing."""
    total = x.sum(axis=0)
    joined = np.concatenate(list(x), axis=0)
    devices = range(plan.num_devices)
    if plan.operation == "all_reduce":
        return [total for _ in devices]
    if plan.operation == "all_gather":
        return [joined for _ in devices]
    if plan.operation == "reduce_scatter":
        return np.split(total, plan.num_devices, axis=0)
    return [None if device else total for device in devices]


def play(plan, x):
    """What a plan gives, by its sends alone.

    Returns:
        By device, its result.
    """
    shape = x.shape[1:]
    have = {}
    for device, array in enumerate(x):
        if plan.operation == "all_gather":
            have[device, device] = array
        elif plan.operation == "reduce_scatter":
            for chunk, part in enumerate(np.split(array, plan.num_chunks)):
                have[device, chunk] = part
        else:
            parts = np.array_split(array.ravel(), plan.num_chunks)
            for chunk, part in enumerate(parts):
                have[device, chunk] = part
    for sends in plan.rounds:
        before, adding = dict(have), {}
        for send in sends:
            arriving = before[send.source, send.chunk]
            if send.adds:
                place = send.target, send.chunk
                adding.setdefault(place, []).append((send.source, arriving))
            else:
                have[send.target, send.chunk] = arriving
        for place, of in adding.items():
            of.append((place[0], before[place]))
            of.sort(key=lambda pair: pair[0])
            total = of[0][1]
            for _, part in of[1:]:
                total = total + part
            have[place] = total
    results = []
    for device in range(plan.num_devices):
        if plan.operation == "reduce" and device:
            results.append(None)
        elif plan.operation == "reduce_scatter":
            results.append(have[device, device])
        else:
            parts = [have[device, chunk] for chunk in range(plan.num_chunks)]
            whole = np.concatenate(parts, axis=0)
            is_parted = plan.operation in SHARDED
            results.append(whole if is_parted else whole.reshape(shape))
    return results
