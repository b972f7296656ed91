"""From functions to steps: microbatches, the schedule, losses and updates."""

__all__ = []
