"""Tokens and where they stand in a text; special tokens that a text spells and does not mean."""
