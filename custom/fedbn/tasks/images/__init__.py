"""Images: what is learned from masks and from classes of whole images."""
