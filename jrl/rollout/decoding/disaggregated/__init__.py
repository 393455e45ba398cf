"""Slots whose attention and experts have devices of their own: what differs from one mesh."""
