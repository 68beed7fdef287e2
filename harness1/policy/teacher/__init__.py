"""The oracle teacher: an example to imitate."""
