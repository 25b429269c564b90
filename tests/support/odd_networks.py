"""Networks of a researcher's own, each with an entry that most networks do not have."""

import torch
from torch import nn
from torch.nn import functional

N_FEATURES = 66


class Net(nn.Module):
    """One hidden layer with batch norm, which the networks below change."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(N_FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.classifier = nn.Linear(8, 2)

    def forward(self, x):
        return self.classifier(self.middle(torch.relu(self.norm(self.hidden(x)))))

    def middle(self, x):
        return x


class EmptyBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("e", torch.zeros(0))
        self.register_buffer("rows", torch.zeros(0, 3).t())


class EmptyParameter(Net):
    def __init__(self):
        super().__init__()
        self.e = nn.Parameter(torch.zeros(2, 0))


class OfAnotherWidth(Net):
    """A layer whose entries have another dtype."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8).to(self.dtype)

    def middle(self, x):
        return self.inner(x.to(self.dtype)).float()


class BFloat16(OfAnotherWidth):
    dtype = torch.bfloat16


class Float16(OfAnotherWidth):
    dtype = torch.float16


class Float64(OfAnotherWidth):
    dtype = torch.float64


class BFloat16Norm(Net):
    """Batch norm alone is narrow."""

    def __init__(self):
        super().__init__()
        self.norm.to(torch.bfloat16)

    def forward(self, x):
        return self.classifier(self.norm(self.hidden(x).bfloat16()).float())


class Complex64(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 8)

    def middle(self, x):
        return (x.to(self.inner.dtype) @ self.inner).abs().float()


class Complex128(Complex64):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(self.inner.detach().to(torch.complex128))


class WeightNorm(Net):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.utils.weight_norm(self.hidden)


class SpectralNorm(Net):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.utils.spectral_norm(self.hidden)


class ParametrizedNorms(Net):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.utils.parametrizations.weight_norm(self.hidden)
        self.classifier = torch.nn.utils.parametrizations.spectral_norm(self.classifier)


class OwnNorm(nn.Module):
    """Batch norm by a module that is none of PyTorch's."""

    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n))
        self.beta = nn.Parameter(torch.zeros(n))
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.var, self.gamma, self.beta, self.training)


class NoStatistics(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


class NoEntries(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False, track_running_stats=False)


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LazyBatchNorm1d()


class OwnBesideStock(Net):
    def __init__(self):
        super().__init__()
        self.own = OwnNorm(8)

    def middle(self, x):
        return self.own(x)
