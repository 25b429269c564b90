from __future__ import annotations

import pytest

from fedbn.flare.job import redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 subjects are short (sub-0050285: 20, …)", "3 subjects are short (<subject>: 20, …)"),
        ("'sub-01_ses-2' and sub-ab-12, too", "'<subject>' and <subject>, too"),
        ("no store at /home/ann/data/NYU: make one", "no store at <path>: make one"),
        ("no store at ~/data/NYU", "no store at <path>"),
        (
            "make one with `python -m x --out /a/b` or `sub-01`",
            "make one with `python -m x --out <path>` or `<subject>`",
        ),
        (r"no store at C:\Users\ann\NYU", "no store at <path>"),
        ("see /data/sub-0050285/func.nii.gz.", "see <path>"),
        ("file:///srv/x is gone", "file:<path> is gone"),
        ("a sub-class of 3/4 and mean/std", "a <subject> of 3/4 and mean/std"),
        ("nothing to hide: 66 edges, 2.5 s", "nothing to hide: 66 edges, 2.5 s"),
    ],
)
def test_subjects_and_paths_are_taken_out(text, expected):
    assert redacted(text) == expected


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        ("/mnt/Dr Smith/scans", "no store at /mnt/Dr Smith/scans/NYU: x", "no store at <path>: x"),
        (
            "patients",
            "no store at patients/NYU, --out patients",
            "no store at <path>, --out <path>",
        ),
        ("data", "python -m data_prep, no data/NYU", "python -m data_prep, no <path>"),
        (".", "a sentence. Another.", "a sentence. Another."),
        ("", "nothing given", "nothing given"),
    ],
)
def test_known_folders_are_taken_out_however_they_are_written(folder, text, expected):
    assert redacted(text, [folder]) == expected
