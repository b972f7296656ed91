"""Planning of pipelines with integers only: schedules, simulation, balance."""

__all__ = []
