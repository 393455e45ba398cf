"""Chat with a policy: a conversation in this process, its terminal, and the page of the server."""
