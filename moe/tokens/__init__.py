"""A batch as the network runs it: one flat stream, in an order whose shards are fair."""
