"""The only door to what is private in Keras and TensorFlow.

Every private name that tfscale imports, reads, overrides or sets is in a table,
with why: `keras_names`, `tensorflow_names`, `hub_names`. Where one is missing,
importing tfscale is an error (`check`), and for each there is a contract in the
tests: what it is relied on to do.

Read against TensorFlow 2.21.0 and Keras 3.15.1.
"""

from tfscale._internals import check as check  # refuses, so first
from tfscale._internals.attributes import compile_arguments as compile_arguments
from tfscale._internals.attributes import (
    concrete_functions as concrete_functions,
)
from tfscale._internals.attributes import creation_number as creation_number
from tfscale._internals.attributes import flatten_layers as flatten_layers
from tfscale._internals.attributes import global_generator as global_generator
from tfscale._internals.attributes import make_value_anew as make_value_anew
from tfscale._internals.attributes import replace_input as replace_input
from tfscale._internals.attributes import step_function as step_function
from tfscale._internals.attributes import (
    used_seed_generator as used_seed_generator,
)
from tfscale._internals.attributes import value_of as value_of
from tfscale._internals.attributes import variables_used_by as variables_used_by
from tfscale._internals.attributes import whole_of as whole_of
from tfscale._internals.attributes import with_losses as with_losses
from tfscale._internals.datasets import inputs_of as inputs_of
from tfscale._internals.fitting import (
    MODEL_CHECKPOINT_COUNTERS as MODEL_CHECKPOINT_COUNTERS,
)
from tfscale._internals.fitting import SWAP_EMA_STATE as SWAP_EMA_STATE
from tfscale._internals.fitting import TENSORBOARD_STEPS as TENSORBOARD_STEPS
from tfscale._internals.fitting import build as build
from tfscale._internals.fitting import count_time_from as count_time_from
from tfscale._internals.fitting import element_spec_of as element_spec_of
from tfscale._internals.fitting import give_data as give_data
from tfscale._internals.fitting import go_on_with as go_on_with
from tfscale._internals.fitting import known_batches as known_batches
from tfscale._internals.fitting import make_iterator as make_iterator
from tfscale._internals.fitting import (
    model_that_looks_at_data as model_that_looks_at_data,
)
from tfscale._internals.fitting import probes_data as probes_data
from tfscale._internals.fitting import rows_of_arrays as rows_of_arrays
from tfscale._internals.fitting import set_initial_epoch as set_initial_epoch
from tfscale._internals.fitting import set_known_batches as set_known_batches
from tfscale._internals.fitting import shuffles_arrays as shuffles_arrays
from tfscale._internals.fitting import source_of as source_of
from tfscale._internals.fitting import validation_epochs as validation_epochs
from tfscale._internals.instances import held_by as held_by
from tfscale._internals.instances import reachable as reachable
from tfscale._internals.instances import view as view
from tfscale._internals.py_datasets import keep_order as keep_order
from tfscale._internals.py_datasets import order_of as order_of
from tfscale._internals.py_datasets import set_order as set_order
from tfscale._internals.symbols import (
    DistributedVariable as DistributedVariable,
)
from tfscale._internals.symbols import ResourceVariable as ResourceVariable
from tfscale._internals.symbols import distribute_utils as distribute_utils
from tfscale._internals.symbols import eager_context as eager_context
from tfscale._internals.symbols import (
    get_current_replica_id_as_int as get_current_replica_id_as_int,
)
from tfscale._internals.symbols import (
    global_seed_generator as global_seed_generator,
)
from tfscale._internals.symbols import list_local_devices as list_local_devices
from tfscale._internals.symbols import set_keras_mask as set_keras_mask
