"""All that stands in the place of a class of Keras: one file for each class."""

__all__: list[str] = []
