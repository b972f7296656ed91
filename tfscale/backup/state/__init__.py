"""What a run has to keep: variables, random states, its place in the data."""

__all__: list[str] = []
