"""Compiled functions of a pool of slots: admission, decoding steps and token sampling."""
