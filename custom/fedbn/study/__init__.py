"""Methods against each other: comparisons, selection, leave-one-site-out, baselines."""
