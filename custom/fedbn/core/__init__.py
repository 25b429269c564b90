"""The method as pure tensor functions: it knows no site, no store and no transport."""
