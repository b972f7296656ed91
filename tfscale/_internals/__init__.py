"""The only door to what is private in Keras and TensorFlow.

Every private name that tfscale imports, reads, overrides or sets is in a table,
with why: `keras_names`, `tensorflow_names`, `hub_names`. Where one is missing,
importing tfscale is an error (`check`), and for each there is a contract in the
tests: what it is relied on to do.

Read against TensorFlow 2.21.0 and Keras 3.15.1.
"""

from tfscale._internals import check as check  # refuses, so first
from tfscale._internals.attributes import compile_arguments as compile_arguments
from tfscale._internals.attributes import flatten_layers as flatten_layers
from tfscale._internals.attributes import make_value_anew as make_value_anew
from tfscale._internals.attributes import value_of as value_of
from tfscale._internals.attributes import with_losses as with_losses
from tfscale._internals.fitting import build as build
from tfscale._internals.fitting import count_time_from as count_time_from
from tfscale._internals.fitting import element_spec_of as element_spec_of
from tfscale._internals.fitting import give_data as give_data
from tfscale._internals.fitting import probes_data as probes_data
from tfscale._internals.fitting import set_initial_epoch as set_initial_epoch
from tfscale._internals.fitting import source_of as source_of
from tfscale._internals.fitting import validation_epochs as validation_epochs
from tfscale._internals.instances import held_by as held_by
from tfscale._internals.instances import reachable as reachable
from tfscale._internals.instances import view as view
from tfscale._internals.symbols import (
    DistributedVariable as DistributedVariable,
)
from tfscale._internals.symbols import ResourceVariable as ResourceVariable
from tfscale._internals.symbols import distribute_utils as distribute_utils
from tfscale._internals.symbols import (
    get_current_replica_id_as_int as get_current_replica_id_as_int,
)
from tfscale._internals.symbols import list_local_devices as list_local_devices
from tfscale._internals.symbols import set_keras_mask as set_keras_mask
