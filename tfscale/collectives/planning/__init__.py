"""Planning of collectives with integers only: plans, simulation, choice."""

__all__ = []
