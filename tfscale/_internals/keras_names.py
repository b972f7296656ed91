"""Every private name of Keras that tfscale relies on, and why.

Below the module of `keras.src`, the class or the function that has it. Of a
function it is a name that its code uses: an attribute that a method sets, a
key of a dict. Methods that `keras.Model` inherits are named as its own: their
classes have other names in other releases.
"""

from tfscale._internals import releases

KERAS = """
# --- who makes what, and when
backend.common.global_state
    get_global_attribute: layers and optimizers whose scopes are open
    set_global_attribute: variables are made at once, see below
backend.common.name_scope
    current_path: the path of a variable that is being made
backend.common.name_scope.name_scope.__enter__
    name_scope_stack: key of the scopes that are open in a thread
backend.common.name_scope.name_scope.__init__
    caller: the layer or optimizer that a scope was opened by
backend.common.stateless_scope.StatelessScope.__enter__
    stateless_scope: key of the scope in which variables are made late
utils.naming.uniquify
    object_name_uids: how often a name was given, in each thread
legacy.saving.saving_options.keras_option_scope
    use_legacy_config: key of what is set while HDF5 files are written
# --- layers and models
layers.layer.Layer.__init__
    _losses: what ranks noted down, each for itself
layers.layer.Layer._initialize_tracker
    _layers: the layers right below one
ops.function.Function.__init__
    _nodes_by_depth: calls of layers, in the order of Keras
ops.node.Node
    input_tensors: what a call takes
ops.node.Node.__init__
    operation: what is called
    arguments: with which arguments
    outputs: what a call makes
ops.symbolic_arguments.SymbolicArguments
    fill_in: the arguments of a call with others in their places
backend.common.masking
    get_keras_mask, set_keras_mask: of a tensor, which a stage passes on
saving.keras_saveable.KerasSaveable
    _obj_type: a pipeline is saved as the model inside would be
# --- variables
backend.common.variables.Variable.__init__
    _value: how a variable is sharded, also where tensors stand for it
# --- training
models.model.Model.compile
    _compile_config: a compiled model that is wrapped stays compiled
    _compile_loss: the losses of a batch out of those of microbatches
    _compile_metrics: whether metrics read the outputs of a pipeline
models.model.Model.fit
    _initial_epoch: the epoch that a run goes on with
    _maybe_symbolic_build: left out if all is built; looks at a batch
models.model.Model._maybe_symbolic_build
    _symbolic_build: builds metrics and losses for `timelines`
models.model.Model._make_function
    one_step_on_data: the function that a step is traced to
models.model.Model.make_predict_function
    one_step_on_data: what replicas run to predict, and its model
metrics.reduction_metrics.MeanMetricWrapper.__init__
    _fn: what a function of a part of a batch returns counts by rows
    _fn_kwargs: its arguments
trainers.compile_utils.CompileLoss.build
    _flat_losses: which target and weight go with which loss
# --- optimizers
optimizers.base_optimizer.BaseOptimizer
    _backend_apply_gradients: after it, replicas exchange their parts
    _clip_gradients: left out: whole variables are clipped before
    _get_variable_index: by which LARS knows velocities and norms
    _update_model_variables_moving_average: averages of parts
optimizers.base_optimizer.BaseOptimizer.__init__
    _iterations: each stage of PipeDream counts its updates
    _trainable_variables: what is updated, where nobody says what
optimizers.base_optimizer.BaseOptimizer.build
    _model_variables_moving_average: averages of parts
backend.tensorflow.optimizer.TFOptimizer
    _apply_weight_decay, _backend_update_step: on shards
    _overwrite_model_variables_with_average_value: on shards
backend.tensorflow.optimizer.TFOptimizer._var_key
    _distributed_container: by which a part is known as its variable
# --- layers that run by a rule
layers.normalization.batch_normalization.BatchNormalization
    _moments: the batch's mean and variance, of a rank's channels
    _update_renorm_statistics: moving averages, of the whole batch's
layers.attention.multi_head_attention.MultiHeadAttention
    _compute_attention_mask: looks at whole shapes
layers.attention.grouped_query_attention.GroupedQueryAttention
    _compute_attention_mask: looks at whole shapes
# --- a fit that runs
trainers.epoch_iterator.EpochIterator.__init__
    _current_iterator: goes on from epoch to epoch
    _num_batches: what Keras learns of the length of data
    _steps_seen: how much of it is used up
backend.tensorflow.trainer
    TFEpochIterator: a local variable of `fit`, once it is created
backend.tensorflow.trainer.TFEpochIterator
    _get_iterator: counted: making one moves seeds of shuffles on
backend.tensorflow.trainer.TFEpochIterator.__init__
    _distributed_dataset: what a replica gets of a step
trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter.__init__
    enqueuer: its workers, whose batches are gone once taken
    py_dataset: the one that a user gave, whose batches have numbers
    shuffle: an order of its own for each iterator
trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter._get_iterator
    _finite_generator: batches in an order that it draws
trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter._finite_generator
    _standardize_batch: of each one
trainers.data_adapters.py_dataset_adapter.OrderedEnqueuer._run
    shuffle: draws an order beside `fit`
    indices: set for each run of finite data
trainers.data_adapters.tf_dataset_adapter.TFDatasetAdapter.__init__
    _dataset: the dataset that a user gave to `fit`
trainers.data_adapters.array_data_adapter.ArrayDataAdapter.__init__
    _shuffle: without a seed a run cannot go on with the same data
random.seed_generator
    GLOBAL_SEED_GENERATOR: whether it is there, which it is once used
# --- what callbacks keep
callbacks.model_checkpoint.ModelCheckpoint.__init__
    _batches_seen_since_last_saving, _last_batch_seen: kept in a backup
callbacks.swap_ema_weights.SwapEMAWeights.__init__
    _ema_weights_in_model: kept in a backup
callbacks.tensorboard.TensorBoard.__init__
    _global_train_batch, _global_test_batch: kept in a backup
callbacks.tensorboard.TensorBoard._init_profile_batch
    _should_trace: whether it is to profile, which `Profile` does not bear
"""
KERAS += releases.KERAS
