"""The command ``python -m data_prep images``."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from data_prep.compatibility import check_compatible
from data_prep.errors import StoreError
from data_prep.images.store import (
    COPIES,
    TABLES,
    ImageStore,
    is_image_store,
    read_image_store,
    signature_differences,
)
from data_prep.images.synthetic import (
    CLASSES,
    GENERATOR_VERSION,
    LABELS,
    NOTE,
    Cohort,
    write_synthetic_images,
)
from data_prep.names import check_site_name
from data_prep.options import check_mismatch, refuse_taken_apart
from data_prep.site_store import default_data_root
from data_prep.store_folder import refuse_foreign_folder
from data_prep.terminal import one_sentence_errors, progress_bar, screen, usage_errors

__all__ = ["check_image_stores", "images", "show_image_stores", "synthetic_images"]

# Rows of the table of what was left out; the store's description has all of them.
SHOWN = 30


@one_sentence_errors
def images(
    context: typer.Context,
    site: Annotated[str, typer.Option(help="Name of this hospital; its store gets this name.")],
    datalist: Annotated[
        Path | None,
        typer.Option(help="Decathlon data list, as MONAI reads it: dataset.json.", exists=True),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Instead: pattern of the images, in quotation marks: 'image/*.png'."),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Pattern of the masks; the * stand for the same text as in --images."),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(help="Table of the images' classes: columns image and class.", exists=True),
    ] = None,
    class_column: Annotated[str, typer.Option(help="Column of the table of classes.")] = "class",
    class_names: Annotated[
        str | None,
        typer.Option(help="The classes in their order, separated by commas; others are left out."),
    ] = None,
    participants: Annotated[
        Path | None,
        typer.Option(help="Table of whose image it is: image and participant_id.", exists=True),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="COLUMN=VALUE: only these rows of the tables.")
    ] = None,
    label_names: Annotated[
        str | None,
        typer.Option(help="Names of the label ids from 0 on: background,cytoplasm,nucleus."),
    ] = None,
    label_map: Annotated[
        str | None,
        typer.Option(help="What ids in the masks' files stand for: 255=1,128=2. No file changes."),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(help="Folder that the list's paths are relative to. Default: the list's."),
    ] = None,
    channel_axis: Annotated[
        str, typer.Option(help="Channels of NumPy arrays: none, first or last.")
    ] = "none",
    mismatch: Annotated[
        str,
        typer.Option(
            help="Files that are missing, images without mask or row: error, or drop and list."
        ),
    ] = "error",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the images into the store.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder that gets the store. Default: $FEDBN_DATA, else ~/fedbn_data."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write even if nothing has changed.")
    ] = False,
) -> None:
    """Make the image store of a hospital from its images and masks or classes."""
    from data_prep.images.datalist import find_images, read_datalist, read_table_column
    from data_prep.images.preparation import ImageSettings, prepare_images
    from data_prep.images.reading import CHANNEL_AXES

    with usage_errors():
        refuse_taken_apart(context, "--images or --labels")
        check_site_name(site)
        check_mismatch(mismatch)
        if (datalist is None) == (images is None):
            raise ValueError("name the images with --datalist, or with --images; one of both")
        if labels and images is None:
            raise ValueError("--labels needs --images; a data list names its masks itself")
        if root is not None and datalist is None:
            raise ValueError("--root needs --datalist")
        if channel_axis not in CHANNEL_AXES:
            allowed = ", ".join(CHANNEL_AXES)
            raise ValueError(f"channel axis is {channel_axis!r}; allowed are {allowed}")
        mapped = _label_map(label_map)
        named = _names(label_names, "--label-names")
        wanted = _names(class_names, "--class-names")
    folder = (out or default_data_root()) / site
    refuse_foreign_folder(folder, [*TABLES, COPIES])
    problems: dict[str, Sequence[str]] = {}
    if images is None:
        assert datalist is not None
        found = read_datalist(datalist, root)
        trained = [e for e in found.entries if e.class_name is None]
        if any(e.label for e in trained):
            problems["without a mask"] = [e.name for e in trained if e.label is None]
    else:
        found, without_mask, without_image = find_images(images, labels)
        problems |= {"without a mask": without_mask, "mask without an image": without_image}
    notes = []
    for file, column, field in (
        (classes, class_column, "class_name"),
        (participants, "participant_id", "participant_id"),
    ):
        if file is not None:
            values = read_table_column(file, column, rows)
            found, without_row, without_image = found.with_column(field, file, values)
            problems[f"without a row in {file.name}"] = without_row
            if without_image:
                notes.append(
                    f"{len(without_image)} row(s) of {file.name} name no image here, such as "
                    f"{without_image[0]}"
                )
    found, left_out = found.without(problems, drop=mismatch == "drop", site=site)
    ids: dict[int, str | None] | None = dict(enumerate(named)) if named else found.label_names
    settings = ImageSettings(ids, wanted, mapped, channel_axis, copy)
    with progress_bar(f"{site}: reading", 2 * len(found.entries)) as step:
        store, unchanged = prepare_images(
            folder,
            site=site,
            datalist=found,
            settings=settings,
            source={"name": "data list" if images is None else "patterns of file names"},
            left_out=left_out,
            notes=notes,
            force=force,
            progress=step,
        )
    show_image_stores([store], unchanged=[site] if unchanged else [])


def synthetic_images(
    context: typer.Context, root: Path, sites: Sequence[str], cohort: Cohort, *, force: bool
) -> None:
    """Make the image stores of made-up sites; the options of connectomes are refused."""
    from data_prep.images.preparation import ImageSettings, prepare_images

    with usage_errors():
        given = [
            name
            for name in context.params
            if name
            not in ("out", "sites", "seed", "subjects", "no_shift", "images", "dim", "force")
            and (source := context.get_parameter_source(name))
            and source.name == "COMMANDLINE"
        ]
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} is for connectomes, not for --images")
    stores, unchanged = [], []
    for site in sites:
        folder = root / site
        refuse_foreign_folder(folder, [*TABLES, COPIES])
        if is_image_store(folder) and not read_image_store(folder).synthetic:
            raise StoreError(
                f"{folder} holds real data of site {site!r}; synthetic data do not replace it: "
                "name another place with --out"
            )
        with TemporaryDirectory() as temporary:
            store, same = prepare_images(
                folder,
                site=site,
                datalist=write_synthetic_images(Path(temporary), site, cohort),
                settings=ImageSettings(dict(LABELS), CLASSES, copy=True),
                source={"name": "synthetic images", "version": GENERATOR_VERSION} | asdict(cohort),
                synthetic=True,
                force=force,
            )
        stores.append(store)
        unchanged += [site] if same else []
    show_image_stores(stores, unchanged=unchanged)
    screen.print(NOTE)


def _names(text: str | None, option: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if len(names) < 2 or not all(names) or len({name.lower() for name in names}) < len(names):
        raise ValueError(f"{option} is {text!r}; write at least two names, separated by commas")
    return names


def _label_map(text: str | None) -> dict[int, int]:
    pairs = [part.split("=") for part in (text or "").split(",") if part.strip()]
    if any(len(pair) != 2 or not all(p.strip().isdecimal() for p in pair) for pair in pairs):
        raise ValueError(f"--label-map is {text!r}; write ids as 255=1,128=2")
    return {int(old): int(new) for old, new in pairs}


def check_image_stores(paths: Sequence[Path], folds: int, *, quick: bool) -> None:
    """Validate image stores, and say whether several fit together and where they are far apart."""
    from data_prep.images.comparing import check_folds, far_apart

    stores = []
    with progress_bar("checking", len(paths)) as step:
        for path in paths:
            stores.append(read_image_store(path, verify=not quick))
            step()
    check_compatible(stores, signature_differences)
    if folds:
        for store in stores:
            check_folds(store, folds)
    show_image_stores(stores)
    for sentence in far_apart(stores):
        screen.print(sentence, style="yellow", markup=False, soft_wrap=True)
    fit = f"{len(stores)} stores are valid and fit together." if len(stores) > 1 else "Valid."
    screen.print(fit)


def show_image_stores(stores: Sequence[ImageStore], *, unchanged: Sequence[str] = ()) -> None:
    """Print what was left out and why, what is worth a look, and a row a site."""
    left_out = [(store.site, entry) for store in stores for entry in store.description["left_out"]]
    if left_out:
        table = Table("site", "image", "reason", "detail", title="Left out")
        for site, entry in left_out[:SHOWN]:
            table.add_row(*map(escape, (site, entry["image"], entry["reason"], entry["detail"])))
        screen.print(table)
        if len(left_out) > SHOWN:
            screen.print(
                f"... and {len(left_out) - SHOWN} more, in dataset_description.json of the store"
            )
    synthetic = any(store.synthetic for store in stores)
    table = Table(title="Image stores" + (" (SYNTHETIC)" if synthetic else ""))
    table.add_column("site")
    for name in ("found", "kept", "patients", "channels", "size", "mm"):
        table.add_column(name, justify="right")
    for store in stores:
        counts, summary = store.description["counts"], store.description["summary"]
        table.add_row(
            escape(store.site),
            *(str(counts[name]) for name in ("found", "kept", "patients")),
            str(store.channels),
            _range(summary["shape"]),
            _range(summary["spacing"]) if summary["spacing"] else "unknown",
        )
    screen.print(table)
    contents = {store.site: _contents(store) for store in stores}
    for text in dict.fromkeys(contents.values()):
        which = [site for site, other in contents.items() if other == text]
        screen.print(f"{', '.join(which)}: {text}", markup=False, soft_wrap=True)
    for store in stores:
        for note in store.description["notes"]:
            screen.print(f"{store.site}: {note}", style="yellow", markup=False, soft_wrap=True)
    if unchanged:
        screen.print(
            f"Unchanged, same files and settings: {', '.join(unchanged)} (--force writes again)."
        )
    if stores:
        screen.print(f"In {stores[0].path.parent}", soft_wrap=True, markup=False)


def _contents(store: ImageStore) -> str:
    """Name labels and classes, and what share of voxels and images they have."""
    summary = store.description["summary"]
    parts = [
        f"{key} {store.description['labels'][key] or '(no name)'} {found['fraction']:.1%}"
        for key, found in (summary["labels"] or {}).items()
    ]
    parts += [f"{name} {count} images" for name, count in (summary["classes"] or {}).items()]
    return ", ".join(parts) or "no labels"


def _range(spread: dict[str, list[float]]) -> str:
    low, high = ("x".join(f"{value:g}" for value in spread[end]) for end in ("min", "max"))
    return low if low == high else f"{low} to {high}"
