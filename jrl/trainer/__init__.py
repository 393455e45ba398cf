"""What learns: set up, collect, update, evaluate, and the loop around them."""
