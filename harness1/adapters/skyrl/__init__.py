"""Export of episodes to SkyRL's trainer."""
