"""What of a whole batch a replica or a microbatch makes, and how it counts."""

__all__ = []
