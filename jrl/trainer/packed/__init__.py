"""Passes over packed rows: what goes where, how many passes, and scores from them."""
