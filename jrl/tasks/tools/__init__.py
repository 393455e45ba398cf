"""Tools that a policy may call in a conversation, and the formats of tool calls."""
