"""Reading of requests: arguments, messages, tools and sampling parameters; items of responses."""
