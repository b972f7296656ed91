"""How fast a `fit` trains, and what holds its steps back."""

__all__: list[str] = []
