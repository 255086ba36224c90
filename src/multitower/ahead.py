"""The next batch on its devices before the step that needs it: split and copied by a thread while the step runs.

    thread    take batch 1, split, copy │ take batch 2, split, copy │ …
    steps                               │ step on batch 1           │ step on batch 2

For GPUs, which have memory of their own. On CPU devices a shard is a part of the batch where it is, and tf.data's own
prefetching prepares batches ahead.
"""

from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from . import batches


class Ahead:
    """Steps from an iterator, the shards of one batch being copied while the step before runs.

    Args:
        towers: the `towers.TowerStep`.
    """

    def __init__(self, towers):
        self._towers = towers
        self._fetch = tf.function(self._next_shards, autograph=False, reduce_retracing=True)
        self._thread = ThreadPoolExecutor(1, "multitower-input")
        self._run = tf.function(self._on_shards, autograph=False, reduce_retracing=True)
        self._coming = None

    def __call__(self, iterator):
        """Run a step on the next batch of a tf.data.Iterator; an error of the data is raised by the step it is for.

        Raises:
            tf.errors.OutOfRangeError: there is no batch left.
        """
        if self._coming is None or self._coming[0] is not iterator:
            self._coming = iterator, self._thread.submit(self._fetch, iterator)
        coming, self._coming = self._coming, None
        data, rows, shards = coming[1].result()
        self._coming = iterator, self._thread.submit(self._fetch, iterator)
        return self._run(data, rows, shards)

    def _next_shards(self, iterator):
        """(batch, rows, shards): what the iterator gives, rows per tower, components of each shard on its device."""
        data = iterator.get_next()
        rows, shards = self._towers.split(_batch(data))
        copied = []
        for device, shard in zip(self._towers.devices, shards, strict=True):
            with tf.device(device):
                copied.append([tf.identity(part) for part in shard])
        return data, rows, copied

    def _on_shards(self, data, rows, shards):
        return self._towers.emit_split(_batch(data), rows, shards)


def _batch(data):
    return tf.nest.map_structure(batches.leaf, ((data,), {}))
