"""Training of a classifier on tensors, for tests that are about the training alone."""

from fedbn.core.batches import TensorSamples
from fedbn.core.training import train_epochs
from fedbn.tasks.connectome.task import ConnectomeTask


def train_classifier(model, inputs, targets, settings, **more):
    samples = TensorSamples(inputs, targets)
    loss = ConnectomeTask().criterion(settings, samples)
    return train_epochs(model, samples, settings, loss=loss, **more)
