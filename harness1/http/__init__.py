"""The one way over HTTP: a client with faults as values, the endpoint of a model, and completions."""
