"""What is learned from what: a task knows one kind of data, its batches and its scores."""
