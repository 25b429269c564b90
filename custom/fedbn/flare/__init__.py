"""The only part of fedbn that imports NVFlare: learner, aggregator, filters, workflow, persistor."""
