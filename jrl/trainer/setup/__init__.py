"""What is fixed in a run: made from its configuration, checked, shown."""
