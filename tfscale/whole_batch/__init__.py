"""How a replica or a microbatch counts in the whole batch."""

__all__ = []
