"""From memory and turns to a context within its budget."""
