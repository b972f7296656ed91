"""Measured steps beside predicted ones."""

import numpy as np


def spread(plans, number):
    """So many of the plans, evenly from the fastest to the slowest."""
    places = np.linspace(0, len(plans) - 1, number).round().astype(int)
    return [plans[place] for place in places]


def print_table(plans, seconds, extra=()):
    """Prints plans, seconds of their steps, and how well their order agrees.

    Args:
        plans: The plans; the first is the one that the planner picks.
        seconds: Of a measured step of each.
        extra: Functions of a plan's place that return a further column.
    """
    print("| plan | predicted | measured | ratio |" + " |" * len(extra))
    print("|---|---|---|---|" + "---|" * len(extra))
    for place, (plan, measured) in enumerate(zip(plans, seconds, strict=True)):
        cells = [
            str(plan.settings),
            f"{1e3 * plan.step_seconds:.0f} ms",
            f"{1e3 * measured:.0f} ms",
            f"{measured / plan.step_seconds:.2f}",
            *(column(place) for column in extra),
        ]
        print(f"| {' | '.join(cells)} |")
    predicted = [plan.step_seconds for plan in plans]
    correlation = np.corrcoef(_ranks(predicted), _ranks(seconds))[0, 1]
    print(
        f"Rank correlation {correlation:.3f}; the picked plan takes "
        f"{seconds[0] / min(seconds):.3f} of the fastest."
    )


def _ranks(values):
    """The place of each value in their order; equal ones share one."""
    values = np.round(values, 6)
    places = np.argsort(np.argsort(values)).astype(float)
    for value in set(values):
        places[values == value] = places[values == value].mean()
    return places
