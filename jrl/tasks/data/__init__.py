"""Datasets of prompts: files, records, lists of examples, and held-out splits."""
