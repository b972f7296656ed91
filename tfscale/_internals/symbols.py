"""Private modules, classes and functions of Keras and TensorFlow.

Each is listed in the tables beside, with why.
"""

# ruff: noqa: F401

from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.common.masking import set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from tensorflow.core.protobuf import device_properties_pb2 as device_properties
from tensorflow.python.data.ops.structured_function import (
    StructuredFunctionWrapper,
)
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.coordinator.cluster_coordinator import (
    _is_worker_failure as is_worker_failure,
)
from tensorflow.python.distribute.input_lib import DistributedDataset
from tensorflow.python.distribute.input_lib import (
    DistributedDatasetsFromFunction,
)
from tensorflow.python.distribute.input_lib import DistributedIterator
from tensorflow.python.distribute.input_lib import DistributedIteratorSpec
from tensorflow.python.distribute.input_lib import InputWorkers
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import Mirrored
from tensorflow.python.distribute.values import MirroredVariable
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.distribute.values_util import (
    get_current_replica_id_as_int,
)
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function.attributes import NO_INLINE
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import stateful_random_ops
from tensorflow.python.ops.control_flow_util import (
    GraphOrParentsInXlaContext as is_compiled_by_xla,
)
from tensorflow.tsl.profiler.protobuf import xplane_pb2
