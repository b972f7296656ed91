"""Draws a plan as text: a line for each device, a column for each round."""

from tfscale.collectives.planning.collective_plan import CollectivePlan


def as_text(plan: CollectivePlan) -> str:
    """A line for each device, a column for each round: what it gets.

    `3+0` is chunk 0 from device 3, which is added to the device's own; `3:0`
    is stored.

    Args:
        plan: What to draw.

    Example:

    >>> from tfscale.collectives.planning.algorithms import two_shot
    >>> print(as_text(two_shot("all_reduce", 3)))
    two_shot all_reduce: 3 devices, 3 chunks, 2 rounds
      device 0  1+0,2+0  2:2,1:1
      device 1  2+1,0+1  0:0,2:2
      device 2  0+2,1+2  1:1,0:0
    """
    cells = [
        [
            ",".join(
                f"{send.source}{'+' if send.adds else ':'}{send.chunk}"
                for send in sends
                if send.target == device
            )
            for sends in plan.rounds
        ]
        for device in range(plan.num_devices)
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    sizes = (
        _count(plan.num_devices, "device"),
        _count(plan.num_chunks, "chunk"),
        _count(plan.num_rounds, "round"),
    )
    lines = [f"{plan.name} {plan.operation}: {', '.join(sizes)}"]
    for device, row in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([f"  device {device}", *padded]).rstrip())
    return "\n".join(lines)


def _count(number, name):
    return f"{number} {name}{'' if number == 1 else 's'}"
