"""Who of a cluster is there, and who is gone."""

__all__: list[str] = []
