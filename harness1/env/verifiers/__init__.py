"""Who judges claims."""
