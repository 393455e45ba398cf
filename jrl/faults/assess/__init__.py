"""How often the right machine is named, at what cost, beside what others do."""
