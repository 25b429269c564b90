"""What several tests of studies compare by."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session")
def same_scores():
    """Whether two scores are the same to the bit, parts and facts included."""

    def same(first, second):
        a, b = first.arrays(), second.arrays()
        return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)

    return same
