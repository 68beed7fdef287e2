"""Episodes as SkyRL's trainer takes them."""
