"""The router: which experts a token is sent to, how even that is made, what is dropped."""
