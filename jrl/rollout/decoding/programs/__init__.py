"""What the device runs for a pool of slots: rows come in, all go on, tokens are drawn."""
