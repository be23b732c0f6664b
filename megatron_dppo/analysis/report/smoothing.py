"""Smooths curves by local linear regression: a level or a straight line stays as it is, to the first point.

A kernel's plain average bends both ends of a curve towards the middle, so that runs with one beginning seem to
begin apart. The regression has no such bias (Fan and Gijbels, Local Polynomial Modelling, 1996, section 3.2).
"""

from collections.abc import Sequence

import numpy as np

SIGMA = 2.0  # points, of the Gaussian kernel
MIN_POINTS = 10  # fewer are drawn as they are


def smoothed(values: Sequence[float], x: Sequence[float] | None = None, *, log: bool = False) -> list[float]:
    """Return [P] smoothed values within the range of the given ones; values that are not finite do not count.

    Args:
        values: [P], in the order of x.
        x: [P] positions, such as rollouts. `None` means 0, 1, 2, ... The kernel counts points, not distances.
        log: Smooth logarithms, as a logarithmic axis shows them; all values are positive.
    """
    known = np.asarray(values, dtype=np.float64)
    is_known = np.isfinite(known)
    if not is_known.any():
        return [float("nan")] * known.size
    y = np.where(is_known, known, 1.0)
    y = np.log(y) if log else y
    order = np.arange(known.size)
    places = np.asarray(order if x is None else x, dtype=np.float64)
    weights = np.exp(-0.5 * ((order[:, None] - order) / SIGMA) ** 2) * is_known  # [P, P], a row for each point
    distances = places - places[:, None]
    total, first, second = (np.sum(weights * distances**power, axis=1) for power in (0, 1, 2))
    determinant = total * second - first**2
    linear = second[:, None] - first[:, None] * distances  # [P, P]
    is_line = determinant > 1e-9 * total * second  # else fewer than two points are near
    factors = np.where(is_line[:, None], linear, 1.0) * weights
    sums = factors.sum(axis=1)
    mean = (factors @ y) / np.where(sums == 0, 1.0, sums)
    mean = np.clip(mean, y[is_known].min(), y[is_known].max())
    return np.where(sums == 0, np.nan, np.exp(mean) if log else mean).tolist()
