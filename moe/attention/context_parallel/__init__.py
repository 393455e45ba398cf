"""Attention across ``cp``: gather, ring or Ulysses, and the choice between them."""
