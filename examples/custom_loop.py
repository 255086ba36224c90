"""A training loop of your own on two towers: the step is written for one device.

python examples/custom_loop.py [--devices cpu:2]
"""

import argparse

import multitower as mt


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu:2")
    devices = mt.devices(parser.parse_args().devices)  # before any tensor or model, where the CPU is split

    import keras
    import tensorflow as tf

    from multitower.jobs import digits

    (x, y), _ = digits.load_data()
    model = digits.build_model()
    optimizer = keras.optimizers.Adam(1e-3)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, p))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        accuracy.update_state(y, p)
        return loss

    step = mt.replicate(step, devices)
    for epoch in range(3):
        accuracy.reset_state()
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=epoch).batch(128):
            loss = step(*batch)
        print(f"epoch {epoch}: loss {float(loss):.4f}, accuracy {float(accuracy.result()):.4f}")


if __name__ == "__main__":
    main()
