"""The composite terminal reward: one named, capped component per file, and their composition."""
