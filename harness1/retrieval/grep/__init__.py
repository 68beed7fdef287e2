"""Regular expressions over the segments of an index."""
