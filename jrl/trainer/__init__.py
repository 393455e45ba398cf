"""Trainer: setup, collection, updates, evaluation, and the training loop around them."""
