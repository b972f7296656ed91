"""Which processes of a cluster are alive."""

__all__: list[str] = []
