"""The only door to what is private in Keras and TensorFlow.

Every private name that tfscale imports, reads, overrides or sets is in a table,
with why: `keras_names`, `tensorflow_names`, `hub_names`. Where one is missing,
importing tfscale is an error (`check`), and for each there is a contract in the
tests: what it is relied on to do.

Read against TensorFlow 2.21.0 and Keras 3.15.1.
"""

from tfscale._internals import check as check  # refuses, so first
