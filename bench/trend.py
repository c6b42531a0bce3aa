"""Whether a quantity that was looked at again and again stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Neighbours in time are alike, so a line through single samples would look far surer than it is: it goes through means of these.
BLOCKS = 12


@dataclass(frozen=True)
class Trend:
    """A line through the means of BLOCKS parts of the time. drift: the slope times the whole time, in the quantity's unit."""

    slope_per_minute: float
    standard_error: float
    drift: float
    first: float
    last: float
    most: float

    def grows(self, *, tolerance: float) -> bool:
        """Rises by more than two standard errors of the slope, and by more than `tolerance` over the whole time."""
        return bool(self.slope_per_minute > 2 * self.standard_error and self.drift > tolerance)


def trend(seconds: ArrayLike, values: ArrayLike) -> Trend:
    """The trend of values at these moments, ascending. Raises ValueError for fewer than 6, whose noise cannot be told."""
    t, y = np.asarray(seconds, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(t) < 6:
        raise ValueError(f"expected at least 6 samples after the warm-up, found {len(t)}; let the run take longer")
    blocks = min(BLOCKS, len(t) // 2)
    at = np.array([part.mean() for part in np.array_split(t, blocks)]) / 60
    mean = np.array([part.mean() for part in np.array_split(y, blocks)])
    centred = at - at.mean()
    slope = float((centred * mean).sum() / (centred**2).sum())
    rest = mean - mean.mean() - slope * centred
    error = float(np.sqrt((rest**2).sum() / (blocks - 2) / (centred**2).sum()))
    return Trend(slope, error, slope * (t[-1] - t[0]) / 60, float(y[0]), float(y[-1]), float(y.max()))


def floor_rise(values: ArrayLike) -> float:
    """The smallest of the last quarter less the smallest of the first: what comes and goes does not count."""
    y = np.asarray(values, dtype=np.float64)
    quarter = max(1, len(y) // 4)
    return float(y[-quarter:].min() - y[:quarter].min())
