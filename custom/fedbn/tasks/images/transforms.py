"""MONAI's transforms, losses and inferers from a job's JSON, by ``_target_`` from an allow-list.

A job comes from elsewhere, so nothing of it is evaluated and nothing is looked up by a path that it
names: ``_target_`` must be a name that stands here, and arguments are plain JSON. MONAI is imported
when something is built, and not when an experiment is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entry = dict[str, Any]
"""``{"_target_": name, argument: value, ...}``."""

LOADERS = ("LoadImaged", "EnsureChannelFirstd")
"""What a list of transforms may begin with; a site reads its images itself, in the same way."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DETERMINISTIC = _words("""
    AsDiscreted BorderPadd CastToTyped CenterSpatialCropd ClipIntensityPercentilesd CropForegroundd
    DivisiblePadd EnsureTyped Flipd GaussianSmoothd HistogramNormalized LabelToMaskd MaskIntensityd
    MedianSmoothd NormalizeIntensityd Orientationd RepeatChanneld ResizeWithPadOrCropd Resized
    Rotate90d ScaleIntensityd ScaleIntensityRangePercentilesd ScaleIntensityRanged
    ShiftIntensityd Spacingd SpatialPadd SqueezeDimd ThresholdIntensityd Transposed
""")
RANDOM = _words("""
    Rand2DElasticd Rand3DElasticd RandAdjustContrastd RandAffined RandAxisFlipd RandBiasFieldd
    RandCoarseDropoutd RandCropByLabelClassesd RandCropByPosNegLabeld RandFlipd RandGaussianNoised
    RandGaussianSharpend RandGaussianSmoothd RandGibbsNoised RandGridDistortiond RandHistogramShiftd
    RandKSpaceSpikeNoised RandRicianNoised RandRotate90d RandRotated RandScaleCropd
    RandScaleIntensityd RandShiftIntensityd RandSimulateLowResolutiond RandSpatialCropSamplesd
    RandSpatialCropd RandStdShiftIntensityd RandZoomd
""")
LOSSES = _words("""
    DiceLoss DiceCELoss DiceFocalLoss FocalLoss GeneralizedDiceLoss GeneralizedDiceFocalLoss
    TverskyLoss
""")
TORCH_LOSSES = ("CrossEntropyLoss",)
INFERERS = ("SimpleInferer", "SlidingWindowInferer")

ALLOWED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "preprocessing": {"monai.transforms": [*LOADERS, *DETERMINISTIC]},
    "augmentation": {"monai.transforms": [*RANDOM, *DETERMINISTIC]},
    "loss": {"monai.losses": LOSSES, "torch.nn": TORCH_LOSSES},
    "inferer": {"monai.inferers": INFERERS},
}
"""What each field of a task may name, by the module that has it."""

_OF_THE_SITE = ("device", "sw_device", "reader", "num_workers")
_DTYPES = _words("float16 bfloat16 float32 float64 uint8 int16 int32 int64 bool")


def check_entry(field: str, entry: Any) -> Entry:
    """Return an entry that may be built; nothing is imported.

    Raises
    ------
    ValueError
        What is wrong with it, without the path to it.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("_target_"), str):
        raise ValueError(f'give an object with "_target_" and its arguments, got {entry!r:.80}')
    _, name = _find(field, entry["_target_"])
    if name is None:
        known = ", ".join(n for names in ALLOWED[field].values() for n in names)
        raise ValueError(
            f"_target_ {entry['_target_']!r} is not allowed here; {field} may name {known}"
        )
    for key, value in entry.items():
        if key.startswith("_") and key != "_target_":
            raise ValueError(f"{key} has no meaning here; give _target_ and arguments")
        if key in _OF_THE_SITE and name not in LOADERS:
            raise ValueError(f"{name}: {key} is decided by each site; leave it out")
        for text in _texts(value):
            if text.startswith(("$", "@", "%")):
                raise ValueError(
                    f"{name}: {key} is {text!r}: expressions are not evaluated; write the value"
                )
            if key == "dtype" and text not in _DTYPES:
                raise ValueError(f"{name}: dtype is {text!r}; give one of {', '.join(_DTYPES)}")
    return entry


def name_of(entry: Any) -> str:
    """Return the last part of an entry's ``_target_``."""
    return str(entry.get("_target_", "") if isinstance(entry, dict) else "").rpartition(".")[2]


def build(field: str, entry: Entry) -> Any:
    """Build what an entry describes.

    Raises
    ------
    ValueError
        If it is not allowed, or does not take these arguments.
    """
    check_entry(field, entry)
    module, name = _find(field, entry["_target_"])
    assert name is not None
    arguments = {key: _value(key, value) for key, value in entry.items() if key != "_target_"}
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    except Exception as error:
        raise ValueError(
            f"{field}: {name} cannot be built with {arguments!r:.200}: {error}"
        ) from error


def without_loaders(entries: Sequence[Entry]) -> list[tuple[int, Entry]]:
    """Return the entries after the loaders, each with its place in the list."""
    return [(k, entry) for k, entry in enumerate(entries) if name_of(entry) not in LOADERS]


def _find(field: str, target: str) -> tuple[str, str | None]:
    """Return the module and name that a target means, or no name if it is not allowed."""
    given, _, name = target.rpartition(".")
    for module, names in ALLOWED[field].items():
        if name in names and given in ("", module):
            return module, name
    return "", None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _value(key: str, value: Any) -> Any:
    """Return an argument as MONAI takes it: types by name, weights as tensors."""
    import torch

    if key == "dtype":
        types = [getattr(torch, name) if isinstance(name, str) else name for name in _listed(value)]
        return types if isinstance(value, list) else types[0]
    return torch.tensor(value, dtype=torch.float32) if key == "weight" and value else value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
