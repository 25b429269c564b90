"""What NVFlare runs: learner, aggregator, filters, workflow, persistor; nothing else imports it."""
