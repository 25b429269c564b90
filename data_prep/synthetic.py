"""A made-up cohort of hospitals, to try federated training without any patient's data.

Every subject is a set of ROI time series, which then goes through the same connectome code as a
real scan. A correlation does not change with the gain and offset of a signal, so a scanner that
only scaled its signals would leave no trace. What differs between the sites here does survive:

- a global component (breathing, drift) of site-specific strength, an *offset* of connectivity;
- measurement noise of site-specific strength, a *gain* below one on every correlation;
- a component with a site-specific pattern over the ROIs, an *ROI-wise covariance*;
- a site-specific weight of the very signal that the disease touches, so that the same connectivity
  means health at one site and disease at another;
- gain and offset of each ROI's raw signal as well, which the connectome removes.

The disease is one and the same everywhere: in autism, one set of ROIs shares more of a common
signal. Half of the subjects at every site are patients, so no method can gain from knowing a
site's prevalence. Everything follows from the seed.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from data_prep.harvard_oxford import ROIS
from data_prep.names import check_site_name
from data_prep.participants import Subject

__all__ = [
    "GENERATOR_VERSION",
    "NOTE",
    "SITES",
    "Acquisition",
    "Site",
    "generate_site",
    "hospital",
]

NOTE = "Synthetic: made up by a random generator, no subject of this store exists."

# To be raised whenever the same seed gives other numbers.
GENERATOR_VERSION = 1

N_NETWORKS = 10
N_DISEASE_ROIS = 24
# Weight of the disease's common signal: mean in controls, what autism adds, spread over subjects.
DISEASE_BASE, DISEASE_EFFECT, DISEASE_SPREAD = 0.35, 0.4, 0.12
# How far a subject's own network loadings stray from the population's.
SUBJECT_SPREAD = 0.2
# Correlation of a signal with itself one time point later.
SMOOTHNESS = 0.5


@dataclass(frozen=True)
class Acquisition:
    """What a hospital's scanner adds to the brain's signal, in units of that signal.

    Attributes
    ----------
    global_strength : float
        Weight of a component common to all ROIs.
    noise : float
        Standard deviation of independent noise.
    mixing : float
        Weight of a component with a site-specific pattern over the ROIs.
    confounding : float
        Added to the weight of the signal that the disease touches, in every subject of the site:
        a healthy subject here may look like a patient elsewhere.
    """

    global_strength: float
    noise: float
    mixing: float
    confounding: float


@dataclass(frozen=True)
class Site:
    """One hospital of the cohort: its size, its scan length and its scanner."""

    n_subjects: int
    n_timepoints: int
    acquisition: Acquisition


SITES: Mapping[str, Site] = {
    "NYU": Site(52, 112, Acquisition(0.2, 0.5, 0.3, 0.0)),
    "USM": Site(40, 96, Acquisition(0.9, 0.5, 0.6, 0.7)),
    "UM": Site(44, 112, Acquisition(0.1, 0.7, 0.5, -0.1)),
    "UCLA": Site(40, 80, Acquisition(0.5, 0.3, 0.8, 0.6)),
}
WITHOUT_SHIFT = Acquisition(0.4, 0.5, 0.4, 0.2)


def hospital(name: str) -> Site:
    """Return one of `SITES`, or another hospital, whose name decides what it is.

    Parameters
    ----------
    name : str
        Any name that a site may have.

    Returns
    -------
    Site

    Raises
    ------
    ValueError
        If no site can have this name.
    """
    check_site_name(name)
    if name in SITES:
        return SITES[name]
    rng = np.random.default_rng(_number(name))
    scanner = rng.uniform([0.1, 0.3, 0.3, -0.1], [0.9, 0.7, 0.8, 0.7])
    return Site(
        int(rng.integers(40, 53)), int(rng.integers(80, 113)), Acquisition(*scanner.tolist())
    )


def _number(name: str) -> int:
    """Return what tells a hospital's random streams from those of the others."""
    if name in SITES:
        return list(SITES).index(name) + 1
    return len(SITES) + 2 + zlib.crc32(name.encode())


