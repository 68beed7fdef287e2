"""Learning from recorded episodes: what was sampled, how likely it was, and what it was worth."""
