"""From a folder of images to an image store, at each hospital."""
