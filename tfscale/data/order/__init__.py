"""Which record comes when, as a function of seed, epoch and index."""

__all__: list[str] = []
