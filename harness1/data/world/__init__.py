"""Synthetic worlds: corpora with known evidence at any size, generated without data."""

from harness1.data.world.generate import SyntheticWorld, build_world, world_source

__all__ = ["SyntheticWorld", "build_world", "world_source"]
