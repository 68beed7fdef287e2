"""The environment: working memory, its transitions, and the rendering of it into a bounded context."""
