"""One competitor in a process of its own, which runs steps when it is told to; see race.py.

    python benchmarks/worker.py NETWORK COMPETITOR

Requests are lines on standard input, the number of steps to run; answers are lines of JSON on standard output. The
first answer comes after the first step.
"""

import json
import os
import resource
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FIRST_LOSSES = 3


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow or Keras print is no answer
    import tensorflow as tf
    from competitors import start
    from entrants import parse
    from networks import NETWORKS

    tf.get_logger().setLevel("ERROR")

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    network_name, competitor = sys.argv[1:]
    began = time.perf_counter()
    training = start(parse(competitor), NETWORKS[network_name])
    losses = [training.step()]
    first_step_seconds = time.perf_counter() - began
    losses += [training.step() for _ in range(FIRST_LOSSES - 1)]
    answer(first_step_seconds=first_step_seconds, losses=losses)
    for line in sys.stdin:
        seconds = training.seconds(int(line))
        answer(seconds=seconds, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
