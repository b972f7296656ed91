"""The only door to what is private in Keras and TensorFlow.

Every private name that tfscale imports, reads, overrides or sets is in a table,
with why: `keras_names`, `tensorflow_names`, `hub_names`. Where one is missing,
importing tfscale is an error (`check`), and for each there is a contract in the
tests: what it is relied on to do.

Read against TensorFlow 2.21.0 and Keras 3.15.1.
"""

from tfscale._internals import check  # refuses, so first
from tfscale._internals.attributes import COLOCATED_WITH
from tfscale._internals.attributes import GRADIENT_TYPE
from tfscale._internals.attributes import LOWERED
from tfscale._internals.attributes import OUTPUT_SHAPES
from tfscale._internals.attributes import asks_for_xla
from tfscale._internals.attributes import autocast
from tfscale._internals.attributes import automatic_names
from tfscale._internals.attributes import choose_worker_values
from tfscale._internals.attributes import compile_arguments
from tfscale._internals.attributes import compile_loss_of
from tfscale._internals.attributes import concrete_functions
from tfscale._internals.attributes import creation_number
from tfscale._internals.attributes import devices_of
from tfscale._internals.attributes import direct_generators
from tfscale._internals.attributes import direct_variables
from tfscale._internals.attributes import flat_losses
from tfscale._internals.attributes import flatten_layers
from tfscale._internals.attributes import functional_in
from tfscale._internals.attributes import get_key_value
from tfscale._internals.attributes import global_generator
from tfscale._internals.attributes import global_seeds
from tfscale._internals.attributes import inputs_structure
from tfscale._internals.attributes import is_stateless
from tfscale._internals.attributes import keep_side_effects_of_branches
from tfscale._internals.attributes import make_value_anew
from tfscale._internals.attributes import name_scope_callers
from tfscale._internals.attributes import nodes_of
from tfscale._internals.attributes import noted_losses
from tfscale._internals.attributes import obj_type
from tfscale._internals.attributes import outputs_structure
from tfscale._internals.attributes import predicts
from tfscale._internals.attributes import put_key_value
from tfscale._internals.attributes import replace_input
from tfscale._internals.attributes import standardize_inputs
from tfscale._internals.attributes import step_function
from tfscale._internals.attributes import sublayers
from tfscale._internals.attributes import used_seed_generator
from tfscale._internals.attributes import value_of
from tfscale._internals.attributes import variables_created_eagerly
from tfscale._internals.attributes import variables_used_by
from tfscale._internals.attributes import whole_of
from tfscale._internals.attributes import with_flat_losses
from tfscale._internals.attributes import with_losses
from tfscale._internals.attributes import writes_old_format
from tfscale._internals.datasets import ORDINARY_ITERATOR
from tfscale._internals.datasets import SharedIterator
from tfscale._internals.datasets import asked_of_python
from tfscale._internals.datasets import batch_sizes
from tfscale._internals.datasets import calls_python
from tfscale._internals.datasets import inputs_of
from tfscale._internals.datasets import is_asked
from tfscale._internals.datasets import shuffle_seeds
from tfscale._internals.datasets import variant_of
from tfscale._internals.datasets import without_order
from tfscale._internals.fitting import MODEL_CHECKPOINT_COUNTERS
from tfscale._internals.fitting import SWAP_EMA_STATE
from tfscale._internals.fitting import TENSORBOARD_STEPS
from tfscale._internals.fitting import build
from tfscale._internals.fitting import count_time_from
from tfscale._internals.fitting import data_keras_reads
from tfscale._internals.fitting import element_spec_of
from tfscale._internals.fitting import give_data
from tfscale._internals.fitting import go_on_with
from tfscale._internals.fitting import known_batches
from tfscale._internals.fitting import make_iterator
from tfscale._internals.fitting import model_that_looks_at_data
from tfscale._internals.fitting import probes_data
from tfscale._internals.fitting import reader_of
from tfscale._internals.fitting import rows_of_arrays
from tfscale._internals.fitting import running_fit
from tfscale._internals.fitting import set_initial_epoch
from tfscale._internals.fitting import set_known_batches
from tfscale._internals.fitting import shuffles_arrays
from tfscale._internals.fitting import source_of
from tfscale._internals.fitting import validation_epochs
from tfscale._internals.instances import altered
from tfscale._internals.instances import attributes_of
from tfscale._internals.instances import held_by
from tfscale._internals.instances import reachable
from tfscale._internals.instances import view
from tfscale._internals.layers import ATTENTION_PARTS
from tfscale._internals.layers import METHODS_OF_SHAPES
from tfscale._internals.layers import NORMALIZATION_PARTS
from tfscale._internals.layers import attention_class
from tfscale._internals.layers import attention_dense
from tfscale._internals.layers import attention_gate
from tfscale._internals.layers import attention_names
from tfscale._internals.layers import causal_padding
from tfscale._internals.layers import is_of_keras
from tfscale._internals.layers import moments
from tfscale._internals.layers import num_attention_axes
from tfscale._internals.layers import weight_of
from tfscale._internals.py_datasets import first_batches_from_python
from tfscale._internals.py_datasets import keep_order
from tfscale._internals.py_datasets import order_of
from tfscale._internals.py_datasets import set_order
from tfscale._internals.stack import calls
from tfscale._internals.symbols import DistributedDataset
from tfscale._internals.symbols import DistributedDatasetsFromFunction
from tfscale._internals.symbols import DistributedVariable
from tfscale._internals.symbols import EpochIterator
from tfscale._internals.symbols import FuncGraph
from tfscale._internals.symbols import Functional
from tfscale._internals.symbols import InputWorkers
from tfscale._internals.symbols import Mirrored
from tfscale._internals.symbols import MirroredExtended
from tfscale._internals.symbols import MirroredVariable
from tfscale._internals.symbols import ResourceVariable
from tfscale._internals.symbols import StructuredFunctionWrapper
from tfscale._internals.symbols import SyncOnReadVariable
from tfscale._internals.symbols import apply_mask
from tfscale._internals.symbols import current_path
from tfscale._internals.symbols import device_properties
from tfscale._internals.symbols import device_util
from tfscale._internals.symbols import distribute_utils
from tfscale._internals.symbols import eager_context
from tfscale._internals.symbols import get_current_replica_id_as_int
from tfscale._internals.symbols import get_keras_mask
from tfscale._internals.symbols import get_update_replica_id
from tfscale._internals.symbols import global_seed_generator
from tfscale._internals.symbols import grappler_cluster
from tfscale._internals.symbols import is_compiled_by_xla
from tfscale._internals.symbols import is_worker_failure
from tfscale._internals.symbols import list_local_devices
from tfscale._internals.symbols import model_supports_jit
from tfscale._internals.symbols import numpy_dataset
from tfscale._internals.symbols import operation_fn
from tfscale._internals.symbols import set_keras_mask
from tfscale._internals.symbols import tf_optimizer

