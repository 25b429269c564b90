"""What a hospital runs before any federation: from scans to a site store of connectomes."""
