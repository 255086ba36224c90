"""Sets of moments as sorted lists of disjoint intervals (start, end), in seconds."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """All moments in any of the intervals, given in any order, overlapping or not.

    Example:
        >>> union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
        [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: Intervals = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Moments in both.

    Example:
        >>> intersection([(0.0, 3.0)], [(1.0, 2.0), (2.5, 4.0)])
        [(1.0, 2.0), (2.5, 3.0)]
    """
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Moments in a and not in b.

    Example:
        >>> difference([(0.0, 4.0)], [(1.0, 2.0), (3.0, 9.0)])
        [(0.0, 1.0), (2.0, 3.0)]
    """
    infinite = float("inf")
    ends = [-infinite, *(end for _, end in b)]
    starts = [*(start for start, _ in b), infinite]
    return intersection(a, list(zip(ends, starts, strict=True)))


def seconds(intervals: Intervals) -> float:
    """How long a set is."""
    return sum(end - start for start, end in intervals)
