"""Path of a network in bundles that version 0.1 exported; goes in version 0.3."""

from fedbn.tasks.connectome.network import ConnectomeMLP as ConnectomeMLP
