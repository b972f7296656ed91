"""What code of users does with parts of a batch, found by trying."""

__all__: list[str] = []
