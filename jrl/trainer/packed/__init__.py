"""Sequence packing: assignment of rows to bins and micro-batches, and packed scoring passes."""
