"""A recording proxy: the routes of OpenAI and Anthropic in front of a model, every call kept with its tokens."""
