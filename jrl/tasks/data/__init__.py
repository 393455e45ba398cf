"""Prompts that are given: files, records, lists of examples, and what is held out of them."""
