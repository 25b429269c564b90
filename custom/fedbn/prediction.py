"""Path of a function in bundles that version 0.1 exported; goes in version 0.3."""

from fedbn.report.prediction_files import run_bundle as run_bundle
