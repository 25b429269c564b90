"""Which inputs spoke for a class, sample by sample: integrated gradients.

Sundararajan, Taly and Yan, ICML 2017 (arXiv 1703.01365), equation 1: along the straight line from a
baseline to a sample, the gradient of the log odds is averaged, and multiplied by how far each input
is from its baseline. The attributions of a sample then add up to the difference of its log odds and
the baseline's (completeness), whatever the network. For standardised features the natural baseline
is zero: the mean training subject of the site.

Unlike a gradient alone, this counts what lies between: a ReLU that the sample has switched on or
off does not hide an input, and batch norm's offset is the baseline's and nobody's attribution.

captum has the same method. On 1640 connectomes of 6105 edges it takes seven times as long with as
many steps, because a first linear layer is not taken out of the integral (:func:`_divided`), and
its number of steps is chosen by the caller, not by how far each sample's attributions add up.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedbn.core.mlp import MLP

POSITIVE = 1
"""Index of the class for which inputs speak."""

FEWEST_STEPS = 16
MOST_STEPS = 4096
_NUMBERS = 2**21  # of points on the lines that go through the network at a time, in doubles


@dataclass(frozen=True)
class Attribution:
    """What each input of each sample added to the log odds of the positive class.

    Attributes
    ----------
    values
        float64, shape of the inputs, (n, ...), in log odds: above zero speaks for the class.
    log_odds
        float64, (n,), natural logarithm: of each sample.
    baseline_log_odds
        Of the baseline.
    """

    values: np.ndarray
    log_odds: np.ndarray
    baseline_log_odds: float

    @property
    def gap(self) -> np.ndarray:
        """How far each sample's attributions are from adding up, in log odds, (n,)."""
        total = self.values.reshape(len(self.values), -1).sum(axis=1)
        difference: np.ndarray = total - (self.log_odds - self.baseline_log_odds)
        return difference


def integrated_gradients(
    network: nn.Module,
    inputs: torch.Tensor,
    baseline: torch.Tensor | None = None,
    *,
    tolerance: float = 1e-3,
) -> Attribution:
    """Attribute each sample's log odds of the positive class to its inputs.

    Parameters
    ----------
    network : torch.nn.Module
        Gives logits (n, 2), the positive class last. Not changed: a copy in double precision and
        eval mode is differentiated, so that batch norm uses its running statistics and dropout is
        off.
    inputs : torch.Tensor
        Shape (n, ...), ``n >= 1``, as the network takes them.
    baseline : torch.Tensor, optional
        Shape (...), of one sample; by default zero, the mean of standardised features.
    tolerance : float
        Largest :attr:`Attribution.gap`, relative to the log odds' difference where that is more
        than 1. The line is cut into 16 steps, and into twice as many for each sample that needs
        more.

    Returns
    -------
    Attribution

    Raises
    ------
    ValueError
        If there is no sample, the baseline has another shape, or the output is not (n, 2).
    ArithmeticError
        If 4096 steps are not enough, or a log odds is not finite.
    """
    if len(inputs) == 0:
        raise ValueError("there is no sample to attribute")
    parameter = next(network.parameters(), None)
    device = inputs.device if parameter is None else parameter.device
    x = inputs.detach().to(device, torch.float64)
    start = torch.zeros_like(x[0])
    if baseline is not None:
        start = baseline.detach().to(device, torch.float64)
    if start.shape != x.shape[1:]:
        raise ValueError(
            f"the baseline has shape {tuple(start.shape)}, a sample {tuple(x.shape[1:])}"
        )
    first, rest = _divided(_copied(network).double().eval().requires_grad_(False))
    with torch.no_grad():
        inner, inner_start = first(x), first(start[None])[0]
        log_odds = torch.cat([_log_odds(rest, rows) for rows in inner.split(_points(inner))])
        of_baseline = _log_odds(rest, inner_start[None])[0]
    difference = log_odds - of_baseline
    if not bool(torch.isfinite(difference).all()):
        raise FloatingPointError("the network gives no finite score for a sample to attribute")
    allowed = tolerance * difference.abs().clamp(min=1)
    values = torch.empty_like(x)
    left, n_steps = torch.arange(len(x), device=device), FEWEST_STEPS
    while len(left):
        if n_steps > MOST_STEPS:
            raise ArithmeticError(
                f"the attributions of {len(left)} of {len(x)} samples do not add up to within "
                f"{tolerance:g} after {MOST_STEPS} steps; allow a larger tolerance"
            )
        for k in left.split(max(1, _points(inner) // n_steps)):
            gradient = _mean_gradient(rest, inner_start, inner[k], n_steps)
            if isinstance(first, nn.Linear):
                gradient = gradient @ first.weight
            values[k] = (x[k] - start) * gradient
        gap = (values[left].flatten(1).sum(dim=1) - difference[left]).abs()
        left, n_steps = left[gap > allowed[left]], 2 * n_steps
    return Attribution(values.cpu().numpy(), log_odds.cpu().numpy(), float(of_baseline))


def _copied(network: nn.Module) -> nn.Module:
    """Copy a network that has been trained.

    ``torch.nn.utils.weight_norm`` and ``spectral_norm`` keep a weight that was computed with a
    graph, which cannot be copied; each forward pass computes it again.
    """
    kept = [v for module in network.modules() for v in vars(module).values()]
    computed = {id(v): v.detach() for v in kept if isinstance(v, torch.Tensor)}
    return copy.deepcopy(network, computed)


def _divided(network: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Divide a network into a linear map, where it begins with one, and the rest.

    A linear map takes a straight line to a straight line, so that the gradient is averaged behind
    it, over 16 numbers in place of thousands, and is carried back once.
    """
    if not isinstance(network, MLP):
        return nn.Identity(), network
    linear, *of_first = next(iter(network.hidden)).children()
    return linear, nn.Sequential(*of_first, *list(network.hidden)[1:], network.classifier)


def _log_odds(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the log odds of the positive class of each sample, (n,)."""
    logits = network(inputs)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or logits.shape[1] != 2:
        raise ValueError("attribution needs a network that gives logits (n, 2)")
    difference: torch.Tensor = logits[:, POSITIVE] - logits[:, 1 - POSITIVE]
    return difference


def _mean_gradient(
    network: nn.Module, start: torch.Tensor, end: torch.Tensor, n_steps: int
) -> torch.Tensor:
    """Average the gradient over the middles of equal steps from a baseline to each sample."""
    total = torch.zeros_like(end)
    share = (torch.arange(n_steps, dtype=end.dtype, device=end.device) + 0.5) / n_steps
    for part in share.split(max(1, _points(end) // len(end))):
        weight = part.view(-1, 1, *[1] * start.ndim)
        points = (start + weight * (end - start)).flatten(0, 1).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(_log_odds(network, points).sum(), points)
        total += gradient.view(len(part), *end.shape).sum(dim=0)
    return total / n_steps


def _points(like: torch.Tensor) -> int:
    """Return how many samples of this shape go through the network at a time."""
    return max(1, _NUMBERS // like[0].numel())
