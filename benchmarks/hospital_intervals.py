"""How often the intervals of a comparison are wrong, where the truth is known.

Twelve hospitals of the sizes of ABIDE's. Two methods are ridge regressions on features of their
own, which are equally informative but for what the scenario adds to the second. A method's one
model is fitted to the training folds of all hospitals, each of which counts the same, so that
hospitals share models and any two folds share training subjects, as in a federation. Hospitals
differ in how much each feature says, also where there is no difference in the mean over hospitals.

The truth is that over new hospitals, subjects and folds: zero where there is no difference, by
symmetry; otherwise the mean of the estimates over all studies, each of which is unbiased for it.
An interval of 95 % should be wrong in 5 % of the studies.

Run: ``python benchmarks/hospital_intervals.py [--studies 1000] [--seed 0]``
"""

import argparse
from collections import defaultdict

import numpy as np

from fedbn.study import paired
from fedbn.study.over_sites import hierarchical_bootstrap, over_sites

SIZES = (164, 71, 56, 50, 32, 27, 24, 24, 21, 20, 20, 18)
FOLDS, SEEDS, DRAWS = 5, 3, 400
SCENARIOS = {"none": 0.0, "at every hospital": 1.0, "at half of them": 0.5}
EXTRA = 0.5  # of the second method's signal, where it has more
MODELS = {"stable (10 features)": 10, "unstable (100 features)": 100}
HOSPITAL = np.repeat(np.arange(len(SIZES)), SIZES)


def draw_study(
    rng: np.random.Generator, share: float, width: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw all subjects' classes (n,), and both methods' features (n, width)."""
    signal = 0.9 / np.sqrt(width)
    y = rng.choice([-1.0, 1.0], len(HOSPITAL))
    features = []
    for method in range(2):
        says = signal * (1 + rng.standard_normal((len(SIZES), width)))
        if method == 1:
            says += EXTRA * signal * (rng.random(len(SIZES)) < share)[:, None]
        noise = rng.standard_normal((len(y), width))
        features.append(noise + y[:, None] * says[HOSPITAL])
    return y, features


def right(x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Return whether each subject is classified correctly when held out (n,)."""
    weighted = x / np.array(SIZES)[HOSPITAL, None]
    gram, target = weighted.T @ x, weighted.T @ y
    found = np.empty(len(y))
    for k in range(FOLDS):
        test = fold == k
        left_gram = gram - weighted[test].T @ x[test] + np.eye(x.shape[1])
        model = np.linalg.solve(left_gram, target - weighted[test].T @ y[test])
        found[test] = (x[test] @ model > 0) == (y[test] > 0)
    return found


def study(rng: np.random.Generator, share: float, width: int) -> dict[str, tuple[float, ...]]:
    """Run one comparison; return each interval as (estimate, low, high), of a test (p,)."""
    y, features = draw_study(rng, share, width)
    by_seed, by_fold = [], []
    for _ in range(SEEDS):
        fold = np.concatenate([rng.permutation(n) % FOLDS for n in SIZES])
        first, second = (right(x, y, fold) for x in features)
        cell = HOSPITAL * FOLDS + fold
        sums = np.bincount(cell, weights=second - first) / np.bincount(cell)
        by_fold.append(sums.reshape(len(SIZES), FOLDS))
        by_seed.append(second - first)
    runs, units = np.stack(by_fold, axis=1), np.stack(by_seed)
    plain, found = (over_sites(runs, 1 / (FOLDS - 1), models_vary=vary) for vary in (False, True))
    macro = paired.compare(runs.mean(axis=0).ravel(), 1 / (FOLDS - 1))
    split = np.cumsum(SIZES)[:-1]
    weighted = hierarchical_bootstrap(
        np.split(units, split, axis=1), DRAWS, int(rng.integers(2**31))
    )
    return {
        "t over hospitals, plain": (plain.mean, plain.low, plain.high),
        "t over hospitals": (found.mean, found.low, found.high),
        "Wilcoxon over hospitals": (found.wilcoxon_p,),
        "bootstrap, weighted": weighted,
        "t over folds": (macro.mean, macro.low, macro.high),
    }


def main() -> None:
    """Print a table: scenario and interval, wrong in %, and how often it leaves zero out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{given.studies} studies a row; the standard error of 5 % is "
          f"{100 * (0.05 * 0.95 / given.studies) ** 0.5:.1f}")  # fmt: skip
    print("| models | true difference | interval | truth, points | wrong, % | leaves zero out, % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for models, width in MODELS.items():
        for scenario, share in SCENARIOS.items():
            rng = np.random.default_rng((given.seed, width, int(2 * share)))
            found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
            for _ in range(given.studies):
                for name, interval in study(rng, share, width).items():
                    found[name].append(interval)
            for name, values in found.items():
                print(row(models, scenario, name, np.array(values), share), flush=True)


def row(models: str, scenario: str, name: str, values: np.ndarray, share: float) -> str:
    """Write one line of the table."""
    if values.shape[1] == 1:
        shown = 100 * float(np.mean(values[:, 0] < 0.05))
        wrong, truth = (f"{shown:.1f}" if share == 0 else ""), ""
    else:
        true = 0.0 if share == 0 else float(values[:, 0].mean())
        wrong = f"{100 * float(np.mean((values[:, 1] > true) | (values[:, 2] < true))):.1f}"
        shown = 100 * float(np.mean((values[:, 1] > 0) | (values[:, 2] < 0)))
        truth = f"{100 * true:+.1f}"
    return f"| {models} | {scenario} | {name} | {truth} | {wrong} | {shown:.1f} |"


if __name__ == "__main__":
    main()
