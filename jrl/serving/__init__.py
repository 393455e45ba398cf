"""Server of a policy with an OpenAI-compatible API."""
