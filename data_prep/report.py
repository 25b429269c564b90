"""What a command has made: tables and warnings on the screen."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from data_prep.participants import JoinedSite
from data_prep.quality import Exclusion
from data_prep.site_store import SiteStore
from data_prep.synthetic import NOTE
from data_prep.terminal import errors, screen

__all__ = ["SiteReport", "show_stores", "warn"]


def warn(sentence: str) -> None:
    """Show a warning on stderr."""
    errors.print(f"warning: {sentence}", style="yellow", markup=False, soft_wrap=True)


class SiteReport:
    """What was found, kept and left out at each site; printed at the end."""

    def __init__(self) -> None:
        self._stores: list[SiteStore] = []
        self._rows: list[tuple[str, ...]] = []
        self._left_out: list[tuple[str, Exclusion]] = []
        self._unchanged: list[str] = []
        self._too_small: list[str] = []

    def add(self, store: SiteStore, unchanged: bool, join: JoinedSite | None = None) -> None:
        """Add one site: its store, whether it was there already, and who was matched."""
        counts = store.description["counts"]
        expected = join.expected if join else counts["found"]
        row = (expected, *(counts[name] for name in ("found", "excluded", "kept")))
        self._rows.append(
            (store.site, *map(str, row), _diagnoses(store), f"{len(store.connectomes):,}")
        )
        excluded = [Exclusion(**entry) for entry in store.description["excluded"]]
        excluded += [Exclusion(*entry) for entry in (join.dropped if join else ())]
        self._left_out += [(store.site, e) for e in excluded]
        self._stores.append(store)
        if unchanged:
            self._unchanged.append(store.site)

    def leave_out(self, reason: str) -> None:
        """Add a site that gets no store; the reason names it."""
        self._too_small.append(reason)

    def show(self, root: Path) -> None:
        """Print every exclusion with its reason, then the counts."""
        if self._left_out:
            table = Table("site", "subject", "reason", "detail", title="Left out")
            for site, e in self._left_out:
                row = (site, e.participant_id, e.reason, e.detail)
                table.add_row(*map(escape, row))  # may hold brackets
            screen.print(table)
        synthetic = any(store.synthetic for store in self._stores)
        table = Table(title="Site stores" + (" (SYNTHETIC)" if synthetic else ""))
        for name in ("site", "expected", "found", "left out", "kept"):
            table.add_column(name, justify="left" if name == "site" else "right")
        table.add_column("autism / control", justify="right")
        table.add_column("connectomes", justify="right")
        for cells in self._rows:
            table.add_row(*map(escape, cells))
        screen.print(table)
        if synthetic:
            screen.print(NOTE)
        if self._unchanged:
            screen.print(
                f"Unchanged, same inputs and settings: {', '.join(self._unchanged)} "
                "(--force writes them again)."
            )
        if self._too_small:
            screen.print("No store, --keep-small makes one where a subject is left:")
        for reason in self._too_small:
            screen.print(f"  {reason}", soft_wrap=True, markup=False)
        screen.print(f"In {root}", soft_wrap=True, markup=False)
        for store in self._stores:
            _warn_of_one_diagnosis(store)


def _diagnoses(store: SiteStore) -> str:
    autism = int(store.labels.sum())
    return f"{autism} / {len(store.labels) - autism}"


def _warn_of_one_diagnosis(store: SiteStore) -> None:
    if len(names := {p.diagnosis for p in store.participants}) == 1:
        warn(
            f"site {store.site!r} has one diagnosis only ({len(store.labels)} of {names.pop()}); "
            "training needs both, so this site can only be an external one"
        )


def show_stores(stores: Sequence[SiteStore]) -> None:
    """Print what stores that fit together hold, and in what they differ all the same."""
    table = Table("site", "subjects", "autism / control", "connectomes", "volumes")
    for store in stores:
        shortest, longest = _lengths(store)
        table.add_row(
            escape(store.site) + (" (SYNTHETIC)" if store.synthetic else ""),
            str(len(store.labels)),
            _diagnoses(store),
            f"{len(store.connectomes):,} x {store.n_edges}",
            f"{shortest}" if shortest == longest else f"{shortest} to {longest}",
        )
    screen.print(table)
    settings = stores[0].description["connectome"]
    window = settings["window"] and f"windows of {settings['window']}, stride {settings['stride']}"
    if seconds := settings.get("window_seconds"):
        window = f"windows of {seconds:g} s, stride {settings['stride']}"
    for line in (
        f"Atlas: {stores[0].description['atlas']}",
        f"Connectomes: {settings['kind']}, {settings['estimator']}, {window or 'whole scans'}",
    ):
        screen.print(line, soft_wrap=True, markup=False)
    fit = f"{len(stores)} stores are valid and fit together." if len(stores) > 1 else "Valid."
    screen.print(fit)
    for store in stores:
        _warn_of_lengths(store)
    _warn_of_repetition_times(stores)


def _lengths(store: SiteStore) -> tuple[int, int]:
    lengths = [p.n_timepoints for p in store.participants]
    return min(lengths), max(lengths)


def _warn_of_lengths(store: SiteStore) -> None:
    counts = store.description.get("subjects_by_n_timepoints", {})
    if len(counts) > 1:
        named = ", ".join(f"{n} of {volumes} volumes" for volumes, n in counts.items())
        warn(f"site {store.site!r} mixes lengths ({named}): a longer scan has more windows")


def _warn_of_repetition_times(stores: Sequence[SiteStore]) -> None:
    """Say so if windows of as many volumes are other times at other sites, or inside one."""
    times: dict[float, list[str]] = {}
    for store in stores:
        one = store.description.get("repetition_time_s")
        several = [] if one is None else [one]
        for tr in store.description.get("repetition_times_s", several):
            times.setdefault(tr, []).append(store.site)
    settings = [store.description["connectome"] for store in stores]
    if len(times) < 2 or not settings[0]["window"] or "window_seconds" in settings[0]:
        return
    window = settings[0]["window"]
    named = "; ".join(
        f"{window * tr:.3g} s at {', '.join(sites)}" for tr, sites in sorted(times.items())
    )
    warn(f"repetition times differ, so windows of {window} volumes are {named} (--window-seconds)")
