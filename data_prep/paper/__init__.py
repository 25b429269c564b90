"""The image sets of the FedBN paper: readers, its splits, and stores of them."""
