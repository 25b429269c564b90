"""A small experiment on made-up images of two scanners."""

FLIP = {"_target_": "RandFlipd", "keys": ["image", "label"], "prob": 0.5, "spatial_axis": 0}
EXPERIMENT = {
    "task": {
        "name": "segmentation",
        "classes": ["organ", "core"],
        "preprocessing": [
            {"_target_": "LoadImaged", "keys": ["image", "label"]},
            {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]},
            {"_target_": "ScaleIntensityd", "keys": "image"},
        ],
        "augmentation": [FLIP, {"_target_": "RandGaussianNoised", "keys": "image", "prob": 1.0}],
    },
    "sites": ["NORTH", "EAST"],
    "network": {
        "name": "UNet",
        "args": {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 3,
            "channels": [4, 8],
            "strides": [2],
            "norm": "batch",
        },
    },
    "rounds": 1,
    "training": {"batch_size": 4},
    "statistics": "recomputed",
    "validation": {"share": 0.2},
}
