"""A layout that was found, and not asked for."""

import keras


class FoundLayout(keras.distribution.TensorLayout):
    """What `auto_layout_map` gives: nobody is to be told to change it.

    A layer whose output is gathered is worth a warning to whoever sharded
    it. Here it keeps its part of the weights, which was what was wanted.
    """

    is_found = True
