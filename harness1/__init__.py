"""A stateful search-agent environment: one structured tool action per turn, memory kept by the harness."""