@dataclass(frozen=True)
class _Population:
    """What sites have in common: networks (n_rois, N_NETWORKS), disease pattern (n_rois,)."""

    loadings: np.ndarray
    disease: np.ndarray


def _population(seed: int) -> _Population:
    rng = np.random.default_rng([seed, 0])
    n_rois = len(ROIS)
    loadings = 0.1 * rng.standard_normal((n_rois, N_NETWORKS))
    loadings[np.arange(n_rois), rng.integers(N_NETWORKS, size=n_rois)] += rng.uniform(
        0.5, 0.9, n_rois
    )
    disease = np.zeros(n_rois)
    disease[rng.choice(n_rois, N_DISEASE_ROIS, replace=False)] = rng.choice(
        [-1.0, 1.0], N_DISEASE_ROIS
    )
    return _Population(loadings, disease)


def _signals(rng: np.random.Generator, n_timepoints: int, n_signals: int) -> np.ndarray:
    """Return smooth random signals of unit variance, (n_timepoints, n_signals)."""
    x = rng.standard_normal((n_timepoints, n_signals))
    for t in range(1, n_timepoints):
        x[t] = SMOOTHNESS * x[t - 1] + np.sqrt(1 - SMOOTHNESS**2) * x[t]
    return x


def generate_site(
    name: str, *, seed: int = 0, n_subjects: int | None = None, shift: bool = True
) -> Iterator[Subject]:
    """Generate the subjects of one synthetic hospital.

    Parameters
    ----------
    name : str
        One of `SITES`, or of any other `hospital`.
    seed : int
        Seed of the cohort; a site's subjects do not depend on which other sites are generated,
        nor do its first subjects on how many follow.
    n_subjects : int, optional
        By default the site's own number; patients and controls alternate.
    shift : bool
        Whether the sites' scanners differ; without it all have the same.

    Yields
    ------
    Subject
        With a series of shape (n_timepoints, 111).
    """
    number, site = _number(name), hospital(name)
    acquisition = site.acquisition if shift else WITHOUT_SHIFT
    population = _population(seed)
    n_rois = len(ROIS)
    scanner = np.random.default_rng([seed, number if shift else len(SITES) + 1, 0])
    global_pattern = scanner.uniform(0.5, 1.5, n_rois)
    mixing_pattern = scanner.standard_normal(n_rois)
    noise = acquisition.noise * scanner.uniform(0.6, 1.4, n_rois)
    gain, offset = scanner.uniform(5.0, 20.0, n_rois), scanner.normal(0.0, 50.0, n_rois)
    for index in range(n_subjects or site.n_subjects):
        rng = np.random.default_rng([seed, number, index + 1])
        autism = index % 2 == 1
        loadings = population.loadings + SUBJECT_SPREAD * rng.standard_normal(
            population.loadings.shape
        )
        weight = DISEASE_BASE + DISEASE_EFFECT * autism + DISEASE_SPREAD * rng.standard_normal()
        weight += acquisition.confounding
        n_timepoints = site.n_timepoints
        x = _signals(rng, n_timepoints, N_NETWORKS) @ loadings.T
        x += _signals(rng, n_timepoints, 1) * (weight * population.disease)
        x += 0.5 * _signals(rng, n_timepoints, n_rois)
        x += acquisition.global_strength * _signals(rng, n_timepoints, 1) * global_pattern
        x += acquisition.mixing * _signals(rng, n_timepoints, 1) * mixing_pattern
        x += noise * rng.standard_normal((n_timepoints, n_rois))
        yield Subject(
            participant_id=f"sub-{name}{index + 1:04d}",
            diagnosis="autism" if autism else "control",
            age=round(float(rng.uniform(7.0, 40.0)), 2),
            sex="F" if rng.random() < 0.15 else "M",
            site=name,
            series=gain * x + offset,
        )
