"""Working memory, and its parts: plain values, changed by tools alone."""
