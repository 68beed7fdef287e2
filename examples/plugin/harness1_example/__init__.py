"""An example of a plugin for harness1."""
