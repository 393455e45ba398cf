"""What a policy may call in a conversation, and how its calls are written."""
