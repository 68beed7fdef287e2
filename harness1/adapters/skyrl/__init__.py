"""Training by SkyRL: on episodes that its trainer asks for, or on exported ones."""
