"""Context parallelism over ``cp``: all-gather, ring attention or Ulysses, and the choice between
them."""
