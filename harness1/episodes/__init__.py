"""Play an episode and replay it (`rollout`), play many (`jobs`), and record single ones (`single`)."""
