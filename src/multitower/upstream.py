"""Names of TensorFlow and Keras that are not public API. No other module uses one; tests/test_upstream.py watches them.

Each function says which name it rests on and why there is no public one.
"""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow.python.eager import context
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def keras_mask(x):
    """The mask Keras attached to an output (`_keras_mask`): keras.src has get_keras_mask, keras.* has nothing."""
    return getattr(x, "_keras_mask", None)


def set_keras_mask(x, mask):
    """Attach a mask where Keras' losses and metrics look for it (`_keras_mask`)."""
    x._keras_mask = mask


def with_autograph(function):
    """`function` with Python control flow on tensors turned into graph control flow, as tf.function does.

    tf.autograph.to_graph takes neither bound methods nor callables and ignores do_not_convert;
    `tf.__internal__.autograph.tf_convert` is what tf.function and tf.data call.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def python_function(function):
    """The Python function inside a tf.function, else `function` itself (`python_function`, documented nowhere)."""
    return getattr(function, "python_function", function)


def batch_norm_moments_name():
    """The method of keras.layers.BatchNormalization that computes the statistics of a batch: `_moments`."""
    return "_moments"


class BatchNormWithMoments(keras.layers.BatchNormalization):
    """A BatchNormalization layer whose statistics of a batch are computed by `batch_moments` (Keras: `_moments`)."""

    def batch_moments(self, inputs, mask, of_keras):
        """Mean and variance, each of shape (C,).

        Args:
            inputs: float32 or float64 tensor with C channels in dimension `self.axis`.
            mask: None or a boolean tensor of the shape of `inputs` without its last dimension.
            of_keras: what Keras would compute: a function of inputs and mask.
        """
        raise NotImplementedError

    def _moments(self, inputs, mask):
        return self.batch_moments(inputs, mask, super()._moments)


def made_by_compile(model):
    """An object that every `model.compile` makes anew (`_loss_tracker`): Keras has no public mark of a compilation."""
    return model._loss_tracker


def learning_rate_of(optimizer):
    """What an optimizer was given as its learning rate (`_learning_rate`): a Variable, a schedule or a callable.

    The public `learning_rate` is the number a schedule gives for the next step, not the schedule.
    """
    return optimizer._learning_rate


def _eager() -> Any:
    return context.context()


def register_function(function):
    """Make a FunctionDef callable by its name (`context.add_function_def`): public API has only traced functions."""
    _eager().add_function_def(function)


def function_definition(name):
    """The FunctionDef of a function that a graph calls by name (`context.get_function_def`)."""
    return _eager().get_function_def(name)


def forget_function(name):
    """Undo `register_function` (`context.remove_function`)."""
    _eager().remove_function(name)


def restore_method_name():
    """The method of tf.Variable that tf.train.Checkpoint restores through: `_restore_from_tensors`."""
    return "_restore_from_tensors"


def collect_graphs():
    """Have TensorFlow keep the graphs of functions it instantiates from now on (`Context.enable_graph_collection`).

    The public way, RunOptions(output_partition_graphs=True), is that of tf.compat.v1 sessions.
    """
    _eager().enable_graph_collection()


def collected_graphs():
    """The graphs kept since `collect_graphs`, and no more are kept (`Context.export_run_metadata`).

    Returns:
        For each function instantiated, for each device it runs on, a GraphDef of the operations that device runs.
    """
    try:
        metadata = _eager().export_run_metadata()
    finally:
        _eager().disable_graph_collection()
    return [list(function.partition_graphs) for function in metadata.function_graphs]


def read_profile(path):
    """What tf.profiler wrote to a file `*.xplane.pb`, an XSpace message (`tensorflow.tsl.profiler.protobuf`).

    The public readers are those of the TensorBoard plugin, which has no API.
    """
    messages: Any = xplane_pb2  # its classes are made when it is imported
    space = messages.XSpace()
    space.ParseFromString(Path(path).read_bytes())
    return space


# How TensorFlow's runtime names what it does in a profile; documented nowhere. (tensorflow/core/common_runtime/
# executor.cc, process_function_library_runtime.cc)
FUNCTION_RUN = "FunctionRun"  # on the thread that called a function; its statistic "id" is the number of the call
EXECUTOR = "ExecutorState::Process"  # around operations that ran on this thread; "id" as above
ASYNC_START = "ExecutorState::ProcessAsync::Start"  # of an operation that ends elsewhere: "name", "step_id"
ASYNC_DONE = "ExecutorState::ProcessAsync::Done"
NEXT_BATCH = "IteratorGetNextOp::DoCompute"  # a thread waits for a dataset


def global_seed_generator():
    """The SeedGenerator that random numbers without one of their own come from (`global_seed_generator`).

    keras.utils.set_random_seed sets it, and nothing public reads it, so its state could not be saved.
    """
    return seed_generator.global_seed_generator()


def weight_averages(optimizer):
    """The moving averages of the trainable variables, in their order (`_model_variables_moving_average`).

    They are among optimizer.variables, where only their names tell them from the slots. Empty without use_ema.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_model_variables_moving_average", [])) if inner.use_ema else []
