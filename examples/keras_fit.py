"""A Keras model on two towers; --devices gpu:0,1 for GPUs.

python examples/keras_fit.py [--devices cpu:2]
"""

import argparse

import multitower as mt


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu:2")
    devices = mt.devices(parser.parse_args().devices)  # before any tensor or model, where the CPU is split

    from multitower.jobs import digits

    (x, y), validation = digits.load_data()
    trainer = mt.Trainer(digits.build_model(), devices)
    trainer.fit(x, y, batch_size=128, epochs=3, validation_data=validation, verbose=2)
    print(f"accuracy {trainer.evaluate(*validation, verbose=0, return_dict=True)['accuracy']:.4f} on {devices}")


if __name__ == "__main__":
    main()
