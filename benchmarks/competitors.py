"""Ways to train a network, each as a function that makes a `Loop` or a `Fit`.

plain       a step function of one device in a tf.function
replicate   the same step function given to multitower.replicate
trainer     multitower.Trainer's fit
fit         Keras' fit, on one device
mirrored    the same step function under MirroredStrategy: strategy.run in a tf.function
fit-mirrored, fit-mirrored-one    Keras' fit under MirroredStrategy; with ReductionToOneDevice
classic     a tf.compat.v1 graph: variables on the host, a tower on each device, gradients averaged by expand_dims,
            concat and reduce_mean, one apply; the layers' own computation, through keras.Model.stateless_call

All but the fits take one batch at a time in a Python loop. Batch normalisation: everybody but multitower takes the
statistics of each tower's rows; multitower does where the option batch_norm=tower is given.
"""

import itertools
import time

import keras
import tensorflow as tf

import multitower as mt

HOST = "/device:CPU:0"


def start(competitor, network):
    """Devices, model and everything else made: a `Loop` or a `Fit`."""
    names = mt.devices(f"cpu:{competitor.devices}")
    return globals()[competitor.way.replace("-", "_")](network, names, **competitor.options)


def step_of(model, network):
    """The step that is written for one device."""
    loss_of, optimizer = network.loss, model.optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


class Loop:
    """A Python loop over steps.

    Args:
        step: runs one and returns the loss, which waits for the step when it is made a float.
        batches: the arguments of the steps.
    """

    def __init__(self, step, batches):
        self._step, self._batches = step, iter(batches)

    def step(self):
        """Run one step; its loss."""
        return float(self._step(*next(self._batches)))

    def seconds(self, steps):
        """Run steps; how long they take."""
        began = time.perf_counter()
        for _ in range(steps):
            loss = self._step(*next(self._batches))
        float(loss)
        return time.perf_counter() - began


class Fit:
    """Calls of `fit`, timed from the end of the first execution on: a call of fit begins with work of its own."""

    def __init__(self, fit, network, steps_per_execution=1):
        self._fit, self._data, self._first = fit, network.dataset(), steps_per_execution

    def step(self):
        """One execution in a call of its own; the mean loss of its steps."""
        return self._run(self._first).history["loss"][-1]

    def seconds(self, steps):
        """One call, with whole executions; how long these take, the first left out."""
        clock = _Clock()
        self._run(self._first - steps // -self._first * self._first, clock)
        return (clock.end - clock.start) * steps / (-(steps // -self._first) * self._first)

    def _run(self, steps, *callbacks):
        return self._fit(self._data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks))


class _Clock(keras.callbacks.Callback):
    start = None

    def on_train_batch_end(self, batch, logs=None):
        if self.start is None:
            float(logs["loss"])
            self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.end = time.perf_counter()  # Keras has made the logs numbers


def plain(network, names):
    return Loop(tf.function(step_of(network.model(), network), autograph=False), network.dataset())


def replicate(network, names, **options):
    return Loop(mt.replicate(step_of(network.model(), network), names, **options), network.dataset())


def mirrored(network, names):
    strategy = tf.distribute.MirroredStrategy(names)
    with strategy.scope():
        step = step_of(network.model(), network)

    @tf.function
    def on_replicas(x, y):  # Keras' losses divide by the number of replicas
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    return Loop(on_replicas, strategy.experimental_distribute_dataset(network.dataset()))


def trainer(network, names, steps_per_execution=1, **options):
    model = network.model(steps_per_execution)
    return Fit(mt.Trainer(model, names, **options).fit, network, steps_per_execution)


def fit(network, names, steps_per_execution=1):
    return Fit(network.model(steps_per_execution).fit, network, steps_per_execution)


def fit_mirrored(network, names, cross_device_ops=None, steps_per_execution=1):
    with tf.distribute.MirroredStrategy(names, cross_device_ops).scope():
        model = network.model(steps_per_execution)
    return Fit(model.fit, network, steps_per_execution)


def fit_mirrored_one(network, names, **options):
    return fit_mirrored(network, names, tf.distribute.ReductionToOneDevice(), **options)


def classic(network, names):
    model = network.model()
    values = [[v.numpy() for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    with tf.Graph().as_default(), tf.device(HOST):
        (weights, state), feeds = host_variables(values)
        batches = tf.compat.v1.data.make_initializable_iterator(network.dataset())
        shards = zip(*(tf.split(part, len(names)) for part in batches.get_next()), names, strict=True)
        towers = [tower(model, network, weights, state, *shard) for shard in shards]
        losses, gradients, states = zip(*towers, strict=True)
        averages = [average(of_variable) for of_variable in zip(*gradients, strict=True)]
        apply = network.classic_optimizer().apply_gradients(zip(averages, weights, strict=True))
        updates = [v.assign(new) for v, new in zip(state, states[0], strict=True)]
        loss, train = tf.reduce_mean(losses), tf.group(apply, *updates)
        session = tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"CPU": len(names)}))
        session.run([tf.compat.v1.global_variables_initializer(), batches.initializer], feeds)
        step = session.make_callable([loss, train])
    return Loop(lambda: step()[0], itertools.repeat(()))


def host_variables(groups):
    """Variables with these values, and what the initialiser has to be fed: constants would swell the graph."""
    made, feeds = [], {}
    for values in groups:
        holders = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in values]
        feeds |= dict(zip(holders, values, strict=True))
        made.append([tf.compat.v1.Variable(h, use_resource=True, trainable=groups[0] is values) for h in holders])
    return made, feeds


def tower(model, network, weights, state, x, y, device):
    """Loss, gradients and new state of one tower, the variables being read on the host."""
    read, before = [v.read_value() for v in weights], [v.read_value() for v in state]
    with tf.device(device):
        outputs, after = model.stateless_call(read, before, x, training=True)
        loss = network.loss(y, outputs)
        # tf.gradients of TensorFlow 2 colocates a gather's gradient with its table too, which is on the host
        return loss, tf.compat.v1.gradients(loss, read), after


def average(gradients):
    """The mean over towers; slices are put one behind the other."""
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([g.values for g in gradients], 0) / len(gradients)
        return tf.IndexedSlices(values, tf.concat([g.indices for g in gradients], 0), gradients[0].dense_shape)
    return tf.reduce_mean(tf.concat([tf.expand_dims(g, 0) for g in gradients], 0), 0)
