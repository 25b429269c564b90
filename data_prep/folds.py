"""Folds by subject, stratified by diagnosis."""

from collections.abc import Sequence

import numpy as np

from data_prep.errors import StoreError

__all__ = ["assign_folds"]


def assign_folds(
    participant_ids: Sequence[str],
    diagnosis: Sequence[object] | np.ndarray,
    n_folds: int,
    seed: int,
    *,
    site: str | None = None,
) -> np.ndarray:
    """Divide subjects into folds, stratified by diagnosis.

    The same folds as scikit-learn's ``StratifiedKFold(n_folds, shuffle=True, random_state=seed)``
    on the subjects sorted by id, without the seconds that importing scikit-learn costs. A subject
    is in exactly one fold, with all of its windows, whatever the order of the rows.

    Parameters
    ----------
    participant_ids : sequence of str, length n
        Subjects, each once.
    diagnosis : sequence, length n
        Class of each subject, in any coding.
    n_folds : int
        Number of folds, at least 2.
    seed : int
        Seed of the shuffle.
    site : str, optional
        Named in messages.

    Returns
    -------
    np.ndarray, int64, shape (n,)
        Fold of each subject, 0 to ``n_folds - 1``, in the order given.

    Raises
    ------
    StoreError
        If there is one class only, or fewer subjects of a class than folds.
    """
    ids = [str(i) for i in participant_ids]
    where = f"site {site!r}" if site else "this site"
    if n_folds < 2:
        raise StoreError(f"n_folds is {n_folds}; at least 2 are needed")
    if len(set(ids)) != len(ids) or len(ids) != len(diagnosis):
        raise StoreError(f"{where}: folds need each subject once, with one diagnosis")
    order = np.argsort(np.array(ids, dtype=str), kind="stable")
    classes = [str(diagnosis[i]) for i in order]
    names, encoded = np.unique(np.array(classes, dtype=str), return_inverse=True)
    counts = np.bincount(encoded, minlength=len(names))
    listed = ", ".join(f"{n} of {name}" for name, n in zip(names, counts, strict=True))
    if len(names) < 2:
        raise StoreError(
            f"{where} has one diagnosis only ({listed or 'no subjects'}); training needs both"
        )
    if counts.min() < n_folds:
        raise StoreError(
            f"{where} has {len(ids)} subjects ({listed}), too few for {n_folds} folds: each "
            "diagnosis needs at least one subject a fold"
        )
    # Classes are numbered by first appearance, and each fold gets every n-th of the sorted list.
    _, first = np.unique(encoded, return_index=True)
    rank = np.argsort(np.argsort(first))
    encoded = rank[encoded]
    in_order = np.sort(encoded)
    share = np.stack(
        [np.bincount(in_order[f::n_folds], minlength=len(names)) for f in range(n_folds)]
    )
    generator = np.random.RandomState(seed)
    sorted_folds = np.empty(len(ids), dtype=np.int64)
    for k in range(len(names)):
        of_class = np.repeat(np.arange(n_folds), share[:, k])
        generator.shuffle(of_class)
        sorted_folds[encoded == k] = of_class
    folds = np.empty(len(ids), dtype=np.int64)
    folds[order] = sorted_folds
    return folds
