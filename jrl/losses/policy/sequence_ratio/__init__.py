"""Losses with one ratio for a whole response.

A row is a response here: its ratio needs all of its tokens, so a batch may be cut by rows but
neither along time nor by packing several responses into one row.
"""
