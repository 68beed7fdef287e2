"""Synthetic worlds: corpora with known evidence at any size, without any data."""

from harness1.data.world.generate import World, build_world, world_source

__all__ = ["World", "build_world", "world_source"]
