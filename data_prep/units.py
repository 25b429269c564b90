"""What a split is made of: a patient, who is never on both of its sides."""

from typing import NamedTuple

__all__ = ["Unit"]


class Unit(NamedTuple):
    """One patient of a site.

    Attributes
    ----------
    id : str
        As the site names the patient; never leaves the site.
    stratum : str or None
        The class that folds are stratified by, if there is one.
    n_samples : int
        Number of images, or of connectomes.
    fold : int or None
        Test fold where folds were fixed beforehand.
    """

    id: str
    stratum: str | None
    n_samples: int
    fold: int | None
