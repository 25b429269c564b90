"""The commands ``python -m data_prep digits | office | domainnet | morpho``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from data_prep.images.command import show_image_stores
from data_prep.images.store import SECTIONS
from data_prep.options import take_options
from data_prep.paper.sources import Domain, read_digits, read_domainnet, read_office
from data_prep.paper.splits import Rule
from data_prep.paper.stores import Plan, plan_sites, unseen_domain, write_sites
from data_prep.site_store import default_data_root
from data_prep.terminal import one_sentence_errors, progress_bar, screen, usage_errors

__all__ = ["COMMANDS"]

Share = Annotated[
    float, typer.Option(help="Training images of a site, over the smallest site's training part.")
]
Validation = Annotated[float, typer.Option(help="Validation images, over the same.")]
Smallest = Annotated[
    int | None,
    typer.Option(help="Size of the smallest training part, in place of that at hand.", min=1),
]
Size = Annotated[int, typer.Option(help="Pixels along each side.", min=8)]


@dataclass(frozen=True)
class Place:
    """From where to where."""

    source: Annotated[Path, typer.Option(help="Folder of the collection; nothing is downloaded.")]
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder that gets one store a site. Default: $FEDBN_DATA, else ~/fedbn_data.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0
    force: Annotated[bool, typer.Option("--force", help="Write even if nothing has changed.")] = (
        False
    )


@dataclass(frozen=True)
class Clients:
    """Which clients are made of the domains."""

    parts: Annotated[int, typer.Option(help="Clients that are made of each domain.", min=1)] = 1
    fewer: Annotated[
        bool, typer.Option("--fewer", help="A site with too few images takes all.")
    ] = False
    test_rest: Annotated[
        bool,
        typer.Option("--test-rest", help="Test what is neither trained on nor validated, too."),
    ] = False


def digits(
    place: Place,
    clients: Clients,
    share: Share = 0.1,
    validation: Validation = 0.0,
    smallest: Smallest = 7438,
    size: Size = 28,
) -> None:
    """Make the stores of the paper's digits: MNIST, SVHN, USPS, SynthDigits and MNIST-M."""
    _make("digits", read_digits, place, clients, (share, validation, smallest), size)


def office(
    place: Place,
    clients: Clients,
    share: Share = 0.5,
    validation: Validation = 0.4,
    smallest: Smallest = None,
    size: Size = 256,
) -> None:
    """Make the stores of Office-Caltech10: Amazon, Caltech, DSLR and Webcam."""
    _make("office", read_office, place, clients, (share, validation, smallest), size)


def domainnet(
    place: Place,
    clients: Clients,
    share: Share = 0.05,
    validation: Validation = 0.05,
    smallest: Smallest = None,
    size: Size = 256,
) -> None:
    """Make the stores of DomainNet's ten classes, with its own training and test lists."""
    _make("domainnet", read_domainnet, place, clients, (share, validation, smallest), size)


def morpho(
    place: Place,
    share: Annotated[
        float, typer.Option(help="Images to learn from, over the half that is not tested.")
    ] = 1.0,
    size: Size = 28,
) -> None:
    """Make Morpho-MNIST, a client that took no part: MNIST's test digits, transformed."""

    def read(folder: Path) -> list[Domain]:
        mnist = read_digits(folder)[0]
        return [unseen_domain(mnist, mixture, place.seed) for mixture in ("global", "local")]

    _make("morpho", read, place, Clients(), (share, 0.0, None), size)


COMMANDS = [one_sentence_errors(take_options(c)) for c in (digits, office, domainnet, morpho)]


def _make(
    collection: str,
    read: Callable[[Path], Sequence[Domain]],
    place: Place,
    clients: Clients,
    shares: tuple[float, float, int | None],
    size: int,
) -> None:
    with usage_errors():
        rule = Rule(*shares, fewer=clients.fewer, test_rest=clients.test_rest)
        plan = Plan(collection, rule, size, place.seed, clients.parts)
    root = place.out or default_data_root()
    sites = plan_sites(read(place.source), plan)
    stores, unchanged = [], []
    with progress_bar(f"{collection}: writing", len(sites)) as step:
        for store, same in write_sites(root, sites, plan, force=place.force):
            stores.append(store)
            unchanged += [store.site] if same else []
            step()
    show_image_stores(stores, unchanged=unchanged)
    for site, (_, sides) in sites.items():
        parts = ", ".join(f"{len(rows)} {name}" for name, rows in zip(SECTIONS, sides, strict=True))
        screen.print(f"{site}: {parts}", markup=False, soft_wrap=True)
