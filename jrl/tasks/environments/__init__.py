"""Tasks whose prompts begin a conversation: an environment answers what the policy says."""
