"""What a report shows of a task besides its metrics: one module a family of tasks."""
