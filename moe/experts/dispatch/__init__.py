"""Tokens to the devices of their experts and back, one file for each way."""
