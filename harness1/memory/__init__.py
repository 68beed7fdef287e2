"""Working memory and its parts: plain values that only tools change."""
