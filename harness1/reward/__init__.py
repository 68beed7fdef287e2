"""The composite terminal reward: named, capped components and their composition."""
