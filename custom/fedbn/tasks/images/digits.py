"""Samples of the FedBN paper's digits as rows, for studies that need no network."""

from pathlib import Path

import numpy as np

from data_prep.paper.sources import read_digits


def digit_rows(folder: Path, n_rows: int) -> list[np.ndarray]:
    """Draw pixels in [-1, 1] of the five digit domains, each (at most `n_rows`, 28 * 28 * 3)."""
    clients = []
    for i, domain in enumerate(read_digits(folder)):
        rows = np.random.default_rng([1, i]).permutation(len(domain.labels))[:n_rows]
        images = np.stack(list(domain.images(rows, 28))).reshape(len(rows), -1)
        clients.append(images / 127.5 - 1)
    return clients
