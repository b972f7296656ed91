"""Private modules, classes and functions of Keras and TensorFlow.

Each is listed in the tables beside, with why.
"""

# --- tfscale.distribute ---------------------------------------------------
# isort: split
# The layer or optimizer that makes a variable, and the variable's path.
from keras.src.backend.common import global_state as global_state
from keras.src.backend.common.name_scope import current_path as current_path

# isort: split
# Canonical names of devices, and a host device for each.
from tensorflow.python.distribute import device_util as device_util

# Regroups what each replica has into one distributed value; makes a
# distributed variable out of its components and says of which class.
from tensorflow.python.distribute import distribute_utils as distribute_utils

# The device of datasets of arrays.
from tensorflow.python.distribute import numpy_dataset as numpy_dataset

# Whether a step failed because its worker is lost, or came back without it.
from tensorflow.python.distribute.coordinator.cluster_coordinator import (
    _is_worker_failure as is_worker_failure,  # noqa: F401
)

# Which replica or component the current thread works for.
from tensorflow.python.distribute.distribute_lib import (
    get_update_replica_id as get_update_replica_id,
)

# Datasets of replicas, of a dataset and of a function, and their iterator; and
# which devices get their batches from which host.
from tensorflow.python.distribute.input_lib import (
    DistributedDataset as DistributedDataset,
)
from tensorflow.python.distribute.input_lib import (
    DistributedDatasetsFromFunction as DistributedDatasetsFromFunction,
)
from tensorflow.python.distribute.input_lib import (
    DistributedIterator as DistributedIterator,
)
from tensorflow.python.distribute.input_lib import (
    DistributedIteratorSpec as DistributedIteratorSpec,
)
from tensorflow.python.distribute.input_lib import InputWorkers as InputWorkers

# The extended class of `MirroredStrategy`: one traced thread per replica.
from tensorflow.python.distribute.mirrored_strategy import (
    MirroredExtended as MirroredExtended,
)

# The variable with one component per replica, and values of that kind.
from tensorflow.python.distribute.values import (
    DistributedVariable as DistributedVariable,
)
from tensorflow.python.distribute.values import Mirrored as Mirrored
from tensorflow.python.distribute.values import (
    MirroredVariable as MirroredVariable,
)
from tensorflow.python.distribute.values import (
    SyncOnReadVariable as SyncOnReadVariable,
)
from tensorflow.python.distribute.values_util import (
    get_current_replica_id_as_int as get_current_replica_id_as_int,
)

# A graph that captures from those around it, to be let go of; and whether XLA
# is to compile a graph, or one around it.
from tensorflow.python.framework.func_graph import FuncGraph as FuncGraph
from tensorflow.python.ops.control_flow_util import (
    GraphOrParentsInXlaContext as is_compiled_by_xla,  # noqa: F401
)

# --- tfscale.pipeline -----------------------------------------------------
# isort: split
# What a functional model is made of, how it calls its layers with
# `training` and masks, and Keras' rule for XLA.
from keras.src.backend import get_keras_mask as get_keras_mask
from keras.src.backend import set_keras_mask as set_keras_mask
from keras.src.losses.loss import apply_mask as apply_mask
from keras.src.models.functional import Functional as Functional
from keras.src.models.functional import operation_fn as operation_fn
from keras.src.trainers.trainer import model_supports_jit as model_supports_jit

# isort: split
# How the outermost function of a step is run (Grappler on or off), and
# Grappler itself, for one function at a time, on a machine that is described
# to it.
from tensorflow.core.protobuf import device_properties_pb2 as device_properties  # noqa: F401
from tensorflow.python.eager import context as eager_context  # noqa: F401
from tensorflow.python.eager import record as record
from tensorflow.python.grappler import cluster as grappler_cluster  # noqa: F401
from tensorflow.python.grappler import tf_optimizer as tf_optimizer

# --- tfscale.data ---------------------------------------------------------
# isort: split
# A function that tf.data calls, traced with attributes of one's own.
from tensorflow.python.data.ops.structured_function import (
    StructuredFunctionWrapper as StructuredFunctionWrapper,
)

# A variable that no strategy in scope turns into a distributed one: the
# public constructor asks the strategy. Used for a position in the data.
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable as ResourceVariable,
)

# --- tfscale.backup -------------------------------------------------------
# isort: split
# What a `fit` that runs consists of, and the seeds of those given none.
from keras.src.backend.tensorflow.trainer import (
    TFEpochIterator as TFEpochIterator,
)
from keras.src.callbacks.callback_list import CallbackList as CallbackList
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR,
)
from keras.src.random.seed_generator import (
    global_seed_generator as global_seed_generator,
)
from keras.src.trainers.data_adapters.data_adapter_utils import (
    NUM_BATCHES_FOR_TENSOR_SPEC as NUM_BATCHES_KEPT,  # noqa: F401
)
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter as GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter as PyDatasetAdapter,
)
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator

# isort: split
# TensorFlow's global generator, which the public function makes if there is
# none: in the strategy in scope, to which it then belongs.
from tensorflow.python.ops import stateful_random_ops as stateful_random_ops

# isort: split
# What a step of replicas gets, each of them a value of its own.
from tensorflow.python.distribute.values import PerReplicaSpec as PerReplicaSpec

# --- tfscale.step.runners -------------------------------------------------
# isort: split
# How much memory each device has: public API says what is in use only.
from tensorflow.python.client.device_lib import (
    list_local_devices as list_local_devices,
)
