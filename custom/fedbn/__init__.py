"""Federated learning in which every hospital keeps its own batch norm (FedBN, ICLR 2021)."""

__version__ = "0.2.0"
