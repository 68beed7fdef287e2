"""The environment: transitions of the working memory, and its rendering into a bounded context."""
