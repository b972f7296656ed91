"""The only door to what is private in Keras and TensorFlow.

Every private name that tfscale imports, reads, overrides or sets is in a table,
with why: `keras_names`, `tensorflow_names`, `layers`. Where one is missing,
importing tfscale is an error (`check`), and for each there is a contract in the
tests: what it is relied on to do.

Read against TensorFlow 2.21.0, Keras 3.15.1 and a nightly of 3.16; what differs
between these is in `releases`.
"""

from tfscale._internals import check as check  # refuses, so first
