"""Tokens with their offsets in a text; special tokens that a text spells as data."""
