"""Which variables a layer reads or assigns to."""

import keras


class NotedReads(keras.StatelessScope):
    """A scope in which variables have their values, and no assignment stays.

    Attributes:
        read: Ids of the variables that were read, or assigned to, in it.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.read = set()

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        self.read.add(id(variable))
        return super().get_current_value(variable)

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        self.read.add(id(update[0]))
        super().add_update(update)
