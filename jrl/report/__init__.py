"""What people look at: what each metric means, the terminal, plots."""
