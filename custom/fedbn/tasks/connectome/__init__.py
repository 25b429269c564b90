"""Two classes from connectomes: the only room that knows edges, ROIs, windows and atlases."""
