"""Which backend serves a buffer, and why not the others."""
