"""Site stores of the paper's image sets: a domain becomes a client, or several."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.images.stack import Picture, made_from, unchanged_stack, write_stack
from data_prep.images.store import COPIES, SECTIONS, TABLES, ImageStore
from data_prep.paper.sources import DIGIT_STANDIN, Domain
from data_prep.paper.splits import Rule, Sides, SplitError, split_pool, take_sides
from data_prep.store_folder import refuse_foreign_folder

__all__ = ["TEST_SHARE", "Plan", "plan_sites", "unseen_domain", "write_sites"]

TEST_SHARE = 0.2
"""Of a pool, where no split is given."""


@dataclass(frozen=True)
class Plan:
    """How a collection becomes stores.

    Attributes
    ----------
    collection : str
        Name of the collection.
    rule : Rule
        Who trains on what; its ``part`` is replaced where there are several.
    size : int
        Pixels along each side.
    seed : int
        Of the split.
    n_parts : int
        Clients that are made of each domain.
    """

    collection: str
    rule: Rule
    size: int
    seed: int = 0
    n_parts: int = 1

    def __post_init__(self) -> None:
        if self.size < 8 or self.n_parts < 1:
            raise SplitError(
                f"size is {self.size} and parts {self.n_parts}; at least 8 pixels and 1 part"
            )


def plan_sites(domains: Sequence[Domain], plan: Plan) -> dict[str, tuple[Domain, Sides]]:
    """Say which rows each site gets, before anything is written.

    Parameters
    ----------
    domains : sequence of Domain
    plan : Plan

    Returns
    -------
    dict
        Site to its domain and sides. Where a domain becomes several clients they are called
        ``<domain>-1`` and so on, and are tested on the same images.
    """
    parts = {domain.site: _train_and_test(domain, plan.seed) for domain in domains}
    groups = {d.site: d.groups for d in domains if d.groups is not None}
    sites = {}
    for k in range(plan.n_parts):
        rule = replace(plan.rule, part=plan.rule.part + k)
        for domain, sides in zip(domains, take_sides(parts, rule, groups).values(), strict=True):
            name = domain.site if plan.n_parts == 1 else f"{domain.site}-{k + 1}"
            sites[name] = domain, sides
    return sites


def _train_and_test(domain: Domain, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if domain.n_train is None:
        return split_pool(domain.labels, test_share=TEST_SHARE, seed=seed, groups=domain.groups)
    # Published lists are sorted by class; the front of the training part has to be a sample.
    train = np.random.default_rng(seed).permutation(domain.n_train)
    return train, np.arange(domain.n_train, len(domain.labels))


def write_sites(
    root: Path, sites: Mapping[str, tuple[Domain, Sides]], plan: Plan, *, force: bool = False
) -> Iterator[tuple[ImageStore, bool]]:
    """Write one store a site.

    Parameters
    ----------
    root : Path
        Gets a folder a site.
    sites : mapping
        As from :func:`plan_sites`.
    plan : Plan
    force : bool
        Write even if nothing has changed.

    Yields
    ------
    store : ImageStore
    unchanged : bool
        Whether it was there already, made of the same.
    """
    for site in sites:
        refuse_foreign_folder(root / site, [*TABLES, COPIES])
    for site, (domain, sides) in sites.items():
        digest = made_from(site, domain.digest, asdict(plan), [side.tolist() for side in sides])
        store = None if force else unchanged_stack(root / site, digest)
        yield store or _write(root / site, site, domain, sides, plan, digest), store is not None


def _write(
    folder: Path, site: str, domain: Domain, sides: Sides, plan: Plan, digest: str
) -> ImageStore:
    rows = np.concatenate(sides)
    sections = np.repeat(SECTIONS, [len(side) for side in sides])
    return write_stack(
        folder,
        site=site,
        images=domain.images(rows, plan.size),
        pictures=[
            Picture(domain.classes[domain.labels[row]], _unit(domain, row), str(section))
            for row, section in zip(rows.tolist(), sections, strict=True)
        ],
        classes=domain.classes,
        source={
            "name": plan.collection,
            "domain": domain.site,
            "pool": len(domain.labels),
            **{name: value for name, value in asdict(plan).items() if name != "collection"},
        },
        digest=digest,
        left_out=[
            {"image": copy, "reason": "stands twice", "detail": f"is the same as {first}"}
            for copy, first in domain.copies
        ],
        notes=_notes(domain, sides),
    )


def _unit(domain: Domain, row: int) -> str:
    """Name what is on one side of the split: the image, or all images of its group."""
    group = None if domain.groups is None else int(domain.groups[row])
    return f"image-{row:06}" if group is None or group < 0 else f"group-{group:06}"


def _notes(domain: Domain, sides: Sides) -> list[str]:
    notes = []
    if domain.site == DIGIT_STANDIN:
        notes.append("these digits stand in for SynthDigits and are not it: they are easier")
    labels = domain.labels[sides.train]
    absent = [name for k, name in enumerate(domain.classes) if not (labels == k).any()]
    if absent:
        notes.append(f"no training image is of {', '.join(absent)}")
    return notes


def unseen_domain(mnist: Domain, mixture: str, seed: int) -> Domain:
    """Return MNIST's test part, transformed, as a domain of a client that took no part.

    One half is for what the client can learn, such as statistics, the other for its test.

    Parameters
    ----------
    mnist : Domain
        Its training part, of the same seed, is what a federation trains on, and is left out.
    mixture : str
        ``global`` or ``local``.
    seed : int
        Of MNIST's split and of the transformations.
    """
    from data_prep.paper.morpho import MIXTURES, transform

    _, test = _train_and_test(mnist, seed)
    grey = np.stack([image[..., 0] for image in mnist.images(test, 28)])
    changed, _ = transform(grey, MIXTURES[mixture], seed)
    digest = made_from(mnist.digest, mixture, seed, "Morpho-MNIST")

    def read(row: int, size: int) -> np.ndarray:
        from PIL import Image

        picture = Image.fromarray(changed[row]).convert("RGB")
        return np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR))

    labels = mnist.labels[test]
    half = len(labels) // 2
    return Domain(f"Morpho-{mixture}", labels, mnist.classes, None, half, (), digest, read)
