"""Sums of gradients over towers, and average_gradients for towers written by hand."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import multitower as mt
from multitower.reduce import buckets, sum_gradients


def cpus(n):
    return [f"CPU:{i}" for i in range(n)]


def slices(values, indices, rows=5):
    values = tf.constant(values, tf.float32, shape=[len(indices), 1])
    return tf.IndexedSlices(values, tf.constant(indices, tf.int32, shape=[len(indices)]), tf.constant([rows, 1]))


def dense(gradient):
    return tf.convert_to_tensor(gradient).numpy()


V = tf.Variable(tf.zeros([5, 1]))


def averaged(*gradients, rows=None):
    """The average of one gradient per tower."""
    return mt.average_gradients([[(g, V)] for g in gradients], rows)[0][0]


def test_dense_gradients_are_averaged():
    np.testing.assert_allclose(averaged(tf.fill([5, 1], 1.0), tf.fill([5, 1], 4.0)), np.full([5, 1], 2.5))
    np.testing.assert_allclose(
        averaged(tf.fill([5, 1], 1.0), tf.fill([5, 1], 4.0), rows=[2, 1]), np.full([5, 1], 2.0), rtol=1e-6
    )


def test_the_variables_are_those_of_the_first_tower():
    other = tf.Variable(tf.zeros([5, 1]))
    pairs = mt.average_gradients([[(tf.ones([5, 1]), V)], [(tf.ones([5, 1]), other)]])
    assert pairs[0][1] is V


def test_slices_stay_slices_and_every_row_stands_once():
    merged = averaged(slices([1, 2, 4], [3, 0, 3]), slices([8], [1]))
    assert isinstance(merged, tf.IndexedSlices)
    assert sorted(merged.indices.numpy()) == [0, 1, 3]
    np.testing.assert_allclose(dense(merged)[:, 0], [1, 4, 0, 2.5, 0])


def test_slices_are_not_those_of_the_first_tower_alone():
    """The control: what concatenating and averaging values with tower 0's indices gives is something else."""
    wrong = tf.IndexedSlices((slices([2], [0]).values + slices([4], [1]).values) / 2, tf.constant([0]), [5, 1])
    assert not np.allclose(dense(averaged(slices([2], [0]), slices([4], [1]))), dense(wrong))


def test_slices_beside_dense_gradients_become_dense():
    np.testing.assert_allclose(averaged(slices([2], [1]), tf.ones([5, 1]))[:, 0], [0.5, 1.5, 0.5, 0.5, 0.5])


def test_none_counts_as_zero():
    assert averaged(None, None) is None
    np.testing.assert_allclose(averaged(None, tf.fill([5, 1], 4.0)), np.full([5, 1], 2.0))
    np.testing.assert_allclose(averaged(slices([4], [2]), None, rows=[1, 3]).values, [[1.0]])


def test_in_a_graph():
    np.testing.assert_allclose(tf.function(lambda: dense_in_graph())(), [[1.0], [4.0], [0], [2.5], [0]])


def dense_in_graph():
    return tf.convert_to_tensor(averaged(slices([1, 2, 4], [3, 0, 3]), slices([8], [1])))


@pytest.mark.parametrize(
    ("towers", "rows", "message"),
    [
        ([], None, "got lists of \\[\\] pairs"),
        ([[(None, V)], []], None, "got lists of \\[1, 0\\] pairs"),
        ([[(None, V)], [(None, V)]], [1], "rows=\\[1\\] for 2 towers"),
        ([[(None, V)]], [-1], "rows=\\[-1\\]"),
        ([[(None, V)], [(None, V)]], [0, 0], "rows=\\[0, 0\\]"),
    ],
)
def test_what_cannot_be_averaged(towers, rows, message):
    with pytest.raises(ValueError, match=message):
        mt.average_gradients(towers, rows)


@given(
    st.lists(st.tuples(st.sampled_from(["float32", "float64", "float16"]), st.integers(0, 9)), max_size=12),
    st.integers(1, 60),
)
def test_buckets_hold_each_tensor_once_and_keep_to_the_limit(shapes, limit):
    tensors = [tf.zeros([n], dtype) for dtype, n in shapes]
    found = buckets(tensors, limit)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(tensors)))
    for bucket in found:
        assert len({tensors[i].dtype for i in bucket}) == 1
        assert len(bucket) == 1 or sum((tensors[i].shape[0] or 1) * tensors[i].dtype.size for i in bucket) <= limit
        assert bucket == sorted(bucket, reverse=True)


def gradients_of_towers(n, x):
    """What a step that returns sum_gradients of a hand-made list gets: dense, None, slices with repeated rows."""

    def step(x):
        slices_of_rows = tf.IndexedSlices(x[:, None], tf.cast(x, tf.int32) % 3, tf.constant([5, 1]))
        given = [tf.reduce_mean(x), None, slices_of_rows, tf.fill([2, 3], tf.reduce_mean(tf.cast(x, tf.float64)))]
        number, nothing, rows, matrix = sum_gradients(given)
        assert nothing is None
        return number, tf.convert_to_tensor(rows), matrix

    return mt.replicate(step, cpus(n))(x)


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_sums_are_weighted_by_rows(rows):
    x = tf.range(1.0, rows + 1)
    for n in (1, 2, 3):
        number, sparse, matrix = gradients_of_towers(n, x)
        np.testing.assert_allclose(number, tf.reduce_mean(x), rtol=1e-6)
        np.testing.assert_allclose(matrix, np.full([2, 3], np.mean(x)), rtol=1e-12)
        assert matrix.dtype == "float64"
        weights = np.repeat([len(s) / rows for s in np.array_split(x, n)], [len(s) for s in np.array_split(x, n)])
        expected = np.zeros([5, 1])
        np.add.at(expected[:, 0], np.asarray(x, int) % 3, x * weights)
        np.testing.assert_allclose(sparse, expected, rtol=1e-6)
