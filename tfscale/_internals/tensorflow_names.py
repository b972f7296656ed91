"""Every private name of TensorFlow that tfscale relies on, and why.

Below the module of `tensorflow`, the class or the function that has it. Of a
function it is a name that its code uses: an attribute that a method sets, a
key of a dict.
"""

TENSORFLOW = """
# --- strategies
python.distribute.mirrored_strategy
    MirroredExtended: one traced thread for each device
python.distribute.mirrored_strategy.MirroredExtended
    _gather_to_implementation: ranks count once
    _create_variable: of a single device; others are made here
    _get_local_replica_id: the component of a thread
    _in_multi_worker_mode: a worker out of data goes on with no rows
    _initialize_single_worker: without a line for each strategy
    _get_replica_id_in_sync_group: ranks of a replica have its number
    _num_replicas_in_sync: the data axis only; Keras divides by it
    _replica_ctx_all_reduce: sums that are made already
    _use_merge_call: no meeting where gradients are summed already
python.distribute.mirrored_strategy.MirroredExtended._initialize_single_worker
    _devices: a device for each thread
python.distribute.distribute_utils
    regroup: what each replica has, as one value
python.distribute.input_lib
    DistributedDataset: whose batches replicas take
    DistributedDatasetsFromFunction: whose batches replicas take
    DistributedIterator: from which all replicas take batches
    DistributedIteratorSpec: what a function takes of it
    InputWorkers: the devices that have the batches of each iterator
python.distribute.input_lib.DistributedIterator
    _type_spec: what a function takes of it
python.distribute.input_lib.DistributedIteratorBase.__init__
    _input_workers, _iterators: one for each replica, of the same iterator
python.distribute.input_lib.DistributedIteratorSpec
    _component_specs, _from_components: a function takes that iterator once
    _to_components: a function takes that iterator once
python.distribute.input_lib.DistributedDataset.__init__
    _original_dataset: the data of a `fit`
    _strategy: how fast its devices are
python.distribute.input_lib.DistributedDataset
    _make_rebatch_fn: how batches are cut for replicas, and read ahead
python.distribute.values_util
    get_current_replica_id_as_int: the component of this thread, or update
python.distribute.coordinator.cluster_coordinator
    _is_worker_failure: whether a step is made again
python.distribute.coordinator.values.PerWorkerValues.__init__
    _values: an iterator of each worker, over data of its own
# --- variables and values
python.distribute.values
    Mirrored: a value with equal components
    MirroredVariable: a variable with equal components
    SyncOnReadVariable: a variable that is added up when read
python.distribute.values.PerReplicaSpec.__init__
    _value_specs: the specs of a value on each replica
python.distribute.values.DistributedVariable
    _export_to_saved_model_graph: would take a shard for the value
    _update_cross_replica: cuts what is assigned
python.distribute.values.MirroredVariable
    _dense_var_to_tensor: dense gradients; shards gathered
    _get_cross_replica: a sharded value outside of replicas
    _update_replica: each replica its own component
python.distribute.values.SyncOnReadVariable
    _get_cross_replica: ranks of a replica count once
python.trackable.base.Trackable
    _serialize_to_tensors: a checkpoint has whole values
    _restore_from_tensors: and is sharded when it is read
python.ops.stateful_random_ops
    global_generator: its state is one of a run, if it was used
# --- graphs and functions
python.ops.cond_v2.cond_v2
    _add_control_dependencies: branches keep assertions and prints
python.ops.control_flow_util
    GraphOrParentsInXlaContext: whether XLA is to compile a graph
python.framework.ops.Graph._create_op_helper
    _gradient_op_type: an operation with a gradient of its own
python.framework.ops.Operation
    _set_attr: operations that XLA is not to compile
    _update_input: operations get another tensor of the same value
python.framework.ops.Operation.colocation_groups
    _class: left out where the others of a group are elsewhere
python.ops.control_flow_util_v2.maybe_set_lowering_attr
    _lower_using_switch_merge: loops stay loops until they are run
python.eager.polymorphic_function.attributes
    NO_INLINE: a rare branch costs no operations where it is not taken
python.eager.polymorphic_function.polymorphic_function.Function.__init__
    _jit_compile: whether a function is to be compiled by XLA
python.eager.polymorphic_function.polymorphic_function.Function
    _list_all_concrete_functions: what a step was traced to
python.framework.func_graph.FuncGraph.__init__
    _weak_variables: the variables that a traced step uses
python.ops.resource_variable_ops.BaseResourceVariable.__init__
    _unique_id: order of creation; how optimizers know variables
python.eager.record
    could_possibly_record: whether a tape may see a sum over replicas
    record_operation: the gradient of a read of a weight is dense
    stop_recording: only that gradient is
python.eager.context
    context: how the outermost function of a step is run
python.eager.context.Context
    abort_collective_ops: nothing waits for a lost worker
    config: threads and memory of a process, which its server has too
    configure_coordination_service: nor for ever for one that stands still
    coordination_service: nor the first one for another
    get_config_key_value: what another worker has said
    set_config_key_value: what this worker says to the others
    function_call_options: without Grappler
core.protobuf.device_properties_pb2
    NamedDevice: what Grappler is told of a device
tsl.profiler.protobuf.xplane_pb2
    XSpace: what the profiler writes
python.grappler.cluster
    Cluster: a machine that is described, not looked at in a session
python.grappler.tf_optimizer
    OptimizeGraph: Grappler, for one function at a time
# --- data
python.data.ops.structured_function
    StructuredFunctionWrapper: a function with attributes of its own
python.data.ops.dataset_ops.DatasetV2
    _common_args: what every operation of a dataset takes
    _functions: the functions of a dataset, which tf.data looks at
    _inputs: the datasets that one is made of
python.data.ops.shuffle_op._ShuffleDataset.__init__
    _reshuffle_each_iteration: whether each iteration has an order
    _seed, _seed2: whether all workers shuffle in the same way
python.data.ops.batch_op._BatchDataset.__init__
    _batch_size: whether all workers make the same batches
python.data.ops.batch_op._ParallelBatchDataset.__init__
    _batch_size: whether all workers make the same batches
python.data.ops.map_op._ParallelMapDataset.__init__
    _deterministic: whether records may overtake each other
    _num_parallel_calls: how many processors a map uses
python.data.ops.interleave_op._ParallelInterleaveDataset.__init__
    _num_parallel_calls: how many processors an interleave uses
python.data.ops.dataset_ops.DatasetV2._metadata
    _name: the name of an operation of a dataset
"""