__all__ = [
    "ATTENTION_PARTS",
    "COLOCATED_WITH",
    "GRADIENT_TYPE",
    "LOWERED",
    "METHODS_OF_SHAPES",
    "MODEL_CHECKPOINT_COUNTERS",
    "NORMALIZATION_PARTS",
    "ORDINARY_ITERATOR",
    "OUTPUT_SHAPES",
    "SWAP_EMA_STATE",
    "TENSORBOARD_STEPS",
    "DistributedDataset",
    "DistributedDatasetsFromFunction",
    "DistributedVariable",
    "EpochIterator",
    "FuncGraph",
    "Functional",
    "InputWorkers",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "ResourceVariable",
    "SharedIterator",
    "StructuredFunctionWrapper",
    "SyncOnReadVariable",
    "altered",
    "apply_mask",
    "asked_of_python",
    "asks_for_xla",
    "attention_class",
    "attention_dense",
    "attention_gate",
    "attention_names",
    "attributes_of",
    "autocast",
    "automatic_names",
    "batch_sizes",
    "build",
    "calls",
    "calls_python",
    "causal_padding",
    "check",
    "choose_worker_values",
    "compile_arguments",
    "compile_loss_of",
    "concrete_functions",
    "count_time_from",
    "creation_number",
    "current_path",
    "data_keras_reads",
    "device_properties",
    "device_util",
    "devices_of",
    "direct_generators",
    "direct_variables",
    "distribute_utils",
    "eager_context",
    "element_spec_of",
    "first_batches_from_python",
    "flat_losses",
    "flatten_layers",
    "functional_in",
    "get_current_replica_id_as_int",
    "get_keras_mask",
    "get_key_value",
    "get_update_replica_id",
    "give_data",
    "global_generator",
    "global_seed_generator",
    "global_seeds",
    "go_on_with",
    "grappler_cluster",
    "held_by",
    "inputs_of",
    "inputs_structure",
    "is_asked",
    "is_compiled_by_xla",
    "is_of_keras",
    "is_stateless",
    "is_worker_failure",
    "keep_order",
    "keep_side_effects_of_branches",
    "known_batches",
    "list_local_devices",
    "make_iterator",
    "make_value_anew",
    "model_supports_jit",
    "model_that_looks_at_data",
    "moments",
    "name_scope_callers",
    "nodes_of",
    "noted_losses",
    "num_attention_axes",
    "numpy_dataset",
    "obj_type",
    "operation_fn",
    "order_of",
    "outputs_structure",
    "predicts",
    "probes_data",
    "put_key_value",
    "reachable",
    "reader_of",
    "replace_input",
    "rows_of_arrays",
    "running_fit",
    "set_initial_epoch",
    "set_keras_mask",
    "set_known_batches",
    "set_order",
    "shuffle_seeds",
    "shuffles_arrays",
    "source_of",
    "standardize_inputs",
    "step_function",
    "sublayers",
    "tf_optimizer",
    "used_seed_generator",
    "validation_epochs",
    "value_of",
    "variables_created_eagerly",
    "variables_used_by",
    "variant_of",
    "view",
    "weight_of",
    "whole_of",
    "with_flat_losses",
    "with_losses",
    "without_order",
    "writes_old_format",
]
