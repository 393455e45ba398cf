"""A run of several processes: how they meet, what they agree on, how they end."""
