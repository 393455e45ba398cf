"""What an evaluation shows while it goes on, and at its end."""
