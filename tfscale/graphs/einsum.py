"""Equations of einsums."""

import re
from collections.abc import Sequence


def einsum_labels(equation: str, ranks: Sequence[int]) -> list[tuple]:
    """A label for each dim of each operand, and of the result.

    `ranks` are their numbers of dims. The dims of an ellipsis are numbered from
    the right, as in broadcasting: ..., -2, -1.
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    labels_of_terms = []
    for term, rank in zip((*operands.split(","), result), ranks):
        labels = re.findall(r"\.\.\.|\w", term)
        if "..." in labels:
            at = labels.index("...")
            labels[at : at + 1] = range(len(labels) - 1 - rank, 0)
        labels_of_terms.append(tuple(labels))
    return labels_of_terms
