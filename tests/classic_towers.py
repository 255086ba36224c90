"""Towers written by hand as in TensorFlow 1's CIFAR-10 tutorial: the recipe multitower's shared placement stands for.

One graph; variables on the host, shared by reuse; a tower per device with its part of the batch, its losses in a
collection; gradients expanded, concatenated and averaged on the host; one apply_gradients. Nothing of multitower.
"""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def variable_on_host(name, start):
    with tf.device("/cpu:0"):
        return v1.get_variable(name, initializer=tf.constant(start))


def dense_network(x, start):
    """relu(x W + b) V + c; L2 of W goes to the collection of losses."""
    w, b, v, c = (variable_on_host(f"v{i}", value) for i, value in enumerate(start))
    v1.add_to_collection("losses", 0.01 * tf.reduce_sum(w * w))
    return tf.nn.relu(x @ w + b) @ v + c


def sparse_network(x, start):
    """Mean of the rows of a table looked up, times V, plus c: the table's gradient is sparse, with rows that repeat."""
    table, v, c = (variable_on_host(f"v{i}", value) for i, value in enumerate(start))
    return tf.reduce_mean(tf.gather(table, x), 1) @ v + c


def tower_loss(scope, network, x, y, start):
    """Mean squared error of the tower's rows and what the network collected in this tower's scope."""
    v1.add_to_collection("losses", tf.reduce_mean(tf.square(network(x, start) - y)))
    return tf.add_n(v1.get_collection("losses", scope))


def average_gradients(tower_grads, average):
    """Lists of (gradient, variable) of towers to one: dense gradients expanded and concatenated, sparse ones joined."""
    averaged = []
    for pairs in zip(*tower_grads, strict=True):
        grads = [g for g, _ in pairs]
        if isinstance(grads[0], tf.IndexedSlices):
            values = tf.concat([g.values for g in grads], 0) / (len(grads) if average is tf.reduce_mean else 1)
            mean = tf.IndexedSlices(values, tf.concat([g.indices for g in grads], 0))
        else:
            mean = average(tf.concat([tf.expand_dims(g, 0) for g in grads], 0), 0)
        averaged.append((mean, pairs[0][1]))
    return averaged


def train(network, start, optimizer, batches, towers, average=tf.reduce_mean):
    """Weights after one step on each batch.

    Args:
        network: dense_network or sparse_network.
        start: initial values of its variables.
        optimizer: function that makes an optimizer of tf.compat.v1.
        batches: list of (x, y), rows divisible by `towers`.
        towers: N, on /cpu:1 … /cpu:N; /cpu:0 is the host.
        average: tf.reduce_mean; tf.reduce_sum is the control.
    """
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        x, y = (v1.placeholder(a.dtype, (None, *a.shape[1:])) for a in batches[0])
        opt = optimizer()
        tower_grads = []
        for i, (xs, ys) in enumerate(zip(tf.split(x, towers), tf.split(y, towers), strict=True)):
            with (
                v1.variable_scope("model", reuse=i > 0),
                tf.device(f"/cpu:{i + 1}"),
                v1.name_scope(f"tower_{i}") as scope,
            ):
                tower_grads.append(opt.compute_gradients(tower_loss(scope, network, xs, ys, start)))
        step = opt.apply_gradients(average_gradients(tower_grads, average))
        config = v1.ConfigProto(device_count={"CPU": towers + 1}, allow_soft_placement=False)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            for batch in batches:
                session.run(step, dict(zip((x, y), batch, strict=True)))
            devices = {
                op.device[-5:] for op in tf.compat.v1.get_default_graph().get_operations() if op.type == "MatMul"
            }
            assert devices == {f"CPU:{i + 1}" for i in range(towers)}, devices
            return [np.asarray(value) for value in session.run(v1.trainable_variables())]
