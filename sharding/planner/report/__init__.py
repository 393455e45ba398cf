"""Reports of a search, as text and as a picture."""
