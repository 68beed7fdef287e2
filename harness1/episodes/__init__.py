"""Policies meet environments: one episode, many in stages or processes, and replay."""
