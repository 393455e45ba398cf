"""A batch as the network runs it: packed, in zig-zag order, and aligned to the tokens again."""
