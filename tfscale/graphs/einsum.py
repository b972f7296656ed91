"""Equations of einsums."""

from collections.abc import Sequence
from typing import Any


def einsum_terms(equation: str) -> tuple[str, ...]:
    """The letters of each operand, and of the result.

    >>> einsum_terms("...x, xy -> ...y")
    ('.x', 'xy', '.y')
    """
    terms = equation.replace(" ", "").replace("...", ".")
    operands, _, result = terms.partition("->")
    return (*operands.split(","), result)


def einsum_labels(equation: str, ranks: Sequence[int]) -> list[tuple]:
    """A label for each dim of each operand, and of the result.

    `ranks` are their numbers of dims. The dims of an ellipsis are numbered from
    the right, as in broadcasting: ..., -2, -1.

    >>> einsum_labels("...x,xy->...y", [3, 2, 3])
    [(-2, -1, 'x'), ('x', 'y'), (-2, -1, 'y')]
    """
    labels_of_terms = []
    for term, rank in zip(einsum_terms(equation), ranks):
        labels: list[Any] = list(term)
        if "." in labels:
            at = labels.index(".")
            labels[at : at + 1] = range(len(labels) - 1 - rank, 0)
        labels_of_terms.append(tuple(labels))
    return labels_of_terms
