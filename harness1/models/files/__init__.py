"""Models as files: fetching, converting and checking them."""
