"""From a model to stages: its calls, what they cost, where it is cut."""

__all__: list[str] = []
