"""What a search found, in words and as a picture."""
