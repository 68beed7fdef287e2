"""HTTP: a client that returns faults as values, model endpoints, and chat completions."""
