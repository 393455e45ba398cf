"""What people say of a run: its settings, flags, the file they are kept in, errors as one line."""
