"""The state of a run: variables, random states, its position in the data."""

__all__: list[str] = []
